"""Which format rows have, by their columns, and what columns mean that any of the formats may have beside its own."""

from functools import partial

from data.files import describe, named
from data.row_formats import (
    PromptGroup,
    parse_alpaca,
    parse_completion,
    parse_groups,
    parse_implicit,
    parse_messages,
    parse_orca,
    parse_preferences,
    parse_se,
    parse_sharegpt_pair,
    parse_shp,
)
from data.row_values import is_empty, number_of, text_of

# Columns that change what a row means, whatever its format: refused where they say something.
REFUSED_COLUMNS = {
    "tools": "write the tools into the system message",
    "functions": "write the functions into the system message",
    "reasoning_content": "write it into the response as the model writes it, such as <think>...</think>",
    **dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), "only text is trained on"),
}
LABELS = ("label", "kto_tag")
# A label's text that says how good a response is, rather than, say, its topic.
VERDICTS = set("true false 0 1 -1 good bad yes no chosen rejected desirable undesirable accepted preferred".split())
CONTEXT_COLUMNS = ("system", "weight", *LABELS, *REFUSED_COLUMNS)


def parse_row(parser, has_pairs: bool, row: dict) -> PromptGroup | str:
    """A row of a format that was recognised by its columns, with what the columns beside them mean."""
    for name, advice in REFUSED_COLUMNS.items():
        if not is_empty(row.get(name)):
            raise ValueError(f"column {name} is not supported: {advice}, or leave the column out")
    weight = row.get("weight")
    if not is_empty(weight) and number_of(weight, "weight") != 1:
        raise ValueError(f"weight is {describe(weight)}: rows cannot weigh differently; leave the column out")
    if not has_pairs:
        for name in LABELS:
            if _is_verdict(row.get(name)):
                raise ValueError(
                    f"column {name} marks unpaired preferences, which no loss here reads from rows; keep the good "
                    f"responses and leave the column out"
                )
    group = parser(row)
    if isinstance(group, PromptGroup) and isinstance(row.get("system"), str):
        system = text_of(row["system"], "system")
        if group.header:  # a dialogue in the layout of HH, which begins with the system's text
            group.prompt = f"{system}{group.prompt}" if system.strip() else group.prompt
        else:
            group.prompt = _with_system(group.prompt, system)
    return group


def _is_verdict(value) -> bool:
    """Whether a label says good or bad, rather than, say, a topic."""
    return isinstance(value, bool) or value in (0, 1, -1) or str(value).strip().lower() in VERDICTS


def _with_system(prompt, system: str) -> list[dict]:
    """A prompt as a conversation that begins with a system message, if there is one."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not system.strip():
        return messages
    if messages[0]["role"] == "system":
        if messages[0]["content"] != system:
            raise ValueError("the conversation has a system message other than the one in column system; keep one")
        return messages
    return [{"role": "system", "content": system}, *messages]


def parse_dialogues(other: str | None, row: dict) -> PromptGroup | str:
    """{chosen, rejected}; `other`: a column that may be the prompt, for a message about rows without one."""
    try:
        return parse_implicit(row)
    except ValueError as error:
        if other is None:
            raise
        raise ValueError(f"{error}. If column {other} is the prompt: data.columns.prompt={other}") from error


FORMATS = {  # the columns that mark a format -> its parser, whether it has pairs, the columns it reads
    ("prompt", "responses", "pairs"): (parse_groups, True, ("prompt", "responses", "pairs", "sft_target")),
    ("prompt", "responses", "sft_target"): (parse_groups, False, ("prompt", "responses", "pairs", "sft_target")),
    ("prompt", "chosen", "rejected"): (parse_preferences, True, ("prompt", "chosen", "rejected")),
    ("conversations", "chosen", "rejected"): (parse_sharegpt_pair, True, ("conversations", "chosen", "rejected")),
    ("system", "question", "chosen", "rejected"): (parse_orca, True, ("system", "question", "chosen", "rejected")),
    ("chosen", "rejected"): (parse_implicit, True, ("chosen", "rejected")),
    ("messages",): (parse_messages, False, ("messages",)),
    ("conversations",): (partial(parse_messages, name="conversations"), False, ("conversations",)),
    ("prompt", "completion"): (parse_completion, False, ("prompt", "completion")),
    ("instruction", "output"): (parse_alpaca, False, ("instruction", "input", "output", "history")),
    ("history", "human_ref_A", "human_ref_B", "labels", "score_A", "score_B"): (
        parse_shp,
        True,
        ("history", "human_ref_A", "human_ref_B", "labels", "score_A", "score_B"),
    ),
    ("question", "answers"): (parse_se, True, ("question", "answers")),
}
NAMED = (parse_shp, parse_se)  # whose other columns are known, and mean nothing to a preference
CANONICAL_COLUMNS = sorted({name for _, _, columns in FORMATS.values() for name in columns} | {"system"})
# What data sets call the columns that the formats need, for advice about names.
USUAL_NAMES = {
    "prompt": ("question", "instruction", "query", "input", "context"),
    "chosen": ("chosen_response", "preferred", "better", "win", "response_chosen"),
    "rejected": ("rejected_response", "dispreferred", "worse", "lose", "response_rejected"),
    "completion": ("response", "answer", "output", "target", "text_output"),
    "messages": ("conversation", "dialog", "dialogue", "chat"),
}


def detect_format(columns, responses_only: bool):
    """(parser, columns it reads) for data with these columns; `responses_only`: the loss needs no pairs. Raises
    ValueError when no format fits."""
    columns = set(columns)
    for needed, (parser, has_pairs, reads) in FORMATS.items():
        if not columns.issuperset(needed):
            continue
        if not has_pairs and not responses_only:
            raise ValueError(
                f"columns {named(columns)} hold examples for loss=sft only, and no preferences; other losses need "
                f"chosen and rejected, or responses and pairs"
            )
        if parser in NAMED:
            return parser, reads
        if parser is parse_implicit:
            parser = partial(parse_dialogues, next((each for each in USUAL_NAMES["prompt"] if each in columns), None))
        return partial(parse_row, parser, has_pairs), (*reads, *CONTEXT_COLUMNS)
    known = "; ".join(", ".join(needed) for needed in FORMATS)
    raise ValueError(
        f"columns {named(columns)} fit no known format. Known are: {known}. Name yours with "
        f"data.columns, such as {_advice(columns)}"
    )


def _advice(columns: set[str]) -> str:
    """data.columns for columns that go by another usual name, else an example."""
    found = {
        name: next((other for other in others if other in columns), None)
        for name, others in USUAL_NAMES.items()
        if name not in columns
    }
    for needed in (("prompt", "chosen", "rejected"), ("prompt", "completion"), ("messages",)):
        given = [f"data.columns.{name}={found[name]}" for name in needed if name not in columns and found[name]]
        if given and all(name in columns or found[name] for name in needed):
            return " ".join(given)
    return "data.columns.prompt=question data.columns.chosen=good data.columns.rejected=bad"
