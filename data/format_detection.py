"""Which format rows have, by their columns, and what columns mean that any of the formats may have beside its own."""

from dataclasses import dataclass
from functools import partial

from data.answers import tools_of
from data.files import describe, named
from data.ranked_rows import (
    PairRule,
    parse_completions,
    parse_nectar,
    parse_rated_response,
    parse_scored,
    parse_ultrafeedback,
)
from data.row_formats import (
    BAD_RESPONSE,
    WEIGHT_ZERO,
    PromptGroup,
    parse_alpaca,
    parse_alpaca_pair,
    parse_completion,
    parse_groups,
    parse_implicit,
    parse_messages,
    parse_orca,
    parse_preferences,
    parse_rejected_response,
    parse_se,
    parse_sharegpt_pair,
    parse_shp,
)
from data.row_values import is_empty, number_of, score_of, text_of

# Columns that change what a row means, whatever its format: refused where they say something.
REFUSED_COLUMNS = {
    "functions": "name it tools, a list of JSON schemas",
    "reasoning_content": "give it as a field of the assistant's message, or in the response as <think>...</think>",
    **dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), "only text is trained on"),
}
LABELS = ("label", "kto_tag")
# A label's text that says how good a response is, rather than, say, its topic.
GOOD = ("true", "1", "1.0", "good", "yes", "chosen", "desirable", "accepted", "preferred")
BAD = ("false", "0", "0.0", "-1", "-1.0", "bad", "no", "rejected", "undesirable")
# Columns that rate the responses of a pair, each by the names that data sets give it.
SCORES = {
    "score_chosen": ("score_chosen", "chosen_score", "chosen_rating", "chosen-rating"),
    "score_rejected": ("score_rejected", "rejected_score", "rejected_rating", "rejected-rating"),
}
SCORE_COLUMNS = ("margin", *SCORES["score_chosen"], *SCORES["score_rejected"])
CONTEXT_COLUMNS = ("system", "tools", "weight", *LABELS, *SCORE_COLUMNS, *REFUSED_COLUMNS)


@dataclass(frozen=True)
class Reading:
    """How the rows of a data set are read.

    Attributes:
        kind: what rows are read for (examples.rows_of): responses, pairs or unpaired.
        rule: which pairs a ranking gives.
        score: the column that rates a row's only response.
        skip_bad: leave rows out that cannot be read, instead of raising an error.
        every_turn: learn all of the assistant's turns in a conversation (SFT), not the last one.
    """

    kind: str = "pairs"
    rule: PairRule = PairRule()
    score: str | None = None
    skip_bad: bool = False
    every_turn: bool = False


def parse_row(parser, has_pairs: bool | None, kind: str, row: dict) -> PromptGroup | str:
    """A row of a format that was recognised by its columns, with what the columns beside them mean.

    has_pairs: whether the format has pairs; None if that depends on the row. kind: what rows are read for.
    """
    for name, advice in REFUSED_COLUMNS.items():
        if not is_empty(row.get(name)):
            raise ValueError(f"column {name} is not supported: {advice}, or leave the column out")
    group = parser(row)
    if isinstance(group, str):
        return group
    if not has_pairs and not group.pairs:
        label = next((found for name in LABELS if (found := verdict(row.get(name))) is not None), None)
        if label is not None and kind != "pairs":
            _label(group, label)
            if kind == "responses" and not label:
                return BAD_RESPONSE
        elif kind != "responses":
            what = "a label that says good or bad (true or false)" if kind == "unpaired" else "a pair"
            raise ValueError(f"this row is without {what}; of losses, sft alone learns from such rows")
    if kind != "responses":  # SFT reads none
        _add_scores(group, row)
    _add_weight(group, row, kind)
    if not is_empty(row.get("tools")):
        _add_tools(group, row["tools"])
    if isinstance(row.get("system"), str):
        system = text_of(row["system"], "system")
        if group.header:  # a dialogue in the layout of HH, which begins with the system's text
            group.prompt = f"{system}{group.prompt}" if system.strip() else group.prompt
        else:
            group.prompt = _with_system(group.prompt, system)
    return group


