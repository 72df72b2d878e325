"""What a run will need before anything is spent: `python train.py ... plan=true`.

No weights are loaded and nothing is trained. trace.py counts a pass of the run on tensors without content; estimate.py
adds what the placement makes of it, data_figures.py the steps and tokens, advice.py what to change when it does not
fit.
What is assumed rather than counted is named below the table.
"""

from __future__ import annotations

from modeling import loading
from modeling.model_check import check_model
from planning.advice import advise
from planning.data_figures import data_figures, whole_run
from planning.estimate import estimate
from planning.plan import Plan, describe
from settings import Settings


def make_plan(config: Settings) -> Plan:
    """The plan of a run, data included where it is at hand, with advice where it does not fit.

    Raises:
        ValueError: model configuration or tokenizer cannot be found, or do not fit each other or max_length.
    """
    tokenizer = loading.load_tokenizer(config)
    check_model(config, tokenizer, weights=False)
    model_config = loading.model_config(config, tokenizer)
    figures, why = None, ""
    try:
        figures = data_figures(config, tokenizer)
    except (ValueError, OSError) as problem:
        why = (str(problem).splitlines() or [type(problem).__name__])[0]
    plan = estimate(config, model_config=model_config, batch=figures.unit if figures else None)
    if plan.fits is False:
        plan.advice = advise(config, plan, model_config)
    if figures:
        plan.examples, plan.steps, plan.tokens = whole_run(config, figures)
        plan.data = figures.source
    else:
        plan.data = f"unknown: data not at hand ({why}); the longest rows allowed are taken"
    return plan


def print_plan(config: Settings) -> None:
    """Print the plan of a run: a table, the total, the verdict and, if it does not fit, what to change."""
    print(describe(config, make_plan(config)))
