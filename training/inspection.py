"""Looking at the data of a run before it: `python train.py ... show=5`. Loads a tokenizer and no weights."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from tqdm import tqdm

import settings
from data.options import DataOptions
from data.set_figures import SetFigures, figures, overlap
from data.shown_examples import first_examples
from losses import find_loss
from modeling import loading
from report import inspection as shown
from report import streams
from report.formatting import on_terminal
from report.inspection import Inspection, Problem
from settings import Settings
from training.data_loading import load_datasets
from utils import World

# Above these shares a figure is worth a note, the second if chance gives it in less than one of some 700 sets.
MANY_CUT, LENGTH_TELLS, SURE = 0.05, 0.6, 3.0


class Collected:
    """Takes what loading data reports, instead of a Reporter."""

    def __init__(self) -> None:
        self.notices: list[str] = []

    def notice(self, text: str) -> None:
        if text not in self.notices:
            self.notices.append(text)

    def counts(self, dataset: str, split: str, counts: dict[str, int]) -> None:
        """They come with the data sets."""

    def progress(self, total: int | None, description: str, unit: str = "it", **_: Any):
        import sys

        if not on_terminal(sys.stderr):
            return nullcontext()
        return tqdm(total=total, desc=description, unit=f" {unit}", leave=False, file=sys.stderr, dynamic_ncols=True)


def show(config: Settings) -> bool:
    """Print the first `show` examples of each data set and figures of all of them, and write `show_files`; whether
    nothing is wrong with the data."""
    assert config.show is not None
    found = inspect(config, config.show)
    streams.write_out(shown.as_text(found) + "\n")
    for path in config.show_files:
        shown.write(found, path)
        streams.write_out(f"written: {path}\n")
    return not found.failed


def inspect(config: Settings, n: int) -> Inspection:
    """The first `n` examples of each data set as they would be trained, figures of all of them, and what is wrong.

    Raises:
        ValueError: the tokenizer cannot be found.
    """
    tokenizer = loading.load_tokenizer(config)
    kind = find_loss(config.loss.name, config.loss.options).inputs.kind
    found = Inspection(titles(config, tokenizer))
    if not look(found, config, tokenizer, kind, n) and config.data.on_bad_row == "stop":
        # What is right beside the row that cannot be read is worth seeing, too.
        look(found, settings.replace(config, {"data.on_bad_row": "skip"}), tokenizer, kind, n)
    return found


def look(found: Inspection, config: Settings, tokenizer, kind: str, n: int) -> bool:
    """Add what there is to see; False if a mistake in the data, which is added as an error, ended it."""
    try:
        for name in config.datasets:
            found.examples += first_examples(name, tokenizer, config, kind, n)
        add_figures(found, config, tokenizer, kind)
    except ValueError as error:
        found.examples.clear()
        if str(error) not in [problem.text for problem in found.problems]:
            found.problems.append(Problem(str(error), error=True))
        return False
    return True


def titles(config: DataOptions, tokenizer) -> dict[str, str]:
    template = config.data.chat_template or getattr(tokenizer, "chat_template", None)
    return {
        "tokenizer": f"{tokenizer.name_or_path or type(tokenizer).__name__}, {len(tokenizer):,} tokens",
        "chat template": "none" if not template else config.data.chat_template or "the tokenizer's",
        "lengths": f"max_length {config.max_length:,}, max_prompt_length {config.max_prompt_length:,}",
    }


def add_figures(found: Inspection, config: Settings, tokenizer, kind: str) -> None:
    reporter = Collected()
    datasets, _ = load_datasets(config, tokenizer, kind, World(), lambda: None, reporter)
    found.sets = [figures(dataset) for split in datasets.values() for dataset in split]
    found.overlap = overlap(datasets["train"], datasets["eval"])
    if found.overlap.examples:
        rows = ", ".join(f"row {row} of {name}" for name, row in found.overlap.first)
        found.problems.append(
            Problem(
                f"{found.overlap.examples:,} of {found.overlap.of_examples:,} held-out examples are in the training "
                f"data, too, so that an evaluation measures memory: {rows}. Leave them out of one of the two",
                error=True,
            )
        )
    elif found.overlap.prompts:
        rows = ", ".join(f"row {row} of {name}" for name, row in found.overlap.first)
        found.problems.append(Problem(f"{shown.overlap_text(found.overlap)} ({rows})"))
    found.problems += [Problem(text) for text in reporter.notices]
    for one in found.sets:
        found.problems += notes_of(one)


def notes_of(one: SetFigures) -> list[Problem]:
    """What stands out in the figures of a set."""
    notes = []
    where = f"{one.dataset} {one.split}"
    if one.repeated:
        notes.append(f"{where}: {one.repeated:,} of {one.examples:,} examples equal an earlier one token by token")
    if one.responses and one.cut / one.responses > MANY_CUT:
        notes.append(f"{where}: {one.cut / one.responses:.1%} of the responses are cut; a larger max_length keeps them")
    off = 0.0 if one.longer is None else abs(one.longer - 0.5)
    if one.longer is not None and off > LENGTH_TELLS - 0.5 and 2 * off * one.examples**0.5 > SURE:
        which = "longer" if one.longer > 0.5 else "shorter"
        share = max(one.longer, 1 - one.longer)
        notes.append(
            f"{where}: choosing the {which} response is right in {share:.1%} of {one.compared:,} comparisons, so a "
            "model can learn length instead of quality"
        )
    return [Problem(text) for text in notes]
