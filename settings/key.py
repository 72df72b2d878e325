"""What one setting may be: its meaning, range and choices, declared beside its type in the schema."""

from dataclasses import Field, dataclass, field, replace
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from settings.messages import show

LARGEST_INTEGER = 2**63 - 1
LARGEST_NUMBER = 3.4e38
KINDS: dict[Any, str] = {
    int: "integer",
    float: "number",
    str: "text",
    bool: "flag",
    tuple: "names",
    list: "list",
    dict: "mapping",
}
WORDS = {
    "integer": "a whole number",
    "number": "a number",
    "text": "text",
    "names": "a list of names",
    "list": "a list of mappings KEY: VALUE",
    "mapping": "a mapping KEY: VALUE",
    "flag": "true or false",
}


@dataclass(frozen=True)
class Key:
    """What a setting may be: one of `choices`, or a `kind` within low..high (bounds included unless `open`)."""

    meaning: str
    kind: str = ""
    choices: tuple = ()
    low: float | None = None
    high: float | None = None
    open: bool = False
    null: bool = False
    optional: bool = False  # may be absent: it exists for some options of its group only, or has a default in code
    may_change: bool = False  # when the run is resumed: it has no influence on the weights
    pinned: bool = False  # null: worked out when a run begins, and kept when it is resumed
    per_node: bool = False  # the processes of one run may have different values

    @property
    def free(self) -> bool:
        """Whether the value is a mapping with keys of the user's."""
        return self.kind == "mapping"

    def describe(self) -> str:
        """What is allowed, for the user."""
        allowed = [show(choice) for choice in self.choices]
        if self.kind:
            text = WORDS[self.kind]
            if self.low is not None:
                text += f" {'above' if self.open else 'from'} {show(self.low)}"
            if self.high is not None:
                text += f" {'and below' if self.open else 'to'} {show(self.high)}"
            elif self.low is not None and not self.open:
                text += " up"
            allowed.append(text)
        if self.null:
            allowed.append("null")
        return allowed[0] if len(allowed) == 1 else ", ".join(allowed[:-1]) + " or " + allowed[-1]

    def admits(self, value: Any) -> bool:
        """Whether a value, as YAML has it, is allowed."""
        if value is None:
            return self.null
        if any(value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in self.choices):
            return True
        if self.kind == "flag":
            return isinstance(value, bool)
        if self.kind == "text":
            return isinstance(value, str) and bool(value)
        if self.kind == "names":
            return isinstance(value, list) and all(isinstance(item, str) and item for item in value)
        if self.kind == "list":
            return isinstance(value, list) and all(isinstance(item, dict) for item in value)
        if self.kind == "mapping":
            return isinstance(value, dict)
        if self.kind in ("integer", "number"):
            if not is_number(value) or (self.kind == "integer" and not isinstance(value, int)):
                return False
            above = self.low is None or (value > self.low if self.open else value >= self.low)
            below = self.high is None or (value < self.high if self.open else value <= self.high)
            return above and below
        return False


def key(meaning: str, **more: Any) -> Any:
    """A field of a settings dataclass. Kind, choices and whether it may be null follow from the field's annotation."""
    return field(metadata={"key": Key(meaning, **more)})


def rest(meaning: str) -> Any:
    """A field that holds all keys of its section that no other field names."""
    return field(metadata={"rest": meaning})


def key_of(declared: Field) -> Key:
    """The key that a field declares, with what its annotation says about it."""
    own: Key = declared.metadata["key"]
    kind, choices, null = kind_of(declared.type)
    return replace(own, kind=kind, choices=choices, null=null and not own.optional)


def kind_of(annotation: Any) -> tuple[str, tuple, bool]:
    """(kind, choices, whether null is allowed) of a type: float, `int | None`, `Literal["auto"] | int`, ..."""
    kinds: list[str] = []
    choices: tuple = ()
    null = False
    for part in get_args(annotation) if get_origin(annotation) in (UnionType, Union) else (annotation,):
        if part is NoneType:
            null = True
        elif get_origin(part) is Literal:
            choices += get_args(part)
        else:
            kinds.append(KINDS[get_origin(part) or part])
    assert len(kinds) <= 1, f"{annotation} is of several kinds"
    return kinds[0] if kinds else "", choices, null


def is_number(value: Any) -> bool:
    """Whether a value is a number that float32 can hold; a whole number may be as large as int64 holds."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) <= (LARGEST_INTEGER if isinstance(value, int) else LARGEST_NUMBER)  # false for nan


def too_large(value: Any) -> bool:
    """Whether a value would be a number but for its size."""
    return isinstance(value, (int, float)) and value == value and not isinstance(value, bool) and not is_number(value)
