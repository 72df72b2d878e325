"""The words of a command line: what they name, and how they are quoted for Hydra."""

import re

# What Hydra's grammar has no place for in a value without quotes.
_NEEDS_QUOTES = re.compile(r"[~=]|[^\x00-\x7f]")


def named_keys(overrides: list[str]) -> list[str]:
    """The keys, sections and groups that overrides name: ["+loss.beta=1", "fsdp=no_shard"] -> ["loss.beta", "fsdp"]."""
    return [override.lstrip("+~").partition("=")[0].split("@")[0] for override in overrides]


def quoted(argument: str) -> str:
    """The argument with quotes around the parts of its value that Hydra could not read without:
    datasets=[a=b.jsonl,~/ä.jsonl] -> datasets=["a=b.jsonl","~/ä.jsonl"]. One that has quotes or braces is left alone.
    """
    key, equals, value = argument.partition("=")
    if not key or not equals or not _NEEDS_QUOTES.search(value) or re.search(r"[\"'\\{}()]|\$", value):
        return argument
    return key + equals + re.sub(r"[^\[\],]+", _quoted_part, value)


def _quoted_part(match: re.Match) -> str:
    part = match[0]
    return f'"{part.strip()}"' if _NEEDS_QUOTES.search(part) else part
