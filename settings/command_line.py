"""What the words of a command line name."""


def named_keys(overrides: list[str]) -> list[str]:
    """The keys, sections and groups that overrides name: ["+loss.beta=1", "fsdp=no_shard"] -> ["loss.beta", "fsdp"]."""
    return [override.lstrip("+~").partition("=")[0].split("@")[0] for override in overrides]
