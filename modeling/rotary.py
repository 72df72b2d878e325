"""Rotary position embeddings whose frequencies depend on a row's length, row by row.

Dynamic NTK scaling and LongRoPE (arXiv 2402.13753) rotate a row that is longer than those the model was first trained
on by other frequencies. The model library chooses them once a pass, by the longest row in it, and dynamic scaling keeps
them for the passes after: a row's log-probs would depend on its neighbours. Here each row has the frequencies that it
has alone.
"""

from __future__ import annotations

import functools

import torch

from data.batching import MicroBatch

# Names that configurations, also of models with code of their own, give to such frequencies.
BY_LENGTH = ("dynamic", "longrope", "su")


def length_limit(model) -> int | None:
    """Tokens up to which all rows have the same rotary frequencies; None where length does not matter."""
    return min((_limit(module) for module in _scaled_modules(model)), default=None)


def unknown_scaling(config) -> int | None:
    """Tokens up to which rows have the same frequencies, by the configuration alone; None where length does not matter.

    For models with code of their own, where `length_limit` finds nothing.
    """
    config = config.get_text_config()
    for scaling in (getattr(config, "rope_parameters", None), getattr(config, "rope_scaling", None)):
        for values in _by_kind(scaling).values():
            if (values.get("rope_type") or values.get("type")) in BY_LENGTH:
                limits = values, vars(config)
                found = (limit.get("original_max_position_embeddings") for limit in limits)
                return next((n for n in found if n), None) or config.max_position_embeddings
    return None


def separate_rows(model) -> None:
    """Give a model `rotary_rows`, which tells its rotary modules where each row of a pass lies; once is enough."""
    if not hasattr(model, "rotary_rows"):
        model.rotary_rows = RotaryRows(_scaled_modules(model))


class RotaryRows:
    """The rows of a model's passes that need frequencies of their own.

    Attributes:
        limit: see `length_limit`.
        long: (index in the batch, start, stop) of each row of the present pass that is longer than that.
    """

    def __init__(self, modules: list[torch.nn.Module]):
        self.limit = min(map(_limit, modules), default=None)
        self.long: list[tuple[int, int, int]] = []
        for module in modules:
            module.forward = functools.partial(self._forward, module, module.forward)

    def scales(self, length: int) -> bool:
        """Whether a row of this length has other frequencies than a short one."""
        return self.limit is not None and length > self.limit

    def set(self, batch: MicroBatch) -> None:
        """Call before each pass.

        Raises:
            NotImplementedError: responses of one packed prompt would need it under different frequencies.
        """
        self.long = []
        if self.limit is None:
            return
        if batch.trees is None:
            lengths = [len(unit.prompt) + len(response) for unit in batch.units for response in unit.responses]
            self.set_rows(lengths)
            return
        start = 0
        for tree in batch.trees:
            stop = start + tree.prompt + sum(tree.responses)
            if tree.prompt + max(tree.responses) > self.limit:
                if len(tree.responses) > 1:
                    raise NotImplementedError("its positions are scaled by the length of each row")
                self.long.append((0, start, stop))
            start = stop

    def set_rows(self, lengths: list[int]) -> None:
        """The same for padded rows of these lengths."""
        if self.limit is not None:
            self.long = [(index, 0, n) for index, n in enumerate(lengths) if n > self.limit]

    def _forward(self, module, forward, x, position_ids, *args, **kwargs):
        """A rotary module's own forward, once for all short rows and once for each long one.

        x: gives device and dtype; position_ids: [B or 1, T]. Returns what the module does, tensors [B, T, ...].
        """
        _reset(module)
        if not self.long:
            return forward(x, position_ids, *args, **kwargs)
        assert self.limit is not None
        position_ids = position_ids.expand(len(x), -1)
        # Long rows are clamped here, so that they do not decide for the short ones, and then written over.
        found = forward(x, position_ids.clamp(max=self.limit - 1), *args, **kwargs)
        for index, start, stop in self.long:
            _reset(module)
            row = forward(
                x[index : index + 1, start:stop], position_ids[index : index + 1, start:stop], *args, **kwargs
            )
            for whole, part in zip(_tensors(found), _tensors(row), strict=True):
                whole[index, start:stop] = part[0]
        return found


def _tensors(output) -> tuple[torch.Tensor, ...]:
    return (output,) if isinstance(output, torch.Tensor) else tuple(output)


def _by_kind(values) -> dict[str | None, dict]:
    """RoPE settings by kind of layer; of models with one kind under None."""
    if not isinstance(values, dict):
        return {}
    inner = {kind: value for kind, value in values.items() if isinstance(value, dict)}
    return inner or {None: values}


def _scaled_kinds(module) -> dict[str | None, str]:
    """{kind of layer: type of RoPE} of a rotary module, of the types whose frequencies depend on length."""
    types = getattr(module, "rope_type", None)
    types = types if isinstance(types, dict) else {None: types}
    return {kind: name for kind, name in types.items() if isinstance(name, str) and name in ("dynamic", "longrope")}


def _scaled_modules(model) -> list[torch.nn.Module]:
    return [module for module in model.modules() if _scaled_kinds(module)]


def _limit(module) -> int:
    limits = []
    settings = _by_kind(module.config.rope_parameters)
    for kind, name in _scaled_kinds(module).items():
        longrope = name == "longrope"
        limits.append(settings[kind]["original_max_position_embeddings"] if longrope else module.original_max_seq_len)
    return min(limits)


def _reset(module) -> None:
    """Undo what dynamic scaling has kept of a longer row."""
    for kind, name in _scaled_kinds(module).items():
        if name == "dynamic":
            prefix = "" if kind is None else f"{kind}_"
            setattr(module, f"{prefix}inv_freq", getattr(module, f"{prefix}original_inv_freq"))
            setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)
