"""Tiny random models of the architectures that people train, shared by the tests.

`KINDS[name]` is (model type, settings). `make(name)` builds one: weights are scaled up, because at their usual size a
random model gives every token about the same probability and hides what attention gets wrong.
"""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY = 300
WINDOW = 16  # tokens; shorter than the rows that the tests use

_LLAMA = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
_NEOX = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
_GPT2 = dict(n_embd=64, n_layer=2, n_head=4)
_HEADS = dict(_LLAMA, head_dim=16)

KINDS: dict[str, tuple[str, dict]] = {
    "gpt_neox": ("gpt_neox", _NEOX),
    "gpt2": ("gpt2", _GPT2),
    "gptj": ("gptj", dict(_GPT2, rotary_dim=8)),
    "llama": ("llama", _LLAMA),
    "llama_tied": ("llama", dict(_LLAMA, tie_word_embeddings=True)),
    "qwen2": ("qwen2", _LLAMA),
    "qwen3": ("qwen3", _HEADS),
    "gemma": ("gemma", _HEADS),
    "gemma2": ("gemma2", dict(_HEADS, sliding_window=WINDOW)),  # soft-capped attention and head
    "gemma3_text": ("gemma3_text", dict(_HEADS, sliding_window=WINDOW)),
    "phi": ("phi", _NEOX),
    "mistral": ("mistral", dict(_LLAMA, sliding_window=WINDOW)),
    "cohere": ("cohere", dict(_LLAMA, logit_scale=0.3)),
    "granite": ("granite", dict(_LLAMA, logits_scaling=3.0)),
    "opt": (
        "opt",
        dict(hidden_size=64, ffn_dim=128, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=64),
    ),
    "falcon": ("falcon", dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4)),
    "bloom": ("bloom", dict(hidden_size=64, n_layer=2, n_head=4)),  # ALiBi
    "mamba": ("mamba", dict(hidden_size=64, num_hidden_layers=2, state_size=8)),  # recurrent
    "qwen3_moe": ("qwen3_moe", dict(_HEADS, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2)),
    "gpt_oss": ("gpt_oss", dict(_HEADS, num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW)),  # sinks
}

# These cannot share a prompt between responses and must be scored one response a row.
PLAIN_ONLY = ("bloom", "falcon", "mamba")
SLIDING = ("gemma2", "gemma3_text", "mistral", "gpt_oss")


def settings(name: str, **overrides):
    """The transformers configuration of a kind."""
    kind, values = KINDS[name]
    return AutoConfig.for_model(
        kind, **{**dict(vocab_size=VOCABULARY, pad_token_id=0, bos_token_id=1, eos_token_id=2), **values, **overrides}
    )


def make(name: str, seed: int = 0, dtype: torch.dtype = torch.float32, spread: float = 4.0, **overrides):
    """A random model of a kind in evaluation mode; the same for the same seed, and the caller's generator untouched.

    Args:
        spread: factor on all matrices.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(settings(name, **overrides), dtype=torch.float32).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(spread)
                else:  # biases start at zero, norms at one: neither would show that it is used
                    parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(dtype)
