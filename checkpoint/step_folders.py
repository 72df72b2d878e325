"""What a run's folder looks like on disk, and which of its checkpoints can be trusted. No tensors, no torch import.

    run_dir/
      step-<examples>/    policy.pt, hf/, state/ as `checkpoint.formats` asks; manifest.json: size and checksum of each
      LATEST -> step-...  moved only once that folder is complete and on disk

Names that end in `.tmp` are unfinished or half-deleted and are leftovers once their run has ended; `step-N.replaced`
is the complete former version of a step-N that was just about to be replaced. `recover` puts both right, and only the
process that holds the folder's lock may call it.
"""

import errno
import json
import os
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import atomic_files
from settings.resume import LATEST, latest_name

MANIFEST = "manifest.json"
LOCK = ".lock"


def free_bytes(path):
    """Bytes that this user may still write on the file system of `path` (the nearest existing parent)."""
    path = Path(path).absolute()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def gigabytes(n):
    return f"{n / 1e9:.2f} GB" if n >= 1e7 else f"{n / 1e6:.2f} MB"


# ---- checksums and manifests ----------------------------------------------------------------------------------------


def best_algorithm():
    return "xxh3_64" if atomic_files.hasher("xxh3_64") is not None else "crc32"


def checksum(path, algorithm=None, fsync=False):
    """Returns [size in bytes, hex digest] of one file. With `fsync` the file's data is forced to the disk first.

    An `algorithm` that this machine lacks gives a digest of None: the size can still be compared.
    """
    with open(path, "rb") as file:
        if fsync:
            os.fsync(file.fileno())
        algorithm = algorithm or best_algorithm()
        digest = atomic_files.checksum(file, algorithm) if atomic_files.hasher(algorithm) is not None else None
        return [os.fstat(file.fileno()).st_size, digest]


def files_below(folder):
    """Relative POSIX paths of all files below a folder, sorted, the manifest itself left out."""
    folder = Path(folder)
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)


def write_manifest(folder, examples, metrics, files):
    """Writes manifest.json, the mark of completeness. `files` is {relative path: [size, digest]} from `checksum`.

    `saved_at` is seconds since 1970, but always after every step already there, whatever the hosts' clocks show.
    """
    folder = Path(folder)
    newest = max((manifest["saved_at"] for manifest, _ in complete_steps(folder.parent)), default=0.0)
    saved_at = max(time.time(), newest + 1e-3)
    content = {
        "format": 1,
        "examples": examples,
        "saved_at": saved_at,
        "metrics": metrics,
        "algorithm": best_algorithm(),
        "files": files,
    }
    for below in [p for p in folder.rglob("*") if p.is_dir()]:
        atomic_files.sync_folder(below)
    atomic_files.write_atomically(folder / MANIFEST, json.dumps(content, indent=1).encode())


def read_manifest(folder):
    """The manifest of a complete step folder, or None if there is none that can be read."""
    try:
        content = json.loads((Path(folder) / MANIFEST).read_text())
        whole = isinstance(content["files"], dict) and isinstance(content["metrics"], dict)
        return content if whole and float(content["saved_at"]) and int(content["examples"]) >= 0 else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def damage(folder, only=None):
    """Compares a step folder with its manifest. Returns what is wrong with it in words, or None when all is well.

    `only` restricts the comparison to relative paths that start with it (for example "policy.pt" or "state/").
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    if manifest is None:
        return "it has no readable manifest.json, so it was never completed or is damaged"
    wanted = {name: expected for name, expected in manifest["files"].items() if only is None or name.startswith(only)}

    def check(item):
        name, (size, digest) = item
        path = folder / name
        try:
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes, its manifest says {size}"
            found = checksum(path, manifest.get("algorithm"))[1]
        except OSError as error:
            return f"{name} cannot be read ({error.strerror or error})"
        if found is not None and found != digest:
            return f"{name} differs from its checksum ({manifest['algorithm']})"
        return None

    with ThreadPoolExecutor(8) as pool:  # hashing releases the GIL
        problems = [problem for problem in pool.map(check, wanted.items()) if problem]
    return "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "") or None


# ---- the folders of one run -----------------------------------------------------------------------------------------


def step_name(examples):
    return f"step-{examples}"


def complete_steps(run_dir):
    """[(manifest, folder)] of the steps that were completed, oldest save first.

    Ordered by the time of saving, not by the examples: a run resumed from an older step leaves younger numbers behind.
    """
    found = []
    for folder in Path(run_dir).iterdir():
        if re.fullmatch(r"step-\d+(\.replaced)?", folder.name) and folder.is_dir():
            manifest = read_manifest(folder)
            if manifest is not None:
                found.append((manifest, folder))
    return sorted(found, key=lambda item: (item[0]["saved_at"], item[0]["examples"]))


def read_latest(run_dir):
    """The step folder that LATEST points to, or None. LATEST is a link or, where there are none, a file of its name; in
    a copy of a run for which links were followed, a copy of the step."""
    pointer = Path(run_dir) / LATEST
    if pointer.is_dir() and not pointer.is_symlink():
        manifest = read_manifest(pointer)
        folder = Path(run_dir) / step_name(manifest["examples"]) if manifest else None
        return folder if folder is None or folder.is_dir() else pointer
    name = latest_name(run_dir) or ""
    folder = Path(run_dir) / name
    return folder if re.fullmatch(r"step-\d+", name) and folder.is_dir() else None


def _replace_copied_latest(run_dir):
    """Where LATEST is a folder: keep it as the step that it is a copy of if that is not there, else remove it.

    Raises ValueError for a folder that is no complete step.
    """
    copied = Path(run_dir) / LATEST
    if copied.is_symlink() or not copied.is_dir():
        return
    manifest = read_manifest(copied)
    if manifest is None:
        raise ValueError(f"{copied} is a folder, where a run has a link to its newest step: move it away, or remove it")
    step = Path(run_dir) / step_name(manifest["examples"])
    if read_manifest(step) is not None:
        remove_folder(copied)
        return
    if step.exists():
        remove_folder(step)
    os.rename(copied, step)


def point_latest(run_dir, folder):
    """Moves LATEST in one atomic step."""
    run_dir, temporary = Path(run_dir), Path(run_dir) / (LATEST + ".tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.symlink(Path(folder).name, temporary)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise
        # A file system without links.
        atomic_files.write_atomically(run_dir / LATEST, (Path(folder).name + "\n").encode())
        return
    os.replace(temporary, run_dir / LATEST)
    atomic_files.sync_folder(run_dir)


def find_resumable(run_dir, notice=print):
    """The newest step of a run that is complete and matches its checksums, or None.

    From the newest save to the oldest; each one that is passed over is reported through `notice` with what is wrong
    with it. Only steps that hold `state/` count: the others cannot be resumed from. Raises ValueError without such a
    folder.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise ValueError(f"there is no run folder at {run_dir}")
    candidates = [folder for _, folder in reversed(complete_steps(run_dir))]
    unreadable = [p for p in run_dir.iterdir() if re.fullmatch(r"step-\d+", p.name) and read_manifest(p) is None]
    for folder in sorted(unreadable):
        notice(f"{folder} cannot be resumed from: {damage(folder)}")
    skipped = bool(unreadable)
    for folder in candidates:
        problem = damage(folder)
        if problem is None and not (folder / "state").is_dir():
            problem = "it holds no state/ (checkpoint.formats had no 'state' when it was saved)"
        if problem is None:
            if skipped:
                notice(f"resuming from {folder.name} instead")
            return folder
        skipped = True
        notice(f"{folder} cannot be resumed from: {problem}")
    return None


