"""Keys and values of a text that is being written, in memory that is set aside once.

The model library's cache is joined anew for each token, which copies all that it holds. Its static cache is written
in place, but each token then attends over all columns, empty ones too, and a layer's length is a tensor on the device.
Here the cache that the model has made of the prompts gets layers with room for what is still to be written. They hand
out the columns in use, and answer all questions as the library's own do.
"""

from __future__ import annotations

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer


def make_room(cache, tokens: int) -> None:
    """Let `tokens` more columns be written into a cache in place, as far as its layers are of kinds known here.

    Recurrent states, shared layers, and caches of a model's own stay as they are.
    """
    if type(cache) is not DynamicCache:
        return
    for index, layer in enumerate(cache.layers):
        kind = {DynamicLayer: _RoomyLayer, DynamicSlidingWindowLayer: _RoomyWindowLayer}.get(type(layer))
        if kind is not None and layer.is_initialized:
            cache.layers[index] = kind(layer, tokens)


class _RoomyLayer(DynamicLayer):
    """A layer whose keys and values, [B, heads, columns, d], are the columns in use of larger tensors."""

    # The library then makes a mask for each token, where it otherwise asks the device whether one is needed.
    is_compileable = True

    def __init__(self, layer: DynamicLayer, tokens: int):
        self.__dict__.update(vars(layer))  # the layer goes on as this one
        self._stop = layer.keys.shape[-2]
        self._all_keys, self._all_values = _with_room(layer.keys, tokens), _with_room(layer.values, tokens)
        self.keys, self.values = self._all_keys[:, :, : self._stop], self._all_values[:, :, : self._stop]

    def update(self, key_states, value_states, *args, **kwargs):
        self.keys, self.values = self._joined(key_states, value_states)
        return self.keys, self.values

    def _joined(self, key_states, value_states) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's keys and values with new ones behind them."""
        first, stop = self._stop - self.keys.shape[-2], self._stop + key_states.shape[-2]
        assert stop <= self._all_keys.shape[-2], "more is written than there is room for"
        self._all_keys[:, :, self._stop : stop] = key_states
        self._all_values[:, :, self._stop : stop] = value_states
        self._stop = stop
        return self._all_keys[:, :, first:stop], self._all_values[:, :, first:stop]


class _RoomyWindowLayer(_RoomyLayer, DynamicSlidingWindowLayer):
    """The same for a sliding window: what has left it stays in memory and is not handed out."""

    def update(self, key_states, value_states, *args, **kwargs):
        keys, values = self._joined(key_states, value_states)
        self.cumulative_length += key_states.shape[-2]
        kept = self.sliding_window - 1
        self.keys, self.values = keys[:, :, -kept:], values[:, :, -kept:]
        return keys, values


def _with_room(tensor: torch.Tensor, tokens: int) -> torch.Tensor:
    """[B, heads, columns, d] with `tokens` more columns, not filled yet."""
    rows, heads, columns, width = tensor.shape
    whole = tensor.new_empty(rows, heads, columns + tokens, width)
    whole[:, :, :columns] = tensor
    return whole
