"""Rows of local files: json, json lines, csv, tsv (all of them also compressed), parquet, and the arrow files of
`datasets`.

Every reader is a generator, so that memory does not grow with the file (a json array is the exception: it is read
whole), and no row may be larger than MAX_ROW, so that a small compressed file cannot fill the memory. It yields
`(number, row)` with the line or row number that an error message should name. Nothing here can run code: there is no
pickle, no loading script, and a folder's own metadata may not point outside that folder. Whatever is wrong with a file
ends as a ValueError that names the file, the place and the fault. That is also why the `datasets` library does not read
local files here: its errors name no line, and it writes a copy of each file first.
"""

import bz2
import csv
import gzip
import hashlib
import io
import json
import lzma
import os
import stat
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from atomic_files import checksum, hasher, write_atomically

PROGRAMS = {"gz": "gzip", "zst": "zstd", "bz2": "bzip2", "xz": "xz"}
COMPRESSED = tuple(f".{suffix}" for suffix in PROGRAMS)
TEXT_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
DATA_SUFFIXES = (
    *(suffix + packed for packed in COMPRESSED for suffix in TEXT_SUFFIXES),
    *TEXT_SUFFIXES,
    ".parquet",
    ".arrow",
)
MAX_ROW = 1 << 25  # bytes: eight million tokens
MAX_UNPACKED_JSON = 1 << 28  # bytes of a compressed json array, which is read whole


def data_suffix(path) -> str:
    """The data suffix of a path, or '' when it is no data file."""
    name = Path(path).name.lower()
    return next((suffix for suffix in DATA_SUFFIXES if name.endswith(suffix)), "")


def looks_like_path(name: str) -> bool:
    """Whether a data set's name can only be meant as a path."""
    return name.startswith(("/", "./", "../", "~", ".\\", "..\\")) or bool(data_suffix(name)) or "\\" in name


def row_location(file, number) -> str:
    """How messages name a row: 'FILE, line 12' for line formats and 'FILE, row 12' for the others."""
    word = "line" if _kind(file)[0] in ("jsonl", "ndjson", "csv", "tsv") else "row"
    return f"{file}, {word} {number}"


def _kind(file) -> tuple[str, str]:
    """(kind of rows, compression or '') of a data file, by its name."""
    kind, _, packed = data_suffix(file).lstrip(".").partition(".")
    return kind, packed


def known_suffixes() -> str:
    """The suffixes of data files, for messages."""
    plain = [suffix for suffix in DATA_SUFFIXES if suffix.count(".") == 1]
    return f"{', '.join(plain)}, and text files also with {', '.join(COMPRESSED)}"


def check_regular(file) -> None:
    """Raises ValueError for what is no file with content: a pipe or a device could keep a reader waiting for ever."""
    try:
        mode = os.stat(file).st_mode
    except OSError as error:
        raise ValueError(f"{file}: cannot be read ({error})") from error
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a named pipe" if stat.S_ISFIFO(mode) else "a device or socket"
        raise ValueError(f"{file}: is {kind}, not a file; write what is needed into a file")


def check_no_pipes(path) -> None:
    """Raises ValueError when a folder, or the path itself, is or holds a pipe or device, whose reader would wait."""
    below = (os.path.join(root, name) for root, _, names in os.walk(path) for name in names)
    for file in (os.fspath(path), *below):
        with suppress(OSError):  # a link that leads nowhere: its reader says so
            mode = os.stat(file).st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise ValueError(f"{file}: is a named pipe, a device or a socket, not a file; remove it")


def read_rows(file, wanted=None):
    """Yields (number from 1, row as a dict) of one data file.

    wanted: names of the columns of interest; columnar formats read no others. A line that is no row comes as the
    ValueError that says why: others can still be read. Raises ValueError on any other fault.
    """
    file = Path(file)
    kind, packed = _kind(file)
    check_regular(file)
    try:
        if kind in ("parquet", "arrow"):
            yield from (_read_parquet if kind == "parquet" else _read_arrow)(file, wanted)
        else:
            with _opened(file) as stream:
                yield from _TEXT_READERS[kind](file, stream)
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise ValueError(f"{file}: broken {PROGRAMS[packed]} file ({error})") from error
    except OSError as error:
        fault = f"broken {PROGRAMS[packed]} file, or it cannot be read" if packed else "cannot be read"
        raise ValueError(f"{file}: {fault} ({error})") from error