def verdict(value) -> bool | None:
    """Whether a label says good (True) or bad (False); None where it says neither, as a topic does."""
    word = str(value).strip().lower()
    return True if word in GOOD else False if word in BAD else None


def _label(group: PromptGroup, good: bool) -> None:
    """Make a group's only response an example by itself."""
    if len(group.responses) != 1:
        raise ValueError(f"a label says whether a row's only response is good; this row has {len(group.responses)}")
    group.pairs = [(0, -1) if good else (-1, 0)]
    group.sft_targets = group.sft_targets if good else []


def _add_scores(group: PromptGroup, row: dict) -> None:
    """Take a pair's scores, or how far they lie apart, from the columns beside it."""
    found = {side: next((name for name in of if not is_empty(row.get(name))), "") for side, of in SCORES.items()}
    chosen_column, rejected_column = found["score_chosen"], found["score_rejected"]
    if not chosen_column and not rejected_column and is_empty(row.get("margin")):
        return
    if group.ranked or len(group.pairs) != 1 or -1 in group.pairs[0]:
        given = chosen_column or rejected_column or "margin"
        raise ValueError(f"column {given} rates a chosen and a rejected response, which this row does not have")
    if chosen_column and rejected_column:
        rated = score_of(row[chosen_column], chosen_column), score_of(row[rejected_column], rejected_column)
    elif chosen_column or rejected_column:
        raise ValueError(f"column {chosen_column or rejected_column} has a score, but the other response has none")
    else:
        rated = score_of(row["margin"], "margin"), 0.0  # what a loss reads is the difference
    chosen, rejected = group.pairs[0]
    group.scores = {group.responses[chosen]: rated[0], group.responses[rejected]: rated[1]}


def _add_weight(group: PromptGroup, row: dict, kind: str) -> None:
    """Take the weight of a row's examples, by which their losses are multiplied."""
    weight = row.get("weight")
    number = 1.0 if is_empty(weight) else number_of(weight, "weight")
    if number == 1:
        return
    if kind == "responses":
        raise ValueError(f"weight is {describe(weight)}: loss=sft weighs all rows alike; leave the column out")
    if group.ranked:
        raise ValueError(f"weight is {describe(weight)}: pairs that follow from scores have no weight of their own")
    if number < 0:
        raise ValueError(f"weight is {describe(weight)}: it must not be negative")
    if number == 0:
        group.dropped[WEIGHT_ZERO] = group.dropped.get(WEIGHT_ZERO, 0) + len(group.pairs)
        group.pairs = []
        return
    group.weights = [float(number)] * len(group.pairs)


