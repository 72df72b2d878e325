"""Files and folders that are written whole or not at all, also by several processes at once, and their checksums."""

import contextlib
import errno
import functools
import hashlib
import os
import re
import secrets
import shutil
import socket
import time
import zlib
from collections.abc import Callable
from typing import BinaryIO

from utils import digest


@functools.cache
def process_space() -> str:
    """Names what process ids count in: containers may share a host name and a disk, but not their ids."""
    parts = []
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as boot:  # Linux only
        parts = [boot.read(), os.readlink("/proc/self/ns/pid")]
    return f"{socket.gethostname()}.{digest(parts)[:8]}"


def temporary_beside(path) -> str:
    """A new name beside `path` for something unfinished. It names this process: see remove_leftovers."""
    return f"{os.fspath(path)}.{process_space()}-{os.getpid()}-{secrets.token_hex(4)}.tmp"


def write_atomically(
    path, content: bytes | Callable[[BinaryIO], object], durable: bool = True, replace: bool = True
) -> None:
    """Write a file such that other processes, and whoever comes after a kill, find the old content or the new, whole.

    Args:
        content: the bytes, or a function that writes them into an open binary file.
        durable: return only when the file and its name are on disk, where also a power cut cannot harm them.
        replace: False leaves an existing file as it is and raises FileExistsError: of several writers one wins.
    Raises:
        OSError: it could not be written. `path` is as before, and nothing else is left in its folder.
    """
    temporary = temporary_beside(path)
    try:
        # Not tempfile.mkstemp, whose files nobody else may read: runs and caches can be shared.
        with open(temporary, "xb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        if replace or not _linked(temporary, path):
            os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    if durable:
        sync_folder(os.path.dirname(path) or ".")


def _linked(temporary: str, path) -> bool:
    """Give a file its final name unless that is taken (FileExistsError). False on a file system without links."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:
        if os.path.exists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(path)) from None
        return False
    os.unlink(temporary)
    return True


def sync_folder(path) -> None:
    """Force a folder's names to the disk. File systems that cannot (some network ones) are left alone."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


def try_lock(file) -> bool:
    """Take the lock on an open file (or descriptor); False while another process has it.

    The kernel frees it when the last handle on this opening is closed, kill -9 included. OSError where the system or
    the file system has no locks. Not lockf, whose lock is dropped when this process closes any other handle.
    """
    try:
        import fcntl
    except ImportError:  # pragma: no cover (not a POSIX system)
        raise OSError(errno.ENOTSUP, "no file locks on this system") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            raise
        return False
    return True


def remove_leftovers(folder) -> None:
    """Remove what killed processes left in `folder` under names of `temporary_beside`.

    That is what belongs to a process of this host and container that is gone, and of others what is more than an hour
    old, but only files: a folder can take hours to write.
    """
    ours = re.compile(rf".*\.{re.escape(process_space())}-(\d+)-[0-9a-f]+\.tmp")
    for entry in list(os.scandir(folder)):
        if not re.search(r"\d-[0-9a-f]+\.tmp$", entry.name):
            continue  # not of our making: the folder may hold other things
        with contextlib.suppress(OSError):  # another process removed it first
            match = ours.fullmatch(entry.name)
            is_folder = entry.is_dir(follow_symlinks=False)
            if match and not _is_running(int(match[1])):
                shutil.rmtree(entry.path) if is_folder else os.unlink(entry.path)
            elif not is_folder and time.time() - entry.stat(follow_symlinks=False).st_mtime > 3600:
                os.unlink(entry.path)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # another user's
    return True


def hasher(algorithm: str = "blake2b"):
    """An object with update(bytes) and hexdigest(), or None for an algorithm that this machine lacks.

    blake2b (16 bytes): for what a cache is found by. xxh3_64 (several GB/s; xxhash comes with `datasets`, but a
    checkpoint must be readable without it) and crc32 (about one GB/s): only against damage.
    """
    if algorithm == "blake2b":
        return hashlib.blake2b(digest_size=16)
    if algorithm == "crc32":
        return _Crc32()
    if algorithm == "xxh3_64":
        with contextlib.suppress(ImportError):
            import xxhash

            return xxhash.xxh3_64()
    return None


class _Crc32:
    value = 0

    def update(self, data):
        self.value = zlib.crc32(data, self.value)

    def hexdigest(self):
        return f"{self.value:08x}"


def checksum(content: bytes | BinaryIO, algorithm: str = "blake2b") -> str:
    """Hex digest of bytes, or of the rest of an open binary file."""
    total = hasher(algorithm)
    assert total is not None, algorithm
    if isinstance(content, bytes):
        total.update(content)
    else:
        while block := content.read(1 << 22):
            total.update(block)
    return total.hexdigest()
