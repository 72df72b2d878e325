"""The values of a row, checked: text, numbers, lists and conversations, whether a file has them as such or as text.

What is wrong with a value raises ValueError; the caller adds file and line.
"""

import ast
import json
import math
import re
import struct
import warnings

from data.answers import tool_calls_of
from data.files import describe, named

# What begins with a key and has a role was written as a conversation, whatever became of it since.
_FIRST_KEY = re.compile(r"""\s*\[?\s*\{\s*["']\w+["']\s*:""")
_ROLE = re.compile(r"""["'](role|from)["']\s*:""")
LONGEST_LITERAL = 1 << 20  # characters of a Python literal: its parser takes a hundred times the memory of the text
# Fields of a message that are read or refused; others are named in a notice.
MESSAGE_FIELDS = {"role", "content", "from", "value", "weight", "tool_calls", "tool_call_id", "reasoning_content"}
# Other data sets' names for who speaks.
USUAL_ROLES = {
    **dict.fromkeys(("human", "user", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "bot"), "assistant"),
    "system": "system",
    **dict.fromkeys(("observation", "tool_response", "function_response"), "tool"),
}
REFUSED_FIELDS = {
    "function_call": "name it tool_calls, a list of such calls",
    **dict.fromkeys(("reasoning", "thinking"), "name it reasoning_content"),
    "images": "only text is trained on",
    "audio": "only text is trained on",
}


def text_of(value, what: str) -> str:
    """`value` as text that can be encoded, else ValueError."""
    if not isinstance(value, str):
        raise ValueError(f"{what} must be text, not {describe(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{what} has a lone surrogate ({ascii(value[error.start])} at character {error.start}), which "
            f"is not text; repair the file's encoding"
        ) from None
    return value


def column(row: dict, name: str):
    if name not in row:
        raise ValueError(f"column '{name}' is missing; the row has {named(row)}")
    return row[name]


def number_of(value, what: str) -> float:
    if isinstance(value, str):  # csv has no numbers
        try:
            value = float(value)
        except ValueError:
            raise ValueError(f"{what} must be a number, not {describe(value)}") from None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{what} must be a number, not {describe(value)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{what} must be a finite number, not {value}")
    return value


def score_of(value, what: str) -> float:
    """A number that float32 holds, in which scores are kept."""
    number = number_of(value, what)
    try:
        in_float32(number)
    except (OverflowError, struct.error):
        raise ValueError(f"{what} is {number:.3g}, which float32 cannot hold: scale the scores down") from None
    return number


def in_float32(number: float) -> float:
    return struct.unpack("<f", struct.pack("<f", number))[0]


def is_empty(value) -> bool:
    """Whether a value says nothing: null, or nothing inside, also as the text of a csv cell."""
    if isinstance(value, str):
        return value.strip() in ("", "[]", "{}", "null", "None")
    return value is None or (isinstance(value, (list, tuple, dict)) and not value)


def _unwritten(text: str):
    """The list or object that a cell holds as JSON, or as Python writes it; the text itself where it is neither."""
    if not text.lstrip().startswith(("[", "{")):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    if len(text) > LONGEST_LITERAL:
        return text
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know, inside a text
            return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return text


def list_of(value, what: str) -> list:
    if isinstance(value, str):  # csv cells hold lists as text
        value = _unwritten(value)
    if isinstance(value, dict) and value and all(isinstance(each, list) for each in value.values()):
        # A column of structs as some versions of `datasets` serve it: a struct of lists.
        if len({len(each) for each in value.values()}) != 1:
            raise ValueError(f"{what}: its lists differ in length")
        value = [dict(zip(value, entry)) for entry in zip(*value.values())]
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{what} must be a list, not {describe(value)}")
    return list(value)


def messages_of(value, what: str) -> list[dict]:
    """A checked conversation: [{"role", "content"}, ...], with tool_calls, reasoning_content, and the name and
    tool_call_id of a tool's answer where a message has them.

    value: a list of messages, one message, or either of them as the text of a cell.
    """
    messages = []
    for number, message in enumerate(_entries(value, what)):
        where = f"{what}[{number}]"
        if not isinstance(message, dict):
            raise ValueError(f"{where} must be a message with role and content, not {describe(message)}")
        role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
        role = text_of(role, f"{where}: role")
        role = USUAL_ROLES.get(role.lower(), role)
        own: dict = {}
        if role == "function_call":  # ShareGPT's turn that is a call, {"name", "arguments"} as text
            role, own = "assistant", {"tool_calls": tool_calls_of(f"[{content}]", where)}
            content = ""
        for name, advice in REFUSED_FIELDS.items():
            if not is_empty(message.get(name)):
                raise ValueError(f"{where} has {name}, which is not supported: {advice}")
        if message.get("weight") not in (None, 0, 1):
            raise ValueError(f"{where}: weight must be 0 or 1, not {describe(message['weight'])}")
        if isinstance(content, list):
            parts = [
                part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content
            ]
            if any(part is None for part in parts):
                raise ValueError(f"{where}: content has parts other than text, which is not supported")
            content = "".join(text_of(part, f"{where}: content") for part in parts)
        if not is_empty(message.get("tool_calls")):
            own["tool_calls"] = tool_calls_of(message["tool_calls"], where)
        if own and role != "assistant":
            raise ValueError(f"{where} has tool_calls, which only the assistant makes; its role is {role}")
        if not is_empty(message.get("reasoning_content")):
            own["reasoning_content"] = text_of(message["reasoning_content"], f"{where}: reasoning_content")
        if role == "tool":
            own |= {key: str(message[key]) for key in ("name", "tool_call_id") if not is_empty(message.get(key))}
        content = "" if content is None and "tool_calls" in own else text_of(content, f"{where}: content")
        messages.append({"role": role, "content": content, **own})
    if not messages:
        raise ValueError(f"{what} is an empty conversation")
    return messages


def _entries(value, what: str) -> list:
    value = _unwritten(value) if isinstance(value, str) else value
    return [value] if _is_message(value) else list_of(value, what)


def weights_of(value, what: str) -> list:
    """The weight of each message of a conversation that `messages_of` takes; None where a message has none."""
    return [message.get("weight") for message in _entries(value, what)]


def _is_message(value) -> bool:
    return isinstance(value, dict) and any(
        needed <= set(value) for needed in ({"role", "content"}, {"from", "value"}, {"role", "tool_calls"})
    )


def is_conversation(value) -> bool:
    """Whether a value is a conversation rather than text. Raises ValueError for one that was written into a text and
    cannot be read back: trained on as it is, it would teach brackets and quotes."""
    if isinstance(value, str):
        read = _unwritten(value)
        if isinstance(read, str):
            if _FIRST_KEY.match(value) and _ROLE.search(value):
                raise ValueError(
                    f"a conversation written as text that is neither JSON nor Python: {describe(value)}; write it as "
                    f'JSON, [{{"role": "user", "content": "..."}}, ...]'
                )
            return False
        turns = read if isinstance(read, (list, tuple)) else [read]
        return bool(turns) and all(isinstance(turn, dict) and ("role" in turn or "from" in turn) for turn in turns)
    return _is_message(value) or (isinstance(value, (list, tuple)) and (not value or isinstance(value[0], dict)))