def column_names(file) -> list[str] | None:
    """The columns of a file's rows, None for a file without rows; of columnar files no row is read.

    Raises ValueError on any fault.
    """
    kind, _ = _kind(file)
    if kind not in ("parquet", "arrow"):
        first = None
        for number, row in read_rows(file):
            if not isinstance(row, ValueError):
                return list(row)
            first = first or ValueError(f"{row_location(file, number)}: {row}")
        if first is not None:
            raise first
        return None
    check_regular(file)
    import pyarrow
    import pyarrow.parquet

    try:
        if kind == "parquet":
            with pyarrow.parquet.ParquetFile(file) as source:
                return source.schema_arrow.names if source.metadata.num_rows else None
        with pyarrow.memory_map(str(file)) as source:
            batch = next((batch for batch in _arrow_batches(source) if batch.num_rows), None)
            return None if batch is None else batch.schema.names
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError, OverflowError, KeyError) as error:
        raise ValueError(f"{file}: cannot be read as {kind} ({type(error).__name__}: {str(error)[:200]})") from error


def _opened(file: Path):
    packed = _kind(file)[1]
    if packed == "zst":
        import pyarrow

        return io.BufferedReader(pyarrow.input_stream(str(file), compression="zstd"))
    openers: dict[str, Callable[..., Any]] = {"gz": gzip.open, "bz2": bz2.open, "xz": lzma.open, "": open}
    return openers[packed](file, "rb")


def _lines(file, stream):
    """Yields (number, line), each of at most MAX_ROW bytes."""
    number = 1
    while line := stream.readline(MAX_ROW + 1):
        if len(line) > MAX_ROW:
            raise ValueError(f"{row_location(file, number)}: longer than {MAX_ROW >> 20} MB, which no row may be")
        yield number, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        number += 1


def _read_json_lines(file, stream):
    for number, line in _lines(file, stream):
        if line.strip():
            yield number, _json_object(line)


def _json_object(line: bytes) -> dict | ValueError:
    try:
        row = parse_json(line)
    except ValueError as error:
        return error
    return row if isinstance(row, dict) else ValueError(f"expected a JSON object with columns, got {describe(row)}")


def parse_json(data: bytes):
    """json.loads, but every failure is a ValueError that names what is wrong with the text."""
    try:
        return json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text ({error.reason} at byte {error.start}); save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        at = f"line {error.lineno}, column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        raise ValueError(f"invalid JSON ({error.msg} at {at})") from error
    except (RecursionError, ValueError) as error:
        raise ValueError(f"invalid JSON ({type(error).__name__}: {str(error)[:200]})") from error


def _read_json(file, stream):
    """A .json file: one array of objects, an object that holds such an array under data, rows or a split, or lines."""
    data = stream.read() if not _kind(file)[1] else stream.read(MAX_UNPACKED_JSON + 1)
    if _kind(file)[1] and len(data) > MAX_UNPACKED_JSON:
        raise ValueError(
            f"{file}: unpacked more than {MAX_UNPACKED_JSON >> 20} MB, which are read whole; write JSON lines"
        )
    data = data.removeprefix(b"\xef\xbb\xbf")
    lines = data.split(b"\n")
    filled = [number for number, line in enumerate(lines) if line.strip()]
    if filled and lines[filled[0]].lstrip().startswith(b"{") and _is_json(lines[filled[0]]):
        # The first line is a whole object: JSON lines under another name, or a single object.
        first = json.loads(lines[filled[0]])
        if len(filled) > 1 or not _rows_inside(first):
            for number in filled:
                yield number + 1, _json_object(lines[number])
            return
    if not filled:
        return
    del lines
    try:
        whole = parse_json(data)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    rows = whole if isinstance(whole, list) else _rows_inside(whole)
    if rows is None:
        raise ValueError(
            f"{file}: expected an array of objects, JSON lines, or an object holding an array under "
            f"'data' or 'rows'; got {describe(whole)}"
        )
    for number, row in enumerate(rows, 1):
        good = isinstance(row, dict)
        yield number, row if good else ValueError(f"expected an object with columns, got {describe(row)}")


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _rows_inside(value):
    if isinstance(value, dict):
        for key in ("data", "rows"):
            if isinstance(value.get(key), list):
                return value[key]
    return None


def _read_csv(file, stream, delimiter=","):
    csv.field_size_limit(MAX_ROW)
    row_bytes = 0

    def text_lines():
        nonlocal row_bytes
        for number, line in _lines(file, stream):
            row_bytes += len(line)
            if row_bytes > MAX_ROW:
                raise ValueError(f"{file}, line {number}: a row of more than {MAX_ROW >> 20} MB; is a quote missing?")
            try:
                yield line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{file}, line {number}: not UTF-8 text ({error.reason}); save the file as UTF-8"
                ) from error

    reader = csv.reader(text_lines(), strict=True, delimiter=delimiter)
    header = None
    try:
        for cells in reader:
            row_bytes = 0
            if header is None:
                header = cells
                if len(set(header)) < len(header):
                    raise ValueError(f"{file}, line 1: two columns of the same name in the header {header}")
                continue
            if not cells:
                continue
            if len(cells) != len(header):
                raise ValueError(f"{file}, line {reader.line_num}: {len(cells)} cells under {len(header)} columns")
            yield reader.line_num, dict(zip(header, cells))
    except csv.Error as error:
        raise ValueError(f"{file}, line {reader.line_num}: invalid CSV ({error})") from error


