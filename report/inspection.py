"""What data look like once they are tokenised: as text for a terminal, as a page, and as JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from data.set_figures import PERCENTILES, Overlap, SetFigures
from data.shown_examples import Piece, ShownExample, ShownText
from report.formatting import on_terminal, printable
from report.page import page_template

LINE = 80  # columns of a text without a terminal
LEFT_OUT = 240  # pieces of a prompt that a terminal shows; the rest is in the middle, and in the page
COLOURS = {"prompt": ("34", "94"), "scored": ("32", "92"), "cut": ("31;9", "91;9")}  # of every other token
MARKS = {"prompt": ("", ""), "scored": ("", ""), "cut": ("{cut: ", "}")}


@dataclass(frozen=True)
class Problem:
    """Something to know before training. error: it would spoil the run or its evaluation, so it fails a pipeline."""

    text: str
    error: bool = False


@dataclass
class Inspection:
    """What was found. titles: name and value of what was inspected (model, loss, template)."""

    titles: dict[str, str]
    examples: list[ShownExample] = field(default_factory=list)
    sets: list[SetFigures] = field(default_factory=list)
    overlap: Overlap | None = None
    problems: list[Problem] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        return any(problem.error for problem in self.problems)


def write(inspection: Inspection, path: str) -> None:
    """Write a page (.html) or JSON (.json)."""
    text = as_json(inspection) if path.endswith(".json") else as_page(inspection)
    with open(path, "w", encoding="utf-8", errors="replace") as file:
        file.write(text)


def as_json(inspection: Inspection) -> str:
    return json.dumps(dataclasses.asdict(inspection) | {"failed": inspection.failed}, indent=1, ensure_ascii=False)


def as_page(inspection: Inspection) -> str:
    return page_template("inspection.html").render(
        inspection=inspection,
        made=time.strftime("%Y-%m-%d %H:%M:%S"),
        heads=[head(example) for example in inspection.examples],
        counts=[counts_of(one) for one in inspection.sets],
        facts=[facts_of(one) for one in inspection.sets],
        percentiles=[percentile_name(p) for p in PERCENTILES],
        overlap=overlap_text(inspection.overlap),
        summary=summary,
    )


def as_text(inspection: Inspection) -> str:
    """With colours on a terminal that has them, else with marks. Tokens end at | or where the shade changes."""
    colours = on_terminal(sys.stdout) and not os.environ.get("NO_COLOR")
    width = shutil.get_terminal_size((LINE, 24)).columns if on_terminal(sys.stdout) else LINE
    lines = [f"{name}: {value}" for name, value in inspection.titles.items()]
    if colours:
        shown = (("prompt", "prompt"), ("scored", "scored"), ("cut", "cut away"))
        lines.append("  ".join(painted(word, part, 0) for part, word in shown) + "  \033[7mcontrol token\033[0m")
    else:
        lines.append("| ends a token; [[...]] is a control token; {cut: ...} was left out by max_length")
    for example in inspection.examples:
        lines += ["", head(example)]
        for text in example.texts:
            lines.append(f"  {summary(text)}")
            lines += [f"    {line}" for line in wrapped(text, width - 4, colours)]
    for one in inspection.sets:
        lines += ["", *textwrap.wrap(f"{one.dataset} {one.split}: " + ", ".join(facts_of(one)), width)]
        if one.lengths:
            lines.append("  tokens" + " " * 23 + "".join(f"{percentile_name(p):>9}" for p in PERCENTILES))
            for what, values in one.lengths.items():
                lines.append(f"  {what:<29}" + "".join(f"{value:>9,}" for value in values))
        lines += [f"  {line}" for line in counts_of(one)]
    if inspection.overlap is not None:
        lines += ["", *textwrap.wrap(overlap_text(inspection.overlap), width)]
    lines.append("")
    for problem in inspection.problems:
        lines.append(f"{'error' if problem.error else 'note'}: {printable(problem.text)}")
    errors = sum(problem.error for problem in inspection.problems)
    lines.append(f"{errors} errors, {len(inspection.problems) - errors} notes")
    return "\n".join(lines)


def head(example: ShownExample) -> str:
    """The line above an example."""
    weight = f", weight {example.weight:g}" if example.weight != 1 else ""
    dropped = ", ".join(f"{reason.replace('_', ' ')} {number}" for reason, number in example.dropped.items() if number)
    nothing = "" if example.texts else ": nothing of it is trained"
    return f"{example.dataset} train, row {example.row}{weight}{nothing}" + (f" ({dropped})" if dropped else "")


def summary(text: ShownText) -> str:
    """The line above a text."""
    cut = f", {text.cut:,} more cut" if text.cut else ""
    if text.label == "prompt":
        return f"prompt: {text.tokens:,} tokens{cut}"
    kept = [piece for piece in text.pieces if piece.part != "cut"]
    end = f"ends with {kept[-1].text}" if text.ended and kept else "without an end token"
    return f"{text.label}: {text.tokens:,} tokens scored{cut}, {end}"


def wrapped(text: ShownText, width: int, colours: bool) -> Iterator[str]:
    """Lines of at most about `width` columns, broken between pieces and after the text's own line ends."""
    line, columns, part = "", 0, ""
    for number, piece in enumerate(shortened(text.pieces)):
        if not colours and piece is not None and piece.part != part:
            opening = MARKS[part][1] if part else ""
            line, part = line + opening + MARKS[piece.part][0], piece.part
        shown = "[...]" if piece is None else printable(piece.text)
        if piece is not None and not colours:
            shown = f"[[{shown}]]" if piece.control else shown + "|"
        if columns + len(shown) > width and line:
            yield line
            line, columns = "", 0
        if piece is not None and colours:
            line += f"\033[7m{shown}\033[0m" if piece.control else painted(shown, piece.part, number % 2)
        else:
            line += shown
        columns += len(shown)
        if piece is not None and piece.text.endswith("\n"):
            yield line
            line, columns = "", 0
    if part and not colours:
        line += MARKS[part][1]
    if line:
        yield line


