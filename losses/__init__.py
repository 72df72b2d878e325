"""Losses as pure functions of response log-probabilities. Nothing here knows a model, a device or the configuration.

    registry.py   @register_loss, and what a loss declares: input, options, metrics, whether it needs a reference
    inputs.py     what a loss is given: ResponseLogps, PairLogps, UnpairedLogps or GroupLogps
    sft.py, pairwise.py, ...   the losses

A new loss is one function in any file of this folder and one yaml in config/loss/. Every module here is imported, so
a new file needs no entry in a list. torch is loaded at the first use only: the settings are checked without it.
"""

import importlib
import pkgutil

from losses.inputs import GroupLogps, PairLogps, ResponseLogps, UnpairedLogps
from losses.registry import BROKEN, LOSSES, Loss, LossOutput, Option, Start, find_loss, register_loss

for _module in pkgutil.iter_modules(__path__):
    try:
        importlib.import_module(f"losses.{_module.name}")
    except Exception as _error:  # whatever a file that somebody is writing raises: find_loss reports it
        BROKEN[f"losses/{_module.name}.py"] = _error

__all__ = [
    "LOSSES",
    "GroupLogps",
    "Loss",
    "LossOutput",
    "Option",
    "PairLogps",
    "ResponseLogps",
    "Start",
    "UnpairedLogps",
    "find_loss",
    "register_loss",
]
