"""Preference training written a second time, as plainly as it can be: float64, one row at a time, nothing shared.

It reads the rows of a jsonl file, makes their token ids, scores each response by a forward pass of its own over full
logits, and makes optimizer steps by the formulas of the papers. Of the project it uses nothing; the tests tell it the
rows of each step, by number in the order of the file.

What is the project's rule rather than the world's, and documented there: a prompt + response is encoded whole and split
where the tokens of the prompt alone end to be a prefix; a BOS where the tokenizer adds one; one EOS; and the cuts of
`tokens_of` (data/tokenization.py, top).
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path

import torch

# ---- Rows and tokens ------------------------------------------------------------------------------------------------


@dataclass
class Example:
    """A pair or, for SFT, one response (rejected is None): token ids."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int] | None


def shared(one: list[int], other: list[int]) -> int:
    """How many ids two lists begin with in common."""
    return len(os.path.commonprefix([one, other]))


def tokens_of(tokenizer, prompt: str, responses: list[str], max_length: int, max_prompt_length: int, keep: str):
    """Token ids of a prompt and of each of its responses, cut to the lengths that are allowed.

    When the longest response does not fit behind the prompt, the prompt is cut to `max_prompt_length` (its end or its
    start stays, its BOS in any case) and each response to what is then left of `max_length`; a cut one has no EOS.
    """
    encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    start = [tokenizer.bos_token_id] if tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id else []
    alone, whole = encode(prompt), [encode(prompt + response) for response in responses]
    split = min(shared(alone, ids) for ids in whole)
    ids, tails = start + alone[:split], [each[split:] + [tokenizer.eos_token_id] for each in whole]
    if len(ids) + max(map(len, tails)) > max_length:
        if len(ids) > max_prompt_length:
            room = max_prompt_length - len(start)
            body = ids[len(start) :]
            ids = start + (body[-room:] if keep == "keep_end" else body[:room])
        tails = [tail[: max_length - len(ids)] for tail in tails]
    return ids, tails


def examples_of(file: Path, tokenizer, pairs: bool, max_length: int, max_prompt_length: int, keep: str = "keep_end"):
    """All examples of a file of rows {prompt, responses, pairs, sft_target}, in its order."""
    examples = []
    for line in file.read_text().splitlines():
        row = json.loads(line)
        responses = row["responses"] if pairs else [row["sft_target"]]
        prompt, tails = tokens_of(tokenizer, row["prompt"], responses, max_length, max_prompt_length, keep)
        if pairs:
            examples += [Example(prompt, tails[chosen], tails[rejected]) for chosen, rejected in row["pairs"]]
        else:
            examples.append(Example(prompt, tails[0], None))
    return examples


# ---- Scores ---------------------------------------------------------------------------------------------------------


def log_prob(model, prompt: list[int], response: list[int]) -> torch.Tensor:
    """log p(response | prompt) in nats: one row, full logits, their own normalisation, in float64."""
    row = torch.tensor([prompt + response])
    logits = model(input_ids=row, attention_mask=torch.ones_like(row), use_cache=False).logits[0].double()
    total = logits.new_zeros(())
    for place, token in enumerate(response, start=len(prompt)):
        before = logits[place - 1]  # the logits that predict this token
        total = total + before[token] - before.exp().sum().log()
    return total


def log_sigmoid(x: torch.Tensor) -> torch.Tensor:
    return -torch.log1p(torch.exp(-x))


@dataclass
class Objective:
    """The loss of one example, and its metrics."""

    name: str  # sft, dpo or ipo
    beta: float = 0.1
    label_smoothing: float = 0.0
    reference_free: bool = False
    average_log_prob: bool = False
    f_divergence: str = "reverse_kl"

    def __call__(self, example: Example, policy, reference) -> tuple[torch.Tensor, dict[str, float]]:
        chosen = log_prob(policy, example.prompt, example.chosen)
        metrics = {"logps_train/chosen": chosen.item(), "lengths_train/chosen": len(example.chosen)}
        if self.name == "sft":
            return -chosen, metrics
        assert example.rejected is not None
        rejected = log_prob(policy, example.prompt, example.rejected)
        metrics |= {"logps_train/rejected": rejected.item(), "lengths_train/rejected": len(example.rejected)}
        with torch.no_grad():
            base = [log_prob(reference, example.prompt, ids) for ids in (example.chosen, example.rejected)]
        if self.reference_free:
            base = [torch.zeros_like(each) for each in base]
        lengths = (len(example.chosen), len(example.rejected)) if self.average_log_prob else (1, 1)
        ratios = [(own - theirs) / n for own, theirs, n in zip((chosen, rejected), base, lengths)]
        rewards = [self.beta * ratio.item() for ratio in ratios]
        margin = rewards[0] - rewards[1]
        metrics |= {
            "rewards_train/chosen": rewards[0],
            "rewards_train/rejected": rewards[1],
            "rewards_train/margins": margin,
            "rewards_train/accuracies": 1.0 if margin > 0 else 0.0 if margin < 0 else 0.5,
        }
        if self.name == "ipo":
            return (ratios[0] - ratios[1] - 1 / (2 * self.beta)) ** 2, metrics
        if self.f_divergence == "js":  # f'(u) = log(2u / (1 + u)) with u = policy / reference
            ratios = [math.log(2) + ratio - torch.log1p(ratio.exp()) for ratio in ratios]
        logit = self.beta * (ratios[0] - ratios[1])
        kept, flipped = 1 - self.label_smoothing, self.label_smoothing
        return -kept * log_sigmoid(logit) - flipped * log_sigmoid(-logit), metrics