def remove_folder(folder):
    """Deletes a step folder such that a kill in the middle leaves a `.tmp`, never a part of one that looks whole."""
    folder = Path(folder)
    doomed = folder if folder.name.endswith(".tmp") else folder.with_name(folder.name + ".deleted.tmp")
    if doomed != folder:
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(folder, doomed)
    shutil.rmtree(doomed)


def recover(run_dir):
    """Clears what a killed run left behind. Returns the names that were removed or put back.

    A `step-N.replaced` whose successor never arrived is put back under its name, and LATEST is moved to the newest
    complete step: a kill between the two renames of a run's last save leaves nobody else to move it.
    """
    touched = []
    _replace_copied_latest(run_dir)
    for path in sorted(Path(run_dir).iterdir()):
        if re.fullmatch(r"(step-\d+|LATEST|config\.yaml|report\.html)(\..+)?\.tmp", path.name):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        elif re.fullmatch(r"step-\d+\.replaced", path.name):
            original = path.with_suffix("")
            remove_folder(path) if original.exists() else os.rename(path, original)
        else:
            continue
        touched.append(path.name)
    steps = complete_steps(run_dir)
    if steps and read_latest(run_dir) != steps[-1][1]:
        point_latest(run_dir, steps[-1][1])
        touched.append(LATEST)
    return touched


def metric_mode(name):
    """'min' for a metric that is better when small (loss, perplexity), else 'max' (accuracies, margins, rewards)."""
    return "min" if re.search(r"loss|perplexity|nll", name) else "max"


def best_step(steps, metric, mode=None):
    """The one of `complete_steps` that is best by a metric of its manifest (the earlier one on a tie), or None.

    `mode`: "min" or "max"; None goes by the metric's name.
    """
    scored = [(manifest["metrics"][metric], folder) for manifest, folder in steps if metric in manifest["metrics"]]
    scored = [(value, folder) for value, folder in scored if value == value]  # NaN is never the best
    if not scored:
        return None
    pick = min if (mode or metric_mode(metric)) == "min" else max
    return pick(scored, key=lambda item: item[0])[1]


def delete_old_steps(run_dir, keep_last, best=None):
    """Deletes all steps but the last `keep_last` (None: keeps all), the best by (metric, mode), and that of LATEST."""
    for replaced in Path(run_dir).glob("step-*.replaced"):
        remove_folder(replaced)
    if keep_last is None:
        return
    steps = complete_steps(run_dir)
    kept = {folder for _, folder in steps[max(0, len(steps) - keep_last) :]} | {read_latest(run_dir)}
    if best is not None:
        kept |= {best_step(steps, *best)}
    for _, folder in steps:
        if folder not in kept:
            remove_folder(folder)


def lock(run_dir, patience=10.0):
    """Takes the run folder for this process, so that two runs never write into one. Returns the open lock file.

    The kernel frees it when the process ends, kill -9 included; children do not inherit it. A dying predecessor gets
    `patience` seconds. Raises ValueError if another live process holds it; OSError where the file system has no locks.
    """
    file = open(Path(run_dir) / LOCK, "w")
    deadline = time.monotonic() + patience
    try:
        while not atomic_files.try_lock(file):
            if time.monotonic() > deadline:
                raise ValueError(f"another run is writing into {run_dir}: end it, or give this one another folder")
            time.sleep(0.2)
    except (OSError, ValueError):
        file.close()
        raise
    return file
