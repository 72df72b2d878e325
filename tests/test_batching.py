"""Packed and padded micro-batches hold what their definition asks for."""

from functools import partial

import numpy as np
import pytest
import torch
from data_in_memory import Data, flat
from hypothesis import given, settings
from hypothesis import strategies as st

from data.batching import PrefixTree, PromptUnit, pack, pad
from data.sampler import DatasetMixture


def naive_scores(batch, unit_list):
    """(context, target) of every scored token by the definition: prompt and response so far, then the token."""
    return [
        ((*unit.prompt.tolist(), *response[:i].tolist()), int(response[i]))
        for unit in unit_list
        for response in unit.responses
        for i in range(len(response))
    ]


def visible_context(batch, predictor):
    """Tokens that a packed row lets a position see, from its trees, in order."""
    row, cursor = batch.input_ids[0].tolist(), 0
    for tree in batch.trees:
        prompt, start = row[cursor : cursor + tree.prompt], cursor
        cursor += tree.prompt
        if predictor < cursor:
            return tuple(row[start : predictor + 1])
        for n in tree.responses:
            if predictor < cursor + n:
                return (*prompt, *row[cursor : predictor + 1])
            cursor += n
    raise AssertionError(predictor)


unit_lists = st.lists(
    st.tuples(st.integers(1, 6), st.lists(st.integers(1, 5), min_size=1, max_size=4)), min_size=1, max_size=4
)


def build_units(shapes):
    data = Data(
        [(prompt, lengths, [(i, (i + 1) % len(lengths)) for i in range(len(lengths))]) for prompt, lengths in shapes]
    )
    return DatasetMixture([data]).units(np.arange(len(data.examples)))


@given(shapes=unit_lists, share=st.booleans())
@settings(max_examples=80, deadline=None)
def test_packed_rows_hold_what_the_definition_says(shapes, share):
    units = build_units(shapes)
    batch = pack(units, share_prefix=share)
    expected = naive_scores(batch, units)
    assert batch.targets.tolist() == [target for _, target in expected]
    assert [visible_context(batch, p) for p in batch.predictors.tolist()] == [context for context, _ in expected]
    # A position is the number of tokens before it in its own prompt + response.
    for place, position in enumerate(batch.position_ids[0].tolist()):
        assert position == len(visible_context(batch, place)) - 1
    assert batch.input_ids.shape == (1, sum(unit.cost(share) for unit in units))
    assert batch.n_tokens == batch.input_ids.numel() and batch.attention_mask is None
    assert batch.trees == [
        PrefixTree(len(u.prompt), tuple(map(len, rs)))
        for u in units
        for rs in ([u.responses] if share else [[r] for r in u.responses])
    ]


@given(shapes=unit_lists)
@settings(max_examples=80, deadline=None)
def test_padded_rows_hold_what_the_definition_says(shapes):
    units = build_units(shapes)
    batch = pad(units, pad_token_id=0)
    expected = naive_scores(batch, units)
    assert batch.targets.tolist() == [target for _, target in expected]
    width = batch.input_ids.shape[1]
    contexts = [tuple(batch.input_ids[p // width, : p % width + 1].tolist()) for p in batch.predictors.tolist()]
    assert contexts == [context for context, _ in expected]
    rows = [[*unit.prompt.tolist(), *response.tolist()] for unit in units for response in unit.responses]
    assert batch.attention_mask.sum(1).tolist() == list(map(len, rows)) and width == max(map(len, rows))
    for row, ids, mask, positions in zip(rows, batch.input_ids, batch.attention_mask, batch.position_ids):
        assert ids.tolist() == row + [0] * (width - len(row))
        assert mask.tolist() == [1] * len(row) + [0] * (width - len(row))
        assert positions[: len(row)].tolist() == list(range(len(row)))
    assert batch.n_tokens == sum(map(len, rows)) and batch.trees is None


@given(shapes=unit_lists)
@settings(max_examples=40, deadline=None)
def test_what_does_not_depend_on_the_layout(shapes):
    units = build_units(shapes)
    for batch in (pack(units), pack(units, share_prefix=False), pad(units, 0)):
        lengths = [len(response) for unit in units for response in unit.responses]
        assert batch.lengths.tolist() == batch.lengths_list == lengths
        assert batch.response_of.tolist() == flat([i] * n for i, n in enumerate(lengths))
        assert batch.keys == [(0, i) for unit in units for i in unit.response_ids]
        # A pair's two responses, found through the batch, are those of its unit.
        parts = batch.targets.split(lengths)
        found = [(parts[c].tolist(), parts[r].tolist()) for c, r in batch.pairs.tolist()]
        assert found == [(u.responses[c].tolist(), u.responses[r].tolist()) for u in units for c, r in u.pairs]
        assert batch.datasets.tolist() == [0] * len(found)


def test_no_units_make_no_batch():
    assert pack([]) is None and pad([], 0) is None


@pytest.mark.parametrize("prompt, response", [(0, 3), (3, 0)])
def test_an_empty_prompt_or_response_is_never_packed(prompt, response):
    unit = PromptUnit(0, 0, np.ones(prompt, np.int32), [np.ones(response, np.int32)], [0], [(0, -1)])
    for layout in (pack, partial(pad, pad_token_id=0)):
        with pytest.raises(AssertionError):
            layout([unit])


def test_to_moves_every_tensor():
    batch = pack(build_units([(3, [2, 2])])).to("meta")
    assert all(value.device.type == "meta" for value in vars(batch).values() if isinstance(value, torch.Tensor))
    assert batch.lengths_list == [2, 2]
