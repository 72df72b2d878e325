"""A folder of arrays on disk: written as a stream, published atomically, verified when it is read.

    <cache>/<name>-<split>-<key>/   manifest.json   tokens.npy   segment_starts.npy   ...

Writers fill a temporary folder beside it, sync it, and rename it; whoever comes second keeps the first one's. A folder
whose sizes or checksums are not those of its manifest counts as absent.

By hand rather than with the cache of the `datasets` library: responses of different lengths lie in one flat array,
mapped into memory without an object for each row; the key is made of contents, not of paths and pickled functions; and
damage is found before a training starts.
"""

import json
import os
import shutil
from pathlib import Path

import numpy as np

from atomic_files import checksum, hasher, remove_leftovers, sync_folder, temporary_beside, write_atomically

HEADER_BYTES = 128  # of every .npy file, fixed so that the shape can be filled in at the end


class CacheWriteError(OSError):
    """The cache folder cannot take the arrays (full, read-only, ...)."""


class ArrayFile:
    """A .npy file that grows by appending. row: the shape of one entry, () for a scalar."""

    def __init__(self, path: Path, dtype, row: tuple = ()):
        self.path, self.dtype, self.row = path, np.dtype(dtype), row
        self.length = 0
        self._digest = hasher()
        try:
            self._stream = open(path, "w+b")
            self._stream.write(b"\0" * HEADER_BYTES)
        except OSError as error:
            raise CacheWriteError(error.errno, str(error)) from error

    def append(self, values):
        values = np.ascontiguousarray(values, self.dtype).reshape((-1, *self.row))
        data = values.tobytes()
        self._digest.update(data)
        self.length += len(values)
        try:
            self._stream.write(data)
        except OSError as error:
            raise CacheWriteError(error.errno, str(error)) from error

    def close(self) -> dict:
        """Completes and syncs the file; returns its line of the manifest."""
        fields = {
            "descr": np.lib.format.dtype_to_descr(self.dtype),
            "fortran_order": False,
            "shape": (self.length, *self.row),
        }
        text = repr(fields).encode("latin1")
        header = b"\x93NUMPY\x01\x00" + (HEADER_BYTES - 10).to_bytes(2, "little") + text
        header += b" " * (HEADER_BYTES - 1 - len(header)) + b"\n"
        assert len(header) == HEADER_BYTES
        try:
            self._stream.seek(0)
            self._stream.write(header)
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._stream.close()
        except OSError as error:
            raise CacheWriteError(error.errno, str(error)) from error
        return {
            "bytes": HEADER_BYTES + self.length * self.dtype.itemsize * int(np.prod(self.row, dtype=np.int64)),
            "digest": self._digest.hexdigest(),
            "shape": [self.length, *self.row],
            "dtype": self.dtype.str,
        }

    def abandon(self):
        try:
            self._stream.close()
        except OSError:
            pass


def new_folder(parent: Path, name: str) -> Path:
    """A fresh temporary folder in `parent`, to be published as `name`; removes those that killed processes left."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(parent)
        folder = Path(temporary_beside(parent / name))
        folder.mkdir()
        return folder
    except OSError as error:
        raise CacheWriteError(error.errno, str(error)) from error


def write_manifest(folder: Path, manifest: dict):
    checked = {"manifest": manifest, "digest": _digest_of(manifest)}
    try:
        write_atomically(folder / "manifest.json", json.dumps(checked, indent=1, sort_keys=True).encode())
    except OSError as error:
        raise CacheWriteError(error.errno, str(error)) from error


def _digest_of(manifest: dict) -> str:
    return checksum(json.dumps(manifest, sort_keys=True).encode())


def publish(temporary: Path, final: Path) -> Path:
    """Gives a finished folder its name; where a sound one of that name exists already, that one stays."""
    for _ in range(3):
        try:
            os.rename(temporary, final)
            sync_folder(final.parent)
            return final
        except OSError as error:
            if not os.path.lexists(final):
                raise CacheWriteError(error.errno, str(error)) from error
        if why_unusable(final) is None:
            shutil.rmtree(temporary, ignore_errors=True)
            return final
        aside = temporary_beside(final)
        try:
            os.rename(final, aside)
        except OSError:
            continue  # another writer moved it first
        if os.path.islink(aside) or not os.path.isdir(aside):
            os.unlink(aside)
        else:
            shutil.rmtree(aside, ignore_errors=True)
    raise CacheWriteError(0, f"{final} cannot be replaced")


def read_manifest(folder: Path) -> dict:
    """The manifest, checked against its own digest. Raises ValueError or OSError."""
    checked = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    manifest = checked["manifest"]
    if _digest_of(manifest) != checked["digest"]:
        raise ValueError("its manifest is damaged")
    return manifest


def why_unusable(folder: Path, expected: dict | None = None) -> str | None:
    """None for a folder whose manifest, sizes and checksums are right; else what is wrong, '' where there is none."""
    if not folder.is_dir():
        return "it is no folder" if os.path.lexists(folder) else ""
    try:
        manifest = read_manifest(folder)
        for name, value in (expected or {}).items():
            if manifest.get(name) != value:
                return f"its {name} is {manifest.get(name)!r}, not {value!r}"
        for name, entry in manifest["files"].items():
            path = folder / name
            size = path.stat().st_size
            if size != entry["bytes"]:
                return f"{name} has {size} bytes instead of {entry['bytes']}"
            with open(path, "rb") as stream:
                shape, _, dtype = _read_header(stream)
                if list(shape) != entry["shape"] or dtype.str != entry["dtype"]:
                    return f"{name} has another shape than its manifest says"
                if checksum(stream) != entry["digest"]:
                    return f"the checksum of {name} is wrong"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"it cannot be read ({type(error).__name__}: {str(error)[:200]})"
    return None


def _read_header(stream):
    np.lib.format.read_magic(stream)
    header = np.lib.format.read_array_header_1_0(stream)
    stream.seek(HEADER_BYTES)
    return header


def open_array(folder: Path, name: str) -> np.ndarray:
    """A read-only array of a verified folder, mapped into memory."""
    array = (
        np.load(folder / name, mmap_mode="r", allow_pickle=False)
        if _rows(folder / name)
        else np.load(folder / name, allow_pickle=False)
    )
    return array


def _rows(path: Path) -> int:
    with open(path, "rb") as stream:
        return int(np.prod(_read_header(stream)[0]))
