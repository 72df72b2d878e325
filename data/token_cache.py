"""A folder of arrays on disk: written as a stream, published atomically, verified when it is read.

    <cache>/<name>-<split>-<key>/   manifest.json   tokens.npy   segment_starts.npy   ...

Writers fill a temporary folder beside it, sync it, and rename it; whoever comes second keeps the first one's. A folder
whose sizes or checksums are not those of its manifest counts as absent.
"""

import hashlib
import json
import os
import shutil
import socket
import uuid
from pathlib import Path

import numpy as np

HEADER_BYTES = 128  # of every .npy file, fixed so that the shape can be filled in at the end


class CacheWriteError(OSError):
    """The cache folder cannot take the arrays (full, read-only, ...)."""


class ArrayFile:
    """A .npy file that grows by appending. row: the shape of one entry, () for a scalar."""

    def __init__(self, path: Path, dtype, row: tuple = ()):
        self.path, self.dtype, self.row = path, np.dtype(dtype), row
        self.length = 0
        self._digest = hashlib.blake2b(digest_size=16)
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


def new_folder(parent: Path, prefix: str) -> Path:
    """A fresh temporary folder in `parent`, named so that the leftovers of a dead process can be told."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _sweep(parent)
        folder = parent / f"{prefix}.tmp-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        folder.mkdir()
        return folder
    except OSError as error:
        raise CacheWriteError(error.errno, str(error)) from error


def _sweep(parent: Path):
    """Removes temporary folders of processes of this host that are gone."""
    for folder in parent.glob(f"*.tmp-{socket.gethostname()}-*"):
        try:
            process = int(folder.name.rsplit("-", 2)[1])
            os.kill(process, 0)
        except ProcessLookupError:
            shutil.rmtree(folder, ignore_errors=True)
        except (ValueError, OSError):
            pass


def _sync_folder(folder: Path):
    try:
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError:
        pass  # not every file system can sync a folder; the checksums catch what that may lose


def write_manifest(folder: Path, manifest: dict):
    body = json.dumps(manifest, sort_keys=True)
    checked = {"manifest": manifest, "digest": hashlib.blake2b(body.encode(), digest_size=16).hexdigest()}
    try:
        with open(folder / "manifest.json", "w", encoding="utf-8") as stream:
            json.dump(checked, stream, indent=1, sort_keys=True)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        raise CacheWriteError(error.errno, str(error)) from error
    _sync_folder(folder)


def publish(temporary: Path, final: Path) -> Path:
    """Gives a finished folder its name; where a sound one of that name exists already, that one stays."""
    for _ in range(3):
        try:
            os.rename(temporary, final)
            _sync_folder(final.parent)
            return final
        except OSError as error:
            if not final.exists():
                raise CacheWriteError(error.errno, str(error)) from error
        if not why_unusable(final):
            shutil.rmtree(temporary, ignore_errors=True)
            return final
        aside = final.with_name(f"{final.name}.tmp-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}")
        try:
            os.rename(final, aside)
        except OSError:
            continue  # another writer moved it first
        shutil.rmtree(aside, ignore_errors=True)
    raise CacheWriteError(0, f"{final} cannot be replaced")


def read_manifest(folder: Path) -> dict:
    """The manifest, checked against its own digest. Raises ValueError or OSError."""
    checked = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    manifest = checked["manifest"]
    body = json.dumps(manifest, sort_keys=True)
    if hashlib.blake2b(body.encode(), digest_size=16).hexdigest() != checked["digest"]:
        raise ValueError("its manifest is damaged")
    return manifest


def why_unusable(folder: Path, expected: dict | None = None) -> str | None:
    """None for a folder whose manifest, sizes and checksums are right; else what is wrong, '' where there is none."""
    if not folder.is_dir():
        return ""
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
            digest = hashlib.blake2b(digest_size=16)
            with open(path, "rb") as stream:
                shape, _, dtype = _read_header(stream)
                if list(shape) != entry["shape"] or dtype.str != entry["dtype"]:
                    return f"{name} has another shape than its manifest says"
                while block := stream.read(1 << 20):
                    digest.update(block)
            if digest.hexdigest() != entry["digest"]:
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
