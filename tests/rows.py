"""Data files with rows of many kinds, and reading them as prompt groups."""

import csv
import gzip
import json
from pathlib import Path
from types import SimpleNamespace

from data.row_formats import PromptGroup
from data.sources import open_source

H, A = "\n\nHuman:", "\n\nAssistant:"


def hh(prompt, chosen, rejected):
    return {"chosen": prompt + chosen, "rejected": prompt + rejected}


def write(path: Path, rows) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    name = path.name
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    elif name.endswith(".jsonl"):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif name.endswith(".json"):
        path.write_text(json.dumps(rows, indent=1))
    elif name.endswith(".csv"):
        with open(path, "w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, list(rows[0]))
            writer.writeheader()
            writer.writerows(
                {key: value if isinstance(value, str) else json.dumps(value) for key, value in row.items()}
                for row in rows
            )
    else:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


# What data/ reads of a run's settings, with the defaults of config/config.yaml.
DEFAULTS = dict(
    weights={}, paths={}, columns={}, plugins=[], test_fraction=0.05, truncation=None, on_overlong="truncate"
)
DEFAULTS |= dict(
    streaming=False, shuffle_window=10_000, pairs="all", min_score_gap=0, score=None, on_bad_row="stop", train_on="last"
)
DEFAULTS |= dict(template_date=None, apply_template=False, allow_control_tokens=False)
DEFAULTS |= dict(chat_template=None, cache_dir=None, num_workers=1)


def options(max_length=512, max_prompt_length=256, **data):
    section = SimpleNamespace(**(DEFAULTS | data))
    lengths = dict(max_length=max_length, max_prompt_length=max_prompt_length)
    return SimpleNamespace(data=section, local_dirs=[".cache"], **lengths)


def config(tmp_path, **data):
    return options(cache_dir=str(tmp_path / "cache"), **data)


def read(path, tmp_path, split="train", sft=False, name=None, kind=None, **data):
    """(list of groups, counts) of a local path, read for a kind of examples (sft: responses); everything goes to train
    unless a fraction is given."""
    kind = kind or ("responses" if sft else "pairs")
    data.setdefault("test_fraction", 0.0)
    if name:
        data["paths"] = {name: str(path)}
    source = open_source(name or str(path), split, config(tmp_path, **data), kind)
    return list(source.groups()), source.counts


def only(path, tmp_path, **options) -> PromptGroup:
    groups, _ = read(path, tmp_path, **options)
    assert len(groups) == 1
    return groups[0]


def chat(*contents, system=None):
    turns = [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(contents)]
    return ([{"role": "system", "content": system}] if system else []) + turns