def shortened(pieces: list[Piece]) -> list[Piece | None]:
    """The pieces, with None for what is left out of the middle of a long text."""
    if len(pieces) <= LEFT_OUT:
        return list(pieces)
    return [*pieces[: LEFT_OUT // 2], None, *pieces[-LEFT_OUT // 2 :]]


def painted(text: str, part: str, shade: int) -> str:
    return f"\033[{COLOURS[part][shade]}m{text}\033[0m"


def percentile_name(p: int) -> str:
    return {0: "least", 50: "median", 100: "most"}.get(p, f"{p}%")


def facts_of(one: SetFigures) -> list[str]:
    """What a set holds, in a few words each."""
    facts = [
        f"{one.examples:,} examples",
        f"{one.prompts:,} prompts",
        f"{one.responses:,} responses",
        f"{one.tokens:,} tokens",
    ]
    if one.longer is not None:
        facts.append(f"the better response is the longer one in {one.longer:.1%}")
    if one.cut:
        facts.append(f"{one.cut:,} responses cut ({one.cut / one.responses:.1%})")
    if one.repeated:
        facts.append(f"{one.repeated:,} examples equal an earlier one")
    return facts


def counts_of(one: SetFigures) -> list[str]:
    """What was read, dropped, cut and changed on the way."""
    counts = [(name.replace("_", " "), number) for name, number in one.counts.items() if number]
    return [f"{name}: {number:,}" for name, number in counts]


def overlap_text(overlap: Overlap | None) -> str:
    if overlap is None or not overlap.of_prompts:
        return "no held-out data"
    return (
        f"held-out prompts that are in the training data, too: {overlap.prompts:,} of {overlap.of_prompts:,}; whole "
        f"examples: {overlap.examples:,} of {overlap.of_examples:,}"
    )