# ---- Steps ----------------------------------------------------------------------------------------------------------


@dataclass
class Optimizer:
    """AdamW (arXiv 1711.05101, algorithm 2), RMSprop (alpha 0.99, as torch has it) or plain SGD, in float64."""

    name: str
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    first: dict = field(default_factory=dict)
    second: dict = field(default_factory=dict)
    updates: int = 0

    @torch.no_grad()
    def step(self, parameters: dict[str, torch.Tensor], rate: float) -> None:
        self.updates += 1
        for name, value in parameters.items():
            gradient = value.grad
            if self.name == "SGD":
                value -= rate * gradient
            elif self.name == "RMSprop":
                self.second[name] = 0.99 * self.second.get(name, 0.0) + 0.01 * gradient**2
                value -= rate * gradient / (self.second[name].sqrt() + self.eps)
            else:
                one, two = self.betas
                value -= rate * self.weight_decay * value
                self.first[name] = one * self.first.get(name, 0.0) + (1 - one) * gradient
                self.second[name] = two * self.second.get(name, 0.0) + (1 - two) * gradient**2
                mean = self.first[name] / (1 - one**self.updates)
                square = self.second[name] / (1 - two**self.updates)
                value -= rate * mean / (square.sqrt() + self.eps)


def rate_of(step: int, n_steps: int, lr: float, warmup: int, schedule: str) -> float:
    """lr * min(1, (step + 1) / (warmup + 1)), and from step `warmup` on down to zero at the last step."""
    if step <= warmup or schedule == "constant":
        return lr * min(1.0, (step + 1) / (warmup + 1))
    left = (n_steps - 1 - step) / (n_steps - 1 - warmup)
    return lr * left if schedule == "linear" else lr * (1 - math.cos(math.pi * left)) / 2


@dataclass
class Trained:
    """What came of training: metrics of every step (loss/train and grad_norm among them) and the weights."""

    steps: list[dict[str, float]] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    start: dict[str, torch.Tensor] = field(default_factory=dict)


def load(folder: Path):
    """The model of a folder in float64, its attention and its experts in their plainest form."""
    from transformers import AutoModelForCausalLM

    config = json.loads((folder / "config.json").read_text())
    plainest = {} if config["model_type"] == "mamba" else {"attn_implementation": "eager"}
    if "num_experts_per_tok" in config:
        plainest["experts_implementation"] = "eager"
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **plainest).eval()


def train(
    folder: Path,
    examples: list[Example],
    steps: list[list[int]],
    objective: Objective,
    optimizer: Optimizer,
    lr: float,
    warmup: int = 0,
    schedule: str = "constant",
    max_grad_norm: float = 10.0,
) -> Trained:
    """Train the model of a folder on the examples with the numbers of each step."""
    policy, reference = load(folder), load(folder)
    parameters = dict(policy.named_parameters())
    trained = Trained(start={name: value.detach().clone() for name, value in policy.state_dict().items()})
    for number, members in enumerate(steps):
        sums: dict[str, float] = {}
        policy.zero_grad(set_to_none=True)
        for member in members:
            loss, metrics = objective(examples[member], policy, reference)
            (loss / len(members)).backward()
            for name, value in (metrics | {"loss/train": loss.item()}).items():
                sums[name] = sums.get(name, 0.0) + value
        used = {name: value for name, value in parameters.items() if value.grad is not None}
        norm = math.sqrt(sum((value.grad**2).sum().item() for value in used.values()))
        for value in used.values():
            value.grad *= min(1.0, max_grad_norm / norm)
        rate = rate_of(number, len(steps), lr, warmup, schedule)
        optimizer.step(used, rate)
        trained.steps.append(
            {name: value / len(members) for name, value in sums.items()} | {"grad_norm": norm, "learning_rate": rate}
        )
    trained.weights = {name: value.detach() for name, value in policy.state_dict().items()}
    return trained
