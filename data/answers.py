"""Answers and messages that are more than text: tool calls, reasoning, and several turns.

A response is text wherever it is one plain message. One that is more is a list of messages, and goes by its JSON: that
is its text in a PromptGroup, whose `turns` has the messages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from data.files import describe

Answer: TypeAlias = "str | list[dict]"


def answer_of(messages: list[dict], what: str) -> Answer:
    """The answer that messages are: text where they are a single plain one.

    Raises ValueError unless they begin and end with the assistant's.
    """
    for place, message in (("begin", messages[0]), ("end", messages[-1])):
        if message["role"] != "assistant":
            raise ValueError(f"{what} must {place} with an assistant message, not one of role {message['role']!r}")
    if len(messages) == 1 and set(messages[0]) == {"role", "content"}:
        return messages[0]["content"]
    return messages


def text_of_answer(answer: Answer) -> str:
    """What an answer goes by in a PromptGroup."""
    return answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False, sort_keys=True)


def is_blank(answer: Answer) -> bool:
    """Whether there is nothing to learn in an answer."""
    if isinstance(answer, str):
        return not answer.strip()
    return not any(
        message["role"] == "assistant" and (message["content"].strip() or message.get("tool_calls"))
        for message in answer
    )


def turns_of(answers: list[Answer]) -> dict[str, list[dict]]:
    """`PromptGroup.turns` of the answers that are more than text."""
    return {text_of_answer(answer): answer for answer in answers if not isinstance(answer, str)}


# ---- Reading them from rows -----------------------------------------------------------------------------------------


def json_of(value: Any, what: str) -> Any:
    """A value that a file may hold as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        raise ValueError(f"{what} is text that is no JSON: {describe(value)}") from None


def tool_calls_of(value: Any, where: str) -> list[dict]:
    """Tool calls as chat templates read them: [{"type": "function", "function": {"name", "arguments"}}, ...]."""
    calls = json_of(value, f"{where}: tool_calls")
    if not isinstance(calls, (list, tuple)):
        raise ValueError(f"{where}: tool_calls must be a list of calls, not {describe(calls)}")
    found = []
    for number, call in enumerate(calls):
        place = f"{where}: tool_calls[{number}]"
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"].strip():
            raise ValueError(f"{place} must be an object with the name of a function, not {describe(call)}")
        arguments = json_of(function.get("arguments") or {}, f"{place}: arguments")
        if not isinstance(arguments, dict):
            raise ValueError(f"{place}: arguments must be an object, not {describe(arguments)}")
        one = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
        if call.get("id") is not None:
            one["id"] = str(call["id"])
        found.append(one)
    return found


def tools_of(value: Any) -> list[dict]:
    """The column `tools`: a list of JSON schemas of functions, which may be JSON text, as may each of them."""
    tools = json_of(value, "tools")
    if not isinstance(tools, (list, tuple)):
        raise ValueError(f"tools must be a list of functions, not {describe(tools)}")
    found = []
    for number, tool in enumerate(tools):
        tool = json_of(tool, f"tools[{number}]")
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"tools[{number}] must be an object with the name of a function, not {describe(tool)}")
        # A column of structs has a null for every field that another row's tools have.
        found.append(_without_nulls(tool))
    return found


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


# ---- The texts inside -----------------------------------------------------------------------------------------------


def strings_in(value: Any) -> Iterator[str]:
    """All texts in messages or tools, but for the roles of messages and the types of calls."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            if not _is_fixed(value, key):
                yield from strings_in(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from strings_in(inner)


def with_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Messages or tools with `change` applied to the texts of `strings_in`."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {k: inner if _is_fixed(value, k) else with_strings(inner, change) for k, inner in value.items()}
    return [with_strings(inner, change) for inner in value] if isinstance(value, list) else value


def _is_fixed(owner: dict, key: str) -> bool:
    return (key == "role" and "content" in owner) or (key == "type" and "function" in owner)


def names_of(tools: list[dict]) -> list[str]:
    return [tool.get("function", tool)["name"] for tool in tools]


def plain(messages: list[dict]) -> list[dict]:
    """Messages without their tool calls and reasoning."""
    return [{k: v for k, v in each.items() if k not in ("tool_calls", "reasoning_content")} for each in messages]


def _values_in(arguments: Any) -> Iterator[Any]:
    """The texts and numbers that a call's arguments hold, without their names."""
    if isinstance(arguments, (dict, list)):
        for inner in arguments.values() if isinstance(arguments, dict) else arguments:
            yield from _values_in(inner)
    else:
        yield arguments


def missing_in(messages: list[dict], text: str, without: str, reasoning: bool) -> str | None:
    """What a rendered text lacks of the tool calls and, where asked for, of the reasoning of messages; None for
    nothing.

    without: the text of the same conversation with these messages `plain`. What occurs no more often than there was not
    written by the template: it only stands in another message, too.
    """
    squeezed, before = "".join(text.split()), "".join(without.split())

    def lacks(part: Any) -> bool:
        forms = [str(part), json.dumps(part, ensure_ascii=False), json.dumps(part)]
        if isinstance(part, str):
            forms[1:] = [form[1:-1] for form in forms[1:]]
        forms = ["".join(form.split()) for form in forms]
        return all(forms) and all(squeezed.count(form) <= before.count(form) for form in forms)

    for message in messages:
        for call in message.get("tool_calls") or ():
            function = call["function"]
            for part in (function["name"], *_values_in(function["arguments"])):
                if lacks(part):
                    return f"the call of {function['name']} ({str(part)[:60]!r})"
        if reasoning and lacks(message.get("reasoning_content", "").strip()):
            return f"the reasoning {message['reasoning_content'].strip()[:60]!r}"
    return None
