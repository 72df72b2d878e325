"""The named data sets (hh, shp, se), and how to add one of your own: write one function and register it, here or in a
module named by data.plugins.

    @register_dataset("xyz", truncation="keep_end")
    def get_xyz(split):
        return {prompt: {"responses": ["good", "bad"], "pairs": [(0, 1)], "sft_target": "good"}}

`split` is 'train' or 'test'; a pair is (index of the chosen response, index of the rejected one). Train on it with
`datasets=[xyz]`. Data that already are in a file need no function: `datasets=[path/to/file.jsonl]`.

The rows of the built-in ones are parsed in data/row_formats.py; data/sources.py opens data sets of every kind, and its
`get_dataset` shows what comes out.
"""

from collections.abc import Callable
from dataclasses import dataclass

from data.row_formats import parse_hh, parse_se, parse_shp

HOLD_OUT_SE = 0.01  # the share of StackExchange that the DPO reference implementation tests on


@dataclass(frozen=True)
class NamedSource:
    """A registered data set: a function of the split, or a parser for the rows of a Hub data set and its copies."""

    name: str
    truncation: str  # keep_start | keep_end: which end of a prompt that is too long stays
    function: Callable | None = None
    hub: str | None = None
    parser: Callable | None = None
    columns: tuple[str, ...] = ()


REGISTRY: dict[str, NamedSource] = {}


def register_dataset(name: str, truncation: str = "keep_end"):
    """Registers `function(split) -> {prompt: {"responses", "pairs", "sft_target"}}` under `name`."""
    if truncation not in ("keep_start", "keep_end"):
        raise ValueError(f"register_dataset({name!r}): truncation={truncation!r}; allowed are keep_start and keep_end")

    def register(function):
        known = REGISTRY.get(name)
        if known and _origin(known.function) != _origin(function):
            raise ValueError(f"register_dataset({name!r}): the name is taken; choose another")
        REGISTRY[name] = NamedSource(name, truncation, function=function)
        return function

    return register


def _origin(function):
    """Where a function was written: the same one imported twice is no conflict."""
    code = getattr(function, "__code__", None)
    return code and (code.co_filename, code.co_name)


REGISTRY["hh"] = NamedSource("hh", "keep_end", hub="Anthropic/hh-rlhf", parser=parse_hh, columns=("chosen", "rejected"))
REGISTRY["shp"] = NamedSource(
    "shp",
    "keep_start",
    hub="stanfordnlp/SHP",
    parser=parse_shp,
    columns=("history", "human_ref_A", "human_ref_B", "labels", "score_A", "score_B"),
)
REGISTRY["se"] = NamedSource(
    "se", "keep_start", hub="HuggingFaceH4/stack-exchange-preferences", parser=parse_se, columns=("question", "answers")
)
