"""Conversations in the layout of the HH data, and back: \n\nHuman: ... \n\nAssistant: ..."""

import re

from data.row_formats import ASSISTANT, HUMAN

_TURN = re.compile(f"({re.escape(HUMAN)}|{re.escape(ASSISTANT)})")


def user_message(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def messages_of_dialogue(dialogue: str) -> list[dict]:
    """The turns of a text in the layout of the HH data, which ends with the assistant's header.

    Turns of one speaker after another become one; text before the first turn is the system's.
    """
    start, *parts = _TURN.split(dialogue[: -len(ASSISTANT)])
    messages = [{"role": "system", "content": start.strip()}] if start.strip() and parts else []
    if not parts:
        return [user_message(start)]
    for name, text in zip(parts[::2], parts[1::2]):
        role = "user" if name == HUMAN else "assistant"
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"] += "\n\n" + text.strip()
        else:
            messages.append({"role": role, "content": text.strip()})
    return messages


def dialogue_text(messages: list[dict]) -> str:
    """A conversation in the layout of the HH data, up to and including the assistant's header."""
    names = {"user": HUMAN, "assistant": ASSISTANT}
    turns = [
        f"{names[message['role']]} {message['content']}" if message["role"] in names else message["content"]
        for message in messages
    ]
    return (
        "".join(turn if turn.startswith("\n\n") or not number else "\n\n" + turn for number, turn in enumerate(turns))
        + ASSISTANT
    )
