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
    "bert": ("bert", dict(_NEOX, is_decoder=True)),
    "roberta": ("roberta", dict(_NEOX, is_decoder=True, pad_token_id=0)),
    "falcon": ("falcon", dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4)),
    "bloom": ("bloom", dict(hidden_size=64, n_layer=2, n_head=4)),  # ALiBi
    "mamba": ("mamba", dict(hidden_size=64, num_hidden_layers=2, state_size=8)),  # recurrent
    "doge": ("doge", _LLAMA),  # a mask of its own, which is near nothing in a new model
    "falcon_h1": (  # attention and a state side by side
        "falcon_h1",
        dict(_HEADS, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_n_groups=1),
    ),
    "jamba": (
        "jamba",
        dict(_LLAMA, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8, mamba_dt_rank=4, num_experts=2)
        | dict(use_mamba_kernels=False),
    ),
    "lfm2": ("lfm2", dict(_LLAMA, layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False)),
    "minimax": ("minimax", dict(_HEADS, num_local_experts=2, layer_types=["linear_attention", "full_attention"])),
    "gemma3n_text": (  # the last layers read keys and values of earlier ones
        "gemma3n_text",
        dict(_HEADS, num_hidden_layers=4, num_kv_shared_layers=2, sliding_window=WINDOW, laurel_rank=4)
        | dict(layer_types=["sliding_attention", "full_attention"] * 2, altup_num_inputs=2)
        | dict(hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCABULARY),
    ),
    "phi3": ("phi3", dict(_LLAMA, pad_token_id=0)),
    "qwen3_moe": ("qwen3_moe", dict(_HEADS, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2)),
    "gpt_oss": ("gpt_oss", dict(_HEADS, num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW)),  # sinks
}

# These cannot share a prompt between responses and must be scored one response a row.
PLAIN_ONLY = ("bert", "roberta", "bloom", "falcon", "mamba", "doge", "falcon_h1", "jamba", "lfm2", "minimax")
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
