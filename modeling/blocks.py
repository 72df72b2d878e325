"""The transformer blocks of a model: finding them, recomputing their activations, and choosing what is trained."""

from __future__ import annotations

import fnmatch
import functools

import torch


def block_classes(model) -> list[str]:
    """Class names of the repeated modules in a model's module lists, most numerous first."""
    counts: dict[str, int] = {}
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module):
            name = type(module[0]).__name__
            counts[name] = counts.get(name, 0) + len(module)
    return sorted(counts, key=lambda name: -counts[name])


def find_blocks(model, block_name: str | None) -> list[torch.nn.Module]:
    """The transformer blocks of a model, in order.

    Args:
        block_name: class name of a block (model.block_name); None takes the outermost longest list of like modules.
    Raises:
        ValueError: no module has that class.
    """
    if block_name:
        blocks = [module for module in model.modules() if type(module).__name__ == block_name]
        if not blocks:
            raise ValueError(
                f"model.block_name={block_name!r} is no module of {type(model).__name__}; its repeated "
                f"blocks are {', '.join(block_classes(model)) or 'none'}. Set model.block_name=null to "
                "have it found."
            )
        return blocks
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList) and len(module)]
    if not lists:
        raise ValueError(f"{type(model).__name__} has no list of blocks; set model.block_name to the class to wrap.")
    # The layers' list holds most of the parameters; inner lists (experts, say) hold less each.
    layers = max(lists, key=lambda blocks: sum(p.numel() for p in blocks.parameters()))
    return list(layers)


def compile_blocks(blocks: list[torch.nn.Module]) -> None:
    """Compile every block with torch.compile, for rows of any length.

    Done on `forward` itself and before `checkpoint_activations`: torch compiles nothing of a `forward` that begins with
    torch.utils.checkpoint.
    """
    for block in blocks:
        block.forward = torch.compile(block.forward, dynamic=True)


def checkpoint_activations(blocks: list[torch.nn.Module], every: int) -> None:
    """Recompute every n-th block's activations in the backward pass instead of keeping them.

    Done on `forward` itself, so that parameter names stay as they are and any placement can wrap the block after it.
    """
    from torch.utils.checkpoint import checkpoint

    for block in blocks[::every]:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)


def choose_trainable(model, frozen: bool, patterns) -> None:
    """Set which parameters get gradients: none of a frozen model; else all but those whose names match a pattern.

    Args:
        patterns: model.frozen of the config: names with * and ?, such as "model.embed_tokens.*".
    Raises:
        ValueError: a pattern matches no parameter, or nothing is left to train.
    """
    model.requires_grad_(not frozen)
    if frozen:
        return
    named = dict(model.named_parameters())
    for pattern in patterns:
        matching = fnmatch.filter(named, pattern)
        if not matching:
            raise ValueError(
                f"model.frozen: {pattern!r} matches no parameter of {type(model).__name__}; its names are like "
                f"{', '.join(list(named)[:1] + list(named)[-3:])}."
            )
        for name in matching:
            named[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in named.values()):
        raise ValueError(f"model.frozen={list(patterns)} leaves no parameter to train.")