_TEXT_READERS: dict[str, Callable[..., Any]] = {
    "jsonl": _read_json_lines,
    "ndjson": _read_json_lines,
    "json": _read_json,
    "csv": _read_csv,
    "tsv": partial(_read_csv, delimiter="\t"),
}


def _read_parquet(file, wanted):
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as source:
            names = source.schema_arrow.names
            columns = [name for name in names if wanted is None or name in wanted] or names
            yield from _arrow_rows(source.iter_batches(batch_size=256, columns=columns))
    except (pyarrow.ArrowException, UnicodeDecodeError, OverflowError, KeyError) as error:
        raise ValueError(f"{file}: cannot be read as parquet ({type(error).__name__}: {str(error)[:200]})") from error


def _read_arrow(file, wanted):
    import pyarrow

    try:
        with pyarrow.memory_map(str(file)) as source:
            yield from _arrow_rows(_select(_arrow_batches(source), wanted))
    except (pyarrow.ArrowException, UnicodeDecodeError, OverflowError, KeyError) as error:
        raise ValueError(f"{file}: cannot be read as arrow ({type(error).__name__}: {str(error)[:200]})") from error


def _arrow_batches(source):
    import pyarrow

    try:
        return pyarrow.ipc.open_stream(source)
    except pyarrow.ArrowInvalid:  # the file flavour of the format ends in a footer
        source.seek(0)
        opened = pyarrow.ipc.open_file(source)
        return (opened.get_batch(index) for index in range(opened.num_record_batches))


def _select(batches, wanted):
    for batch in batches:
        names = batch.schema.names
        batch = batch.select([name for name in names if wanted is None or name in wanted] or names)
        batch.validate(full=True)  # else damaged offsets would be followed out of the file
        for start in range(0, batch.num_rows, 256):
            yield batch.slice(start, 256)


def _arrow_rows(batches):
    number = 0
    for batch in batches:
        for row in batch.to_pylist():
            number += 1
            yield number, row


def describe(value) -> str:
    """A value as an error message shows it: its kind, and the start of it."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, float) and value != value:
        return "NaN (a number)"
    kind = {
        str: "text",
        bool: "a true/false value",
        int: "a number",
        float: "a number",
        list: "a list",
        dict: "an object",
    }.get(type(value), f"a {type(value).__name__}")
    shown = ascii(value) if not isinstance(value, (list, dict)) else f"{len(value)} entries"
    return f"{kind} ({shown if len(shown) <= 60 else shown[:57] + '...'})"


def quoted(text) -> str:
    """A name as an error message shows it: in quotes, on one line, and not longer than a line."""
    shown = repr(text) if str(text).isprintable() else ascii(text)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def named(names, most: int = 20) -> str:
    """Column names as an error message lists them: sorted, and not more than can be read."""
    shown = [quoted(name) for name in sorted(map(str, names))]
    return "[" + ", ".join(shown[:most]) + (f" and {len(shown) - most} more]" if len(shown) > most else "]")


def fingerprint_files(files, memory: Path | None) -> str:
    """A digest of the files' contents, in order.

    memory: a folder that remembers digests by (path, size, times, inode), so that a file is read once; None or an
    unwritable one costs a read of the files at every start.
    """
    total = hasher()
    for file in files:
        total.update(data_suffix(file).encode() + _file_digest(Path(file), memory))
    return total.hexdigest()


def _file_digest(file: Path, memory: Path | None) -> bytes:
    check_regular(file)
    try:
        status = file.stat()
        path = str(file.resolve())
        identity = [path, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
        note = None
        if memory is not None:
            note = memory / (
                hashlib.blake2b(path.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest() + ".json"
            )
            known = _remembered(note, identity)
            if known:
                return known
        with open(file, "rb") as stream:
            digest = checksum(stream)
    except OSError as error:
        raise ValueError(f"{file}: cannot be read ({error})") from error
    # A file changed within the clock's grain would keep its times, so only one at rest is remembered.
    if note is not None and time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) > 2_000_000_000:
        _remember(note, identity, digest)
    return bytes.fromhex(digest)


def _remembered(note: Path, identity) -> bytes | None:
    try:
        known = json.loads(note.read_text(encoding="utf-8"))
        return bytes.fromhex(known["digest"]) if known["file"] == identity else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remember(note: Path, identity, digest: str):
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(note, json.dumps({"file": identity, "digest": digest}).encode(), durable=False)
    except (OSError, UnicodeError):
        pass  # remembering is a convenience: without it the file is hashed again
