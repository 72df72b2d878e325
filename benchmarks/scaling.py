"""A step's time on many GPUs from first principles, beside the memory that plan=true counts: docs/scaling.md's numbers.

Nothing here was measured. Each term is work divided by a rate: products by a share of the card's peak, attention by
another, element-wise operations and the optimizer by memory bandwidth, communication by the links between devices. Run
`python -m benchmarks.scaling` to make the tables again, or with other cards and links by changing the values below.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

CONFIG = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "config")


@dataclass(frozen=True)
class Card:
    """A GPU and its links. FLOP/s and bytes/s; what each rate was taken from stands in docs/scaling.md."""

    name: str
    peak: float  # bf16, dense
    products: float  # share of the peak that large products reach
    attention: float  # share that fused attention reaches
    memory_bandwidth: float
    memory: float  # bytes
    node: int  # cards a node
    inside_node: float  # bytes/s a card, each way
    between_nodes: float


H100 = Card("H100 SXM 80 GB", 989e12, 0.66, 0.45, 3.35e12, 80e9, 8, 450e9, 50e9)


@dataclass(frozen=True)
class Shape:
    """A Llama-like decoder."""

    name: str
    hidden: int
    feed_forward: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool = False

    @property
    def kv_width(self) -> int:
        return self.hidden // self.heads * self.kv_heads

    @property
    def block_parameters(self) -> int:
        attention = self.hidden * (2 * self.hidden + 2 * self.kv_width)
        return attention + 3 * self.hidden * self.feed_forward + 2 * self.hidden

    @property
    def parameters(self) -> int:
        embeddings = self.hidden * self.vocabulary * (1 if self.tied else 2)
        return self.layers * self.block_parameters + embeddings + self.hidden


SHAPES = (
    Shape("1B (Llama 3.2)", 2048, 8192, 16, 32, 8, 128256, tied=True),
    Shape("8B (Llama 3)", 4096, 14336, 32, 32, 8, 128256),
    Shape("70B (Llama 3)", 8192, 28672, 80, 64, 8, 128256),
)


@dataclass(frozen=True)
class Work:
    """What a GPU computes in an optimizer step.

    Attributes:
        pairs: of the step, a GPU; prompt, response: tokens of each prompt and of each of its two responses.
        pass_tokens: most tokens a pass.
    """

    pairs: int = 8
    prompt: int = 300
    response: int = 250
    pass_tokens: int = 8192

    @property
    def tokens(self) -> int:
        return self.pairs * (self.prompt + 2 * self.response)

    @property
    def scored(self) -> int:
        return self.pairs * 2 * self.response

    @property
    def passes(self) -> int:
        return -(-self.tokens // self.pass_tokens)

    @property
    def visible(self) -> int:
        """(query, key) pairs: causal in the prompt; each response sees it and itself."""
        p, r = self.prompt, self.response
        return self.pairs * (p * p // 2 + 2 * (r * p + r * r // 2))


# Bytes that the element-wise operations of a block move for each token, in units of the hidden width and of the feed
# forward's: two norms, rotary positions, two residual sums, the gate; forward, and twice that backward. As blocks run
# uncompiled; compiled, operations that follow each other move their operands once.
HIDDEN_MOVES, GATE_MOVES = {False: 3 * 46, True: 3 * 12}, {False: 3 * 5, True: 3 * 3}


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by what they go to, and useful FLOP/s as a share of the peak."""

    terms: dict[str, float]
    mfu: float

    @property
    def total(self) -> float:
        return sum(self.terms.values())

    @property
    def bound_by(self) -> str:
        return max(self.terms, key=lambda name: self.terms[name])


