"""Runs that are killed and resumed over and over, and compared with an undisturbed one."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from fault_runs import STAGES, Forge, Started, arguments, descendants
from left_behind import differences, leftovers


@dataclass
class Counts:
    """What was done to runs, and how many came through."""

    kills: int = 0
    in_a_save: int = 0
    by: dict[str, int] = field(default_factory=dict)
    stages: dict[str, int] = field(default_factory=dict)
    finished: int = 0
    resumed: int = 0
    wrong: list[str] = field(default_factory=list)

    def add(self, run: Started, how: str) -> None:
        self.kills += 1
        self.by[how] = self.by.get(how, 0) + 1
        if run.in_a_save:
            self.in_a_save += 1
            self.stages[run.stage] = self.stages.get(run.stage, 0) + 1


def kill_and_resume(
    forge: Forge,
    settings: tuple[str, ...],
    kills: int,
    seed: int,
    report=lambda text: None,
    ways: tuple[str, ...] = ("time", "time", "folder", "hook", "hook", "rank"),
) -> Counts:
    """Kill runs of these settings `kills` times in all and resume them each time, until they finish; compare.

    Ways to kill: at a random time ("time"), a random moment after a save's folder appears ("folder"), at a random stage
    of a random save ("hook"), all of them every process of the run; and one rank alone, at a random time ("rank": with
    one process it is "time").
    """
    chance, counts = random.Random(seed), Counts()
    calm = forge.folder / f"undisturbed-{seed}"
    started = time.monotonic()
    forge.run(*settings, f"local_run_dir={calm}")
    usual = time.monotonic() - started
    number = 0
    while counts.kills < kills:
        folder = forge.folder / f"disturbed-{seed}-{number}"
        number += 1
        code = None
        while code != 0:
            how = ways[chance.randrange(len(ways))] if counts.kills < kills else "nothing"
            if how == "rank" and not any("world_size" in value for value in settings):
                how = "time"
            hook = {"stage": chance.choice(STAGES), "nth": chance.randrange(2)} if how == "hook" else None
            begun = (folder / "config.yaml").exists()
            words = [f"resume={folder}"] if begun else arguments(forge.folder, *settings, f"local_run_dir={folder}")
            run = forge.start(*words, plain=True, kill=hook)
            counts.resumed += begun
            killed = how != "nothing" and _strike(run, how, folder, chance, usual)
            code = run.wait()
            if code and (killed or code == -signal.SIGKILL):
                counts.add(run, how)
            elif code:
                counts.wrong.append(f"exit code {code} of {run.log.name}: {run.text[-800:]}")
                return counts
            left = forge.orphans()
            if left:
                counts.wrong.append(f"orphans after a kill by {how}: {left}")
            report(
                f"{counts.kills} kills, {counts.in_a_save} in a save, {counts.finished} runs finished; last: {how}"
                f"{' ' + run.stage if run.in_a_save else ''}, exit code {code}"
            )
        counts.finished += 1
        counts.wrong += [f"{folder.name}: {text}" for text in differences(calm, folder)]
        counts.wrong += [f"left behind: {name}" for name in leftovers(forge.folder)]
    return counts


def _strike(run: Started, how: str, folder: Path, chance: random.Random, usual: float) -> bool:
    """Kill a run in one of the ways of `kill_and_resume`. Whether it was alive to be killed."""
    if how == "hook":
        return False  # it does it itself
    if how == "folder":
        saves, wanted = set(), chance.randrange(1, 4)
        while run.code is None and len(saves) < wanted:
            run.forge.listen(0.001)
            saves |= {path.name for path in folder.glob("step-*.tmp")} if folder.exists() else set()
        until = time.monotonic() + chance.uniform(0, 0.06)
    else:
        until = time.monotonic() + chance.uniform(0, usual)
    while run.code is None and time.monotonic() < until:
        run.forge.listen(0.001)
    if run.code is not None:
        return False
    if how != "rank":
        run.kill()
        return True
    ranks = descendants(run.pid)
    if not ranks:  # not that far yet
        run.kill()
        return True
    try:
        os.kill(chance.choice(ranks[:2]), signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True
