"""Jobs for benchmarks.measure on random models and random pairs of text: nothing has to be downloaded."""

from __future__ import annotations

import json
import random

LLAMA = {"model_type": "llama", "max_position_embeddings": 8192}
TINY = LLAMA | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SMALL = LLAMA | {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 32768,
}
# The shapes of Llama-3.2-1B and Llama-3-8B.
LLAMA_1B = LLAMA | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
}
LLAMA_8B = LLAMA | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}


def write_pairs(path: str, n: int, prompt: tuple[int, int], response: tuple[int, int]) -> str:
    """Write pairs whose lengths in bytes, which are tokens for the byte tokenizer, lie in these ranges, most of them
    in the lower half; the path.
    """
    draw = random.Random(0)

    def text(low: int, high: int) -> str:
        length = int(low + (high - low) * draw.random() ** 2)
        return "".join(draw.choice("abcdefgh ") for _ in range(length)) + "."

    with open(path, "w") as file:
        for number in range(n):
            row = {"prompt": f"{number} " + text(*prompt), "chosen": text(*response), "rejected": text(*response)}
            file.write(json.dumps(row) + "\n")
    return path


def job_of(path: str, model: dict, n: int, batch: int, max_length: int, *overrides: str, **more) -> dict:
    """DPO of a random model on the first `n` pairs of a file."""
    return {
        "what": "ours",
        "loss": "dpo",
        "data": path,
        "random_config": model,
        "examples": n,
        "batch_size": batch,
        "max_length": max_length,
        "overrides": ["data.num_workers=1", *overrides],
        **more,
    }