def step_time(shape: Shape, n_gpus: int, work: Work, card: Card = H100, compiled: bool = True) -> StepTime:
    """Seconds of an optimizer step of DPO with cached reference log-probs under FULL_SHARD, AdamW, bf16 computation on
    fp32 weights.
    """
    blocks = shape.layers * shape.block_parameters
    head = shape.hidden * shape.vocabulary
    # A product costs two FLOPs a parameter and token forward, four backward; the head computes its logits once more.
    useful = 6 * (blocks * work.tokens + head * work.scored)
    attention = 14 * shape.layers * shape.hidden * work.visible  # 4 forward, 10 backward, as fused kernels do
    useful += 12 * shape.layers * shape.hidden * work.visible
    moved = 2 * work.tokens * shape.layers
    moved *= HIDDEN_MOVES[compiled] * shape.hidden + GATE_MOVES[compiled] * shape.feed_forward
    terms = {
        "products": (6 * blocks * work.tokens + 8 * head * work.scored) / (card.peak * card.products),
        "attention": attention / (card.peak * card.attention),
        "element-wise": moved / card.memory_bandwidth,
        # fp32 weight, two moments and gradient read, three of them written.
        "optimizer": 28 * shape.parameters / n_gpus / card.memory_bandwidth,
    }
    shared = (n_gpus - 1) / n_gpus
    # bf16 parameters gathered forward and backward, fp32 gradients scattered, in each pass.
    travelling = shape.parameters * shared * work.passes
    # Across nodes each node takes in all that it does not hold, through the links of all its cards.
    link = card.inside_node if n_gpus <= card.node else min(card.inside_node, card.between_nodes * card.node)
    communication = travelling * (2 + 2 + 4) / link
    # Copies that FSDP2 makes around its collectives: cast, gathered buffer to parameters, gradients to its buffer.
    terms["FSDP copies"] = (
        shape.parameters * work.passes * (2 * (4 / n_gpus + 2) + 2 * 4 + 2 * 6) / card.memory_bandwidth
    )
    hidden = terms["products"] + terms["attention"] + terms["element-wise"]
    # The first gather and the last reduction have nothing to hide behind.
    ends = communication / (shape.layers + 1)
    terms["exposed communication"] = max(communication - hidden, 0.0) + ends if n_gpus > 1 else 0.0
    return StepTime(terms, useful / (sum(terms.values()) * card.peak))


# ---- Memory, as plan=true counts it, and the tables -----------------------------------------------------------------

# What a run of each size would set, and the card counts that are shown.
OPTIONS = ("trainer=FSDPTrainer", "optimizer=AdamW", "loss=dpo", "precision=bfloat16", "max_length=1024")
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def planned_bytes(shape: Shape, n_gpus: int, work: Work, card: Card = H100) -> int:
    """Bytes on the fullest GPU of a run with these passes, blocks recomputed in the backward pass."""
    from hydra import compose, initialize_config_dir
    from transformers import LlamaConfig

    from planning.batch_shape import BatchShape
    from planning.estimate import estimate
    from settings import finalize

    with initialize_config_dir(CONFIG, version_base=None):
        options = [*OPTIONS, f"batch_size={work.pairs * n_gpus}", "activation_checkpointing=true", "device=cpu"]
        config = finalize(compose("config", ["model=tiny", "datasets=[hh]", f"world_size={n_gpus}", *options]))
    model = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=8192,
    )
    unit = BatchShape(work.prompt, (work.response, work.response), work.pairs)
    plan = estimate(
        config, n_gpus, kind="cuda", capacity=int(card.memory), batch=unit, model_config=model, single_pass=True
    )
    return plan.total


def table(shape: Shape, work: Work, card: Card = H100) -> str:
    """A Markdown table of step times and memory over COUNTS."""
    terms = list(step_time(shape, 8, work, card).terms)
    lines = [
        f"| GPUs | {' | '.join(terms)} | step, s | pairs/s | useful MFU | most time in | GB a GPU |",
        "|---" * (len(terms) + 6) + "|",
    ]
    for n in COUNTS:
        time, memory = step_time(shape, n, work, card), planned_bytes(shape, n, work, card)
        fits = "" if memory < card.memory else " (does not fit)"
        numbers = " | ".join(f"{1000 * time.terms[name]:,.1f}" for name in terms)
        lines.append(
            f"| {n} | {numbers} | {time.total:,.3f} | {work.pairs * n / time.total:,.0f} | {time.mfu:.0%} | "
            f"{time.bound_by} | {memory / 1e9:,.1f}{fits} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    for shape in SHAPES:
        print(f"\n### {shape.name}, {shape.parameters / 1e9:.2f} billion parameters\n\n{table(shape, Work())}")