def _add_tools(group: PromptGroup, value) -> None:
    """Take the functions that the assistant may call, which the chat template writes."""
    if isinstance(group.prompt, str):
        raise ValueError(
            "column tools is written by a chat template, and this prompt is text: give it as a conversation, "
            '[{"role": "user", "content": "..."}]'
        )
    group.tools = tools_of(value)


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
    ("prompt", "responses", "scores"): (parse_scored, True, ("prompt", "responses", "scores")),
    ("instruction", "completions"): (parse_ultrafeedback, True, ("instruction", "input", "completions")),
    ("prompt", "completions"): (parse_completions, True, ("prompt", "completions", "scores", "ranks")),
    ("prompt", "answers"): (parse_nectar, True, ("prompt", "answers")),
    ("messages", "rejected_response"): (parse_rejected_response, True, ("messages", "rejected_response")),
    ("prompt", "responses", "sft_target"): (parse_groups, False, ("prompt", "responses", "pairs", "sft_target")),
    ("prompt", "chosen", "rejected"): (parse_preferences, True, ("prompt", "chosen", "rejected")),
    ("conversations", "chosen", "rejected"): (parse_sharegpt_pair, True, ("conversations", "chosen", "rejected")),
    ("messages", "chosen", "rejected"): (
        partial(parse_sharegpt_pair, name="messages"),
        True,
        ("messages", "chosen", "rejected"),
    ),
    ("instruction", "chosen", "rejected"): (parse_alpaca_pair, True, ("instruction", "input", "chosen", "rejected")),
    ("system", "question", "chosen", "rejected"): (parse_orca, True, ("system", "question", "chosen", "rejected")),
    ("chosen", "rejected"): (parse_implicit, True, ("chosen", "rejected")),
    ("messages",): (parse_messages, False, ("messages",)),
    ("conversations",): (partial(parse_messages, name="conversations"), False, ("conversations",)),
    ("prompt", "completion"): (parse_completion, False, ("prompt", "completion")),
    ("instruction", "output"): (parse_alpaca, None, ("instruction", "input", "output", "history")),
    ("history", "human_ref_A", "human_ref_B", "labels", "score_A", "score_B"): (
        parse_shp,
        True,
        ("history", "human_ref_A", "human_ref_B", "labels", "score_A", "score_B"),
    ),
    ("question", "answers"): (parse_se, True, ("question", "answers")),
}
NAMED = (parse_shp, parse_se)  # whose other columns are known, and mean nothing to a preference
CANONICAL_COLUMNS = sorted(
    {name for _, _, columns in FORMATS.values() for name in columns}
    | {"system", "tools", "response", "label", "weight", "margin", *SCORES}
)
# Columns by which rows of one response each are told from others, if data.score names none.
RATINGS = ("helpfulness", "correctness", "score", "rating", "reward")
# What data sets call the columns that the formats need, for advice about names.
USUAL_NAMES = {
    "prompt": ("question", "instruction", "query", "input", "context"),
    "chosen": ("chosen_response", "preferred", "better", "win", "response_chosen"),
    "rejected": ("rejected_response", "dispreferred", "worse", "lose", "response_rejected"),
    "completion": ("response", "answer", "output", "target", "text_output"),
    "messages": ("conversation", "dialog", "dialogue", "chat"),
}


def detect_format(columns, reading: Reading):
    """(parser, columns it reads) for data with these columns.

    Raises ValueError when no format fits.
    """
    columns, kind, score = set(columns), reading.kind, reading.score
    if score is not None and score in columns:  # of several data sets, those that have it
        rated = ("prompt", "response", score)
        if not columns.issuperset(rated):
            raise ValueError(
                f"data.score={score} rates one response a row, for which columns {', '.join(rated)} are needed; there "
                f"are {named(columns)}"
            )
        return partial(parse_row, partial(parse_rated_response, score), True, kind), (*rated, *CONTEXT_COLUMNS)
    for needed, (parser, has_pairs, reads) in FORMATS.items():
        if not columns.issuperset(needed):
            continue
        if has_pairs is False and kind != "responses":
            labelled = columns & set(LABELS)
            if kind == "unpaired" and not labelled:
                raise ValueError(
                    f"columns {named(columns)} do not say which responses are good: give a column label (true or "
                    "false), name yours with data.columns.label, or choose loss=sft"
                )
            if kind == "pairs":
                if labelled:
                    raise ValueError(
                        f"columns {named(columns)} hold single responses with a label, and no pairs of them; losses "
                        "of such rows are kto, bco and apo_zero_unpaired"
                    )
                raise ValueError(
                    f"columns {named(columns)} hold examples for loss=sft only, and no preferences; other losses need "
                    f"chosen and rejected, or responses and pairs"
                )
        if parser in NAMED:
            return parser, reads
        if reading.every_turn and needed in (("messages",), ("conversations",)):
            parser = partial(parse_messages, name=needed[0], every_turn=True)
        if parser is parse_implicit:
            parser = partial(parse_dialogues, next((each for each in USUAL_NAMES["prompt"] if each in columns), None))
        return partial(parse_row, parser, has_pairs, kind), (*reads, *CONTEXT_COLUMNS)
    rating = next((name for name in RATINGS if name in columns), None)
    if rating and columns >= {"prompt", "response"} and kind != "responses":
        raise ValueError(
            f"columns {named(columns)} rate one response a row: choose the column that ranks them, data.score={rating}"
        )
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
