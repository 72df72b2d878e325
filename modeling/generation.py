"""Batched sampling from a causal language model while it trains, sharded or not.

Three promises:

- all ranks call forward equally often: they agree every few tokens whether any row still goes on, and a rank without
  prompts feeds a dummy row;
- the continuation of a prompt depends on the model, the seed and the prompt's place in the list; not on the batch it is
  in, not on the number of ranks (floating-point rounding aside);
- nothing is left behind: the global random state, the train/eval mode of every module and the sharding are as they
  were.

The loop is written by hand. transformers' own `generate`, with synced_gpus and a logits processor that draws each row's
token from the row's own seed, was tried in its place (transformers 5.24, torch 2.13, 2026-12-01) and writes the same
texts, also on sharded ranks with different prompts. But

- it went on without a cache where a model accepts one and returns none, and wrote other texts (tests/test_sampling.py:
  19 of 20 tests passed);
- the model's own generation_config (repetition_penalty, suppress_tokens, no_repeat_ngram_size) changes its samples,
  which then are not those that `sampling` in the settings describes;
- recurrent models read the padding of a batch, so each prompt would need a call of its own, without a cache;
- it is no faster: median CPU seconds of 7 runs on one of 2 cores, which others used too, for 16 prompts of 64 to 256
  tokens and 48 new ones each, Llama with 4 layers, 256 wide, vocabulary 32,000: greedy 1.69 against 1.67 for this loop,
  temperature 0.7 2.05 against 2.01, with top_p=0.95 4.46 against 4.21.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

import private_apis
from data.text_encoding import end_of_turn_id
from modeling.rotary import separate_rows
from modeling.sharded import reshard_after_eval
from modeling.text_cache import make_room
from utils import World, all_reduce_sum, gather_objects

# Tokens that end an assistant's turn in common chat templates. A template may close turns with one of them although the
# tokenizer's EOS is another token; it counts as an end only where the model's own template writes it.
END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<turn|>", "<|END_OF_TURN_TOKEN|>")

# Tokens after which the host asks whether all rows have ended. On a GPU the question waits for all work that is queued,
# and what is written behind an end is left off.
TOKENS_BETWEEN_LOOKS = {"cpu": 1, "cuda": 16, "mps": 16}


def generate_samples(model, tokenizer: Any, prompts: Sequence[np.ndarray], **options: Any) -> list[str]:
    """The continuations of `generate_ids` as text; the same arguments."""
    new = generate_ids(model, tokenizer, prompts, **options)
    return [decode(tokenizer, np.asarray(prompt, dtype=np.int64), ids) for prompt, ids in zip(prompts, new)]


def generate_ids(
    model: torch.nn.Module,
    tokenizer: Any,
    prompts: Sequence[np.ndarray],
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    max_new_tokens: int = 128,
    seed: int = 0,
    batch_size: int = 16,
    world: World | None = None,
    device: torch.device | str | None = None,
    shard: tuple[int, int] | None = None,
    notice: Callable[[str], None] = warnings.warn,
) -> list[list[int]]:
    """Continue each prompt and return the tokens of the continuations, in the order of `prompts`, on every rank. The
    token that ends one is left off.

    Args:
        prompts: token ids, one 1-D integer array a prompt, BOS included where the model wants one.
        temperature: divides the logits; 0 takes the most probable token.
        top_p: sample from the smallest set of tokens whose probability reaches it (nucleus sampling, arXiv 1904.09751).
        batch_size: prompts a rank continues at once.
        world: all ranks that call the model's forward together; None means this process alone.
        shard: (index, count) of the part of the prompts that this rank takes, world's rank and size by default. Ranks
            that compute one forward together (tensor parallelism) take the same part.
        notice: called with a message where prompts are cut to fit the model's positions.

    Raises:
        ValueError: a setting is out of range.
    """
    if temperature < 0:
        raise ValueError(f"sampling.temperature={temperature}: must be 0 (greedy) or more")
    if not 0 < top_p <= 1:
        raise ValueError(f"sampling.top_p={top_p}: must be above 0 and at most 1")
    if max_new_tokens < 1 or batch_size < 1:
        raise ValueError(f"sampling.max_new_tokens={max_new_tokens} and batch_size={batch_size} must be 1 or more")
    world = world or World()
    device = torch.device(device or world.device)
    index, count = shard or (world.rank, world.size)
    prompts, max_new_tokens = fit_to_positions(model, tokenizer, prompts, max_new_tokens, notice)

    writer = _Writer(model, tokenizer, temperature, top_p, max_new_tokens, seed, world, device)
    # The same on every rank, whatever its own share.
    rounds = math.ceil(math.ceil(len(prompts) / count) / batch_size)
    written: dict[int, list[int]] = {}
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            for start in range(0, rounds * batch_size, batch_size):
                mine = range(index, len(prompts), count)[start : start + batch_size]
                continuations = writer.continue_rows([(number, prompts[number]) for number in mine])
                written.update(zip(mine, continuations))
    finally:
        for module, training in modes:
            module.training = training
        reshard_after_eval(model)
    if world.size > 1:
        for part in gather_objects(written, world):
            written.update(part)
    return [written[number] for number in range(len(prompts))]


def fit_to_positions(
    model, tokenizer, prompts, max_new_tokens: int, notice: Callable[[str], None]
) -> tuple[list[np.ndarray], int]:
    """Cut prompts from the left so that prompt and continuation stay within the positions that the model knows; an
    empty prompt becomes one BOS (or EOS) token, because a model needs something to read."""
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    limit = getattr(config, "max_position_embeddings", None)  # None: ALiBi or recurrent, no limit
    start = next((token for token in (tokenizer.bos_token_id, tokenizer.eos_token_id) if token is not None), 0)
    rows = [np.asarray(prompt, dtype=np.int64) if len(prompt) else np.array([start]) for prompt in prompts]
    if not limit or not rows:
        return rows, max_new_tokens
    if max_new_tokens >= limit:
        notice(f"samples: max_new_tokens={max_new_tokens} is lowered to {limit - 1}: the model has {limit} positions")
        max_new_tokens = limit - 1
    room = limit - max_new_tokens
    cut = sum(len(row) > room for row in rows)
    if cut:
        notice(
            f"samples: {cut} of {len(rows)} prompts lose their beginning: the model has {limit} positions, "
            f"{max_new_tokens} of which are kept for the continuation (sampling.max_new_tokens)"
        )
    return [row[-room:] for row in rows], max_new_tokens


def stop_token_ids(model, tokenizer) -> set[int]:
    """The ids that end a continuation: EOS by the generation config, the model's config and the tokenizer, and the end
    of a turn."""
    ids: set[int] = set()
    for owner in (getattr(model, "generation_config", None), model.config, tokenizer):
        eos = getattr(owner, "eos_token_id", None)
        ids.update(eos if isinstance(eos, (list, tuple)) else [] if eos is None else [eos])
    template = getattr(tokenizer, "chat_template", None) or ""
    vocabulary = tokenizer.get_vocab()
    ids.update(vocabulary[token] for token in END_OF_TURN if token in str(template) and token in vocabulary)
    end = end_of_turn_id(tokenizer)
    return ids if end is None else ids | {end}


def decode(tokenizer, prompt: np.ndarray, continuation: list[int]) -> str:
    """The continuation as text. Decoding it behind its prompt keeps the leading space that sentencepiece drops at the
    start of a text."""
    head = tokenizer.decode(prompt.tolist(), skip_special_tokens=True)
    whole = tokenizer.decode(prompt.tolist() + continuation, skip_special_tokens=True)
    return whole[len(head) :] if whole.startswith(head) else tokenizer.decode(continuation, skip_special_tokens=True)


def choose_tokens(logits: torch.Tensor, uniform: torch.Tensor, temperature: float, top_p: float) -> torch.Tensor:
    """One token a row by inverting the cumulative distribution, in vocabulary order so that rounding can flip a draw at
    one edge only.

    Args:
        logits: [rows, vocabulary]
        uniform: [rows] numbers in [0, 1), each row's own
    Returns:
        [rows] token ids, on the device of `logits`
    """
    if temperature == 0:
        return logits.argmax(dim=-1)
    device = logits.device
    if device.type == "mps":  # has no float64
        logits, uniform = logits.cpu(), uniform.cpu()
    probabilities = torch.softmax(logits.double() / temperature, dim=-1)
    if top_p < 1:
        ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
        outside = ordered.cumsum(dim=-1) - ordered >= top_p  # what stands before a token already reaches top_p
        probabilities = torch.zeros_like(probabilities).scatter(-1, order, ordered.masked_fill(outside, 0.0))
    cumulative = probabilities.cumsum(dim=-1)
    total = cumulative[:, -1:]
    threshold = torch.minimum(uniform.double().unsqueeze(-1) * total, torch.nextafter(total, torch.zeros_like(total)))
    # The first token whose cumulative probability exceeds the threshold: never one of probability zero.
    tokens = torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)
    return tokens.clamp(max=logits.shape[-1] - 1).to(device)  # the clamp is for logits that are NaN


class _Writer:
    """The token loop of `generate_samples`, with what stays the same from batch to batch."""

    def __init__(self, model, tokenizer, temperature, top_p, max_new_tokens, seed, world: World, device: torch.device):
        self.model, self.world, self.device = model, world, device
        self.temperature, self.top_p, self.max_new_tokens, self.seed = temperature, top_p, max_new_tokens, seed
        self.stops = torch.tensor(sorted(stop_token_ids(model, tokenizer)), dtype=torch.long, device=device)
        # Embedding matrices are padded beyond the tokenizer for speed (Pythia: 50304 against 50277); those rows are no
        # tokens.
        self.vocabulary_size = max(len(tokenizer), max(tokenizer.get_vocab().values()) + 1)
        pads = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        self.pad = next(token for token in pads if token is not None)

        self.between_looks = TOKENS_BETWEEN_LOOKS.get(device.type, 16)
        self.accepted = inspect.signature(model.forward).parameters
        # transformers renamed past_key_values to cache in 5.24.
        names = (name for name in ("cache", "past_key_values") if name in self.accepted)
        self.cache_name: str | None = next(names, None)
        if private_apis.is_recurrent(model):  # its state would have read the padding
            self.cache_name = None
        separate_rows(model)

    def continue_rows(self, rows: list[tuple[int, np.ndarray]]) -> list[list[int]]:
        """New token ids of each (number, prompt), stop tokens left off. No rows: a dummy runs, so that collectives
        match."""
        prompts = [prompt for _, prompt in rows] or [np.array([self.pad])]
        uniform = self._uniforms([number for number, _ in rows])
        # A dummy row is finished before it starts: it never keeps the others going.
        finished = torch.full((len(prompts),), not rows, dtype=torch.bool, device=self.device)
        # A cache holds keys rotated by the frequencies of a shorter text.
        grows = self.model.rotary_rows.scales(max(map(len, prompts)) + self.max_new_tokens)
        step = self._cached_steps if self.cache_name and not grows else self._full_steps
        steps = step(prompts)
        written: list[torch.Tensor] = []
        logits = next(steps)
        while True:
            logits[:, self.vocabulary_size :] = -torch.inf
            tokens = choose_tokens(logits, uniform[:, len(written)], self.temperature, self.top_p)
            finished = finished | (tokens.unsqueeze(1) == self.stops).any(dim=1)
            tokens = torch.where(finished, self.pad, tokens)
            written.append(torch.where(finished, -1, tokens))
            if len(written) == self.max_new_tokens:
                break
            if len(written) % self.between_looks == 0 and not self._anyone_writes(finished):
                break
            logits = steps.send(tokens)
        steps.close()
        table = torch.stack(written, dim=1).tolist() if rows else []
        return [[token for token in row if token >= 0] for row in table]

    def _uniforms(self, numbers: list[int]) -> torch.Tensor:
        """[rows, max_new_tokens] random numbers in [0, 1), each row from a generator of its own, always on the CPU: so
        they are the same on every device and for policy and reference, whose samples then differ only where the models
        do."""
        table = torch.zeros(max(1, len(numbers)), self.max_new_tokens, dtype=torch.float64)
        if self.temperature > 0:
            for row, number in enumerate(numbers):
                mixed = np.random.SeedSequence([self.seed % 2**64, number]).generate_state(1, np.uint64)[0] >> 1
                generator = torch.Generator().manual_seed(int(mixed))
                table[row] = torch.rand(self.max_new_tokens, generator=generator, dtype=torch.float64)
        return table.to(self.device, torch.float32 if self.device.type == "mps" else torch.float64)

    def _anyone_writes(self, finished: torch.Tensor) -> bool:
        writing = (~finished).sum().float()
        return bool(all_reduce_sum(writing, self.world) > 0) if self.world.size > 1 else bool(writing > 0)

    def _call(self, **inputs) -> Any:
        return self.model(**{name: value for name, value in inputs.items() if name in self.accepted})

    def _cached_steps(self, prompts: list[np.ndarray]):
        """Yield next-token logits [rows, vocabulary]; send the tokens chosen. Prompts are padded on the left, so that
        all rows write in the same column; positions count from each prompt's first token."""
        width = max(map(len, prompts))
        input_ids = torch.full((len(prompts), width), self.pad)
        mask = torch.ones(len(prompts), width + self.max_new_tokens, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            input_ids[row, width - len(prompt) :] = torch.from_numpy(prompt)
            mask[row, : width - len(prompt)] = 0
        input_ids, mask = input_ids.to(self.device), mask.to(self.device)
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        self.model.rotary_rows.set_rows([])  # of an earlier pass
        assert self.cache_name is not None
        output = self._call(
            input_ids=input_ids,
            attention_mask=mask[:, :width],
            position_ids=positions[:, :width],
            use_cache=True,
            logits_to_keep=1,
        )
        make_room(getattr(output, self.cache_name, None), self.max_new_tokens - 1)
        while True:
            tokens = yield output.logits[:, -1].float()
            cache = getattr(output, self.cache_name, None)
            if cache is None:  # the model keeps none after all; every rank finds this at the same step
                yield from self._full_steps(prompts, tokens)
                return
            width += 1
            output = self._call(
                input_ids=tokens.unsqueeze(1),
                attention_mask=mask[:, :width],
                position_ids=positions[:, width - 1 : width],
                use_cache=True,
                logits_to_keep=1,
                **{self.cache_name: cache},
            )

    def _full_steps(self, prompts: list[np.ndarray], tokens: torch.Tensor | None = None):
        """Like `_cached_steps` for a model without a usable cache: it reads the whole text again for each token. Texts
        are padded on the right, where a causal or recurrent model does not see the padding."""
        width = max(map(len, prompts)) + self.max_new_tokens
        texts = torch.full((len(prompts), width), self.pad, device=self.device)
        for row, prompt in enumerate(prompts):
            texts[row, : len(prompt)] = torch.from_numpy(prompt).to(self.device)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        rows = torch.arange(len(prompts), device=self.device)
        read = [len(prompt) for prompt in prompts]
        while True:
            if tokens is not None:
                texts[rows, lengths] = tokens
                lengths = lengths + 1
                read = [n + 1 for n in read]
            self.model.rotary_rows.set_rows(read)
            used = max(read)
            mask = (torch.arange(used, device=self.device) < lengths.unsqueeze(1)).long()
            positions = torch.arange(used, device=self.device).expand(len(prompts), -1)
            output = self._call(
                input_ids=texts[:, :used],
                attention_mask=mask,
                position_ids=positions,
                use_cache=False,
                logits_to_keep=lengths - 1,
            )
            # With logits_to_keep the output has a column for each row's last position, else one for every position.
            column = rows if "logits_to_keep" in self.accepted else lengths - 1
            tokens = yield output.logits[rows, column].float()
