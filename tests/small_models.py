"""Small models with their optimizers: trained for a few steps, and compared to the last bit."""

import errno
from types import SimpleNamespace

import torch
from torch.distributed.tensor import DTensor


def settings(**changes):
    return SimpleNamespace(
        **{"formats": ["state"], "keep_last": 2, "keep_best": True, "best_metric": None, "async_save": False, **changes}
    )


def tiny(family, seed=0):
    from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig

    torch.manual_seed(seed)
    sizes = dict(vocab_size=259, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
    if family == "llama":  # tied; 259 rows do not divide by 2
        config = LlamaConfig(**sizes, tie_word_embeddings=True)
    else:
        config = GPTNeoXConfig(**sizes, tie_word_embeddings=False)
    return AutoModelForCausalLM.from_config(config)


class Small(torch.nn.Module):
    """Tied weights, a frozen parameter, a persistent buffer and one that is not."""

    def __init__(self, seed=0, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(11, 6, dtype=dtype)
        self.body = torch.nn.Linear(6, 6, dtype=dtype)
        self.head = torch.nn.Linear(6, 11, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.frozen = torch.nn.Parameter(torch.randn(3, dtype=dtype), requires_grad=False)
        self.register_buffer("count", torch.zeros(2))
        self.register_buffer("derived", torch.zeros(2), persistent=False)

    def forward(self, ids):
        return self.head(torch.tanh(self.body(self.embed(ids))))


def step(model, optimizer, times=1):
    for n in range(times):
        output = model(torch.arange(8)[None] + n)
        logits = getattr(output, "logits", output).float()
        torch.nn.functional.cross_entropy(logits[0], (torch.arange(8) * 3 + n) % 11).backward()
        optimizer.step()
        optimizer.zero_grad()


def local(tensor):
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def snapshot(model, optimizer):
    """Every bit of model and optimizer, by parameter name."""
    entries = {name: local(tensor) for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for entry, value in optimizer.state.get(parameter, {}).items():
            entries[f"{name}:{entry}"] = local(value) if isinstance(value, torch.Tensor) else value
    return entries


def same(one, other):
    assert one.keys() == other.keys()
    for key, value in one.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == other[key].dtype and torch.equal(value, other[key]), key
        else:
            assert value == other[key], key
    return True


def full_disk(at):
    def hook(stage):
        if stage == at:
            raise OSError(errno.ENOSPC, "No space left on device")

    return hook
