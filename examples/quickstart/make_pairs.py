"""Writes train.jsonl and test.jsonl, the preference pairs of the quickstart, beside this file.

    python examples/quickstart/make_pairs.py

Each pair is a small everyday trouble, a kind reply that names one thing to do next (chosen) and a rude one that brushes
the asker off (rejected): anyone can tell which is better without knowing the field. What keeps the set honest:

* Length tells nothing. In one half of the pairs the chosen reply is the longer one, in words and in characters; in the
  other half it is the shorter one. "Prefer the longer reply" is right exactly half of the time.
* Nothing leaks. Topics, questions, openings and closings of the test split occur nowhere in the training split.
* It is the same everywhere. Only `random.Random.random` is used, whose sequence Python promises not to change.

The texts of topics_train.txt and topics_test.txt, and those below, were written for this project and share its licence.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAIRS_PER_TOPIC = 5


@dataclass(frozen=True)
class Phrases:
    """What one split wraps around its topics; the two splits share no phrase."""

    questions: list[str]
    kind_openings: list[str]
    kind_closings: list[str]
    rude_openings: list[str]
    rude_closings: list[str]


TRAIN = Phrases(
    questions=[
        "What should I do?",
        "Any advice?",
        "Can you help?",
        "What would you try?",
        "Where do I start?",
        "Do you have a tip?",
        "Please help me out.",
        "Is there anything I can do?",
    ],
    kind_openings=[
        "Happy to help!",
        "That happens to many of us.",
        "Good that you ask.",
        "You are not alone in this.",
        "Let us sort this out together.",
        "No worries, you can do this.",
        "I know how that feels.",
        "We can make this easier.",
        "One small step is enough for today.",
        "Thanks for telling me.",
        "Sure, here is an idea.",
        "Take heart, there is a way.",
        "Gladly!",
        "It is fine to find this hard.",
        "There is a simple way to begin.",
        "Here is what I would try.",
    ],
    kind_closings=[
        "Tell me how it goes!",
        "You will do fine.",
        "I am rooting for you.",
        "You have got this!",
        "Come back any time.",
        "Small steps count.",
        "Let me know if you want another idea.",
        "It gets easier from there.",
        "I am sure it will go better soon.",
        "Be patient with yourself.",
        "That alone often does it.",
        "Good luck!",
    ],
    rude_openings=[
        "So what?",
        "Oh please.",
        "Not my problem.",
        "Here we go again.",
        "How typical.",
        "Why ask me?",
        "I could not care less.",
        "What a silly question.",
        "Spare me the details.",
        "Is that all?",
        "You must be joking.",
        "This again?",
        "I have no time for that.",
        "Who cares?",
        "Do I look like your servant?",
        "Honestly, what a fuss.",
    ],
    rude_closings=[
        "Now leave me alone.",
        "Figure it out yourself.",
        "I have better things to do.",
        "Enough of this.",
        "End of story.",
        "Do not ask me again.",
        "That is all you get.",
        "Go and bother someone else.",
        "I am done with this.",
        "Stop wasting my day.",
        "Whatever.",
        "You brought it on yourself.",
    ],
)
TEST = Phrases(
    questions=["What do you suggest?", "What is a good first move?", "Could you give me a hand?", "Got any ideas?"],
    kind_openings=[
        "Of course, let me think with you.",
        "What a relatable one!",
        "I would be glad to lend a hand.",
        "Plenty of people run into that.",
        "Breathe, it can be fixed.",
        "My pleasure.",
    ],
    kind_closings=[
        "I hope it works out nicely.",
        "Report back, I would love to hear.",
        "You are on a good path.",
        "Be proud that you began.",
        "This will feel lighter tomorrow.",
        "Cheering for you!",
    ],
    rude_openings=[
        "Ugh, seriously?",
        "Am I supposed to be moved?",
        "Cry me a river.",
        "Nobody wanted to know.",
        "What a bore.",
        "Must everything be explained to you?",
    ],
    rude_closings=[
        "Go away.",
        "Talk to a wall instead.",
        "Conversation over.",
        "I would rather watch paint dry.",
        "My coffee is more interesting than this.",
        "Save it for your diary.",
        "Next!",
    ],
)


def read_topics(path: Path) -> list[list[str]]:
    """Blocks of six lines: two troubles, two first steps, two brush-offs. Lines that start with # are remarks."""
    text = "\n".join(line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))
    topics = [block.splitlines() for block in text.strip().split("\n\n")]
    for topic in topics:
        if len(topic) != 6:
            raise ValueError(f"{path.name}: the topic that starts with {topic[0]!r} has {len(topic)} lines, not 6")
    return topics


def pick(rng: random.Random, choices: list[str]) -> str:
    return choices[int(rng.random() * len(choices))]


def shuffled(rng: random.Random, items: list) -> list:
    return [item for _, item in sorted(((rng.random(), position), item) for position, item in enumerate(items))]


def reply(rng: random.Random, openings: list[str], core: str, closings: list[str]) -> str:
    """An opening, the core and a closing; one of the two wrappings is left out more often than not."""
    shape = rng.random()
    parts = [pick(rng, openings) if shape < 0.65 else "", core, pick(rng, closings) if shape > 0.35 else ""]
    return " ".join(part for part in parts if part)


def differs_as_wanted(chosen: str, rejected: str, chosen_is_longer: bool) -> bool:
    """Whether the lengths differ clearly (two words, six characters) in the wanted direction, by both counts."""
    sign = 1 if chosen_is_longer else -1
    return (sign * (len(chosen.split()) - len(rejected.split())) >= 2) and (sign * (len(chosen) - len(rejected)) >= 6)


def make_pairs(topics: list[list[str]], phrases: Phrases, seed: int) -> list[dict]:
    rng = random.Random(seed)
    slots = [(topic, number) for topic in topics for number in range(PAIRS_PER_TOPIC)]
    directions = shuffled(rng, [index % 2 == 0 for index in range(len(slots))])  # is the chosen reply the longer one?
    pairs, used = [], set()
    for (topic, number), chosen_is_longer in zip(slots, directions):
        troubles, steps, brush_offs = topic[0:2], topic[2:4], topic[4:6]
        while True:
            prompt = f"{troubles[number % 2]} {pick(rng, phrases.questions)}"
            chosen = reply(rng, phrases.kind_openings, steps[number // 2 % 2], phrases.kind_closings)
            rejected = reply(rng, phrases.rude_openings, pick(rng, brush_offs), phrases.rude_closings)
            if used.isdisjoint({prompt, chosen, rejected}) and differs_as_wanted(chosen, rejected, chosen_is_longer):
                break
        used.update({prompt, chosen, rejected})
        pairs.append(
            {
                "prompt": [{"role": "user", "content": prompt}],
                "chosen": [{"role": "assistant", "content": chosen}],
                "rejected": [{"role": "assistant", "content": rejected}],
            }
        )
    return shuffled(rng, pairs)


def build() -> dict[str, str]:
    """File name -> its text."""
    splits = {
        "train": make_pairs(read_topics(HERE / "topics_train.txt"), TRAIN, seed=1),
        "test": make_pairs(read_topics(HERE / "topics_test.txt"), TEST, seed=2),
    }
    return {f"{name}.jsonl": "".join(json.dumps(pair) + "\n" for pair in pairs) for name, pairs in splits.items()}


if __name__ == "__main__":
    for file_name, text in build().items():
        (HERE / file_name).write_text(text, encoding="utf-8", newline="\n")
        print(f"{file_name}: {text.count(chr(10))} pairs")
