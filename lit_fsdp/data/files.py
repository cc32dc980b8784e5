"""Readers of row files: chunks of rows as they lie in the file, and the parsing of a chunk, which any process can do.

Cutting a file into chunks is cheap (bytes up to a line end, batches of a Parquet file); turning them into rows is not.
So one process reads and many parse. Every chunk knows where it begins, from where reading can go on later.
"""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from lit_fsdp.errors import DataError

Row = tuple[str, dict[str, Any]]
"""Place and columns."""
Position = list[Any]
"""Where a reader stands, for JSON: what it holds is the affair of the reader of that kind of file."""

_BOM = b"\xef\xbb\xbf"
_BLOCK_BYTES = 2**18
_RECORDS = 512
_LARGEST_LINE = 2**30
_LARGEST_CELL = 2**31 - 1


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows of one file, not parsed yet; small to send to another process."""

    name: str
    """File or data set, for the places of its rows."""
    first: int
    """Number of its first line or row."""
    content: Any
    """What ``parse`` takes apart: bytes of lines, an Arrow stream, cells, or rows."""
    parse: Callable[[Chunk], Iterator[tuple[str, Any]]]
    """A function at the head of a module, so that it is sent by name."""
    start: Position
    """Where the reader stood before it."""
    columns: tuple[tuple[str, str], ...] = ()
    """Pairs of our column and the file's."""

    def rows(self) -> list[Row]:
        """Every row with its place (``file.jsonl:12``, ``file.parquet: row 11``), in order.

        Raises:
            DataError: A row is broken or is no object with columns.
        """
        return list(self.each())

    def each(self) -> Iterator[Row]:
        """The same one by one, so that the rows before a broken one are seen."""
        for place, row in self.parse(self):
            if not isinstance(row, dict):
                raise DataError(f"{place}: {type(row).__name__}, not an object with columns")
            yield place, _renamed(row, self.columns) if self.columns else row


def _renamed(row: dict[str, Any], columns: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    taken = {name for pair in columns for name in pair}
    rest = {name: value for name, value in row.items() if name not in taken}
    return {**rest, **{ours: row[theirs] for ours, theirs in columns if theirs in row}}


@contextmanager
def reading(path: Path) -> Iterator[Any]:
    """The bytes of a file, unpacked if it ends in ``.gz``; what goes wrong while reading is a DataError."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            yield file
    except (EOFError, zlib.error, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise DataError(f"{path}: cannot be read ({error.strerror})\n  fix:     check the file") from None
        raise DataError(
            f"{path}: damaged or cut off ({' '.join(str(error).split())[:200]})\n"
            "  fix:     copy or write the file again"
        ) from None


def jsonl_chunks(path: Path, start: Position | None) -> Iterator[Chunk]:
    """One JSON object per line. Position: byte offset and number of the line there."""
    offset, number = start or (0, 1)
    with reading(path) as file:
        file.seek(offset)
        while block := file.read(_BLOCK_BYTES):
            if not block.endswith(b"\n"):
                block += file.readline(_LARGEST_LINE)
                if len(block) >= _LARGEST_LINE:
                    raise DataError(f"{path}:{number + block.count(10)}: a line of more than {_LARGEST_LINE} bytes")
            yield Chunk(str(path), number, block, _lines, [offset, number])
            offset, number = offset + len(block), number + block.count(b"\n")


def _lines(chunk: Chunk) -> Iterator[tuple[str, Any]]:
    """Empty lines and a byte order mark at the head of the file are skipped."""
    for number, line in enumerate(chunk.content.split(b"\n"), start=chunk.first):
        content = line.removeprefix(_BOM) if number == 1 else line
        if content and not content.isspace():
            place = f"{chunk.name}:{number}"
            yield place, _json_line(content, place)


def _json_line(line: bytes, place: str) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(
            f"{place}: not UTF-8 at byte {error.start} of the line\n  fix:     save the file as UTF-8"
        ) from None
    except (ValueError, RecursionError) as error:
        shown = line[:60].decode("utf-8", "replace").rstrip()
        raise DataError(f"{place}: not JSON ({error}): {shown!r}\n  fix:     mend or remove this line") from None


def json_chunks(path: Path, start: Position | None) -> Iterator[Chunk]:
    """A list of objects, alone or as the only list in an object; held in memory whole. Position: row.

    Files of one object per line, which many name ``.json``, are read as :func:`jsonl_chunks` reads them.
    """
    if _has_an_object_per_line(path):
        yield from jsonl_chunks(path, start)
        return
    try:
        with reading(path) as file:
            loaded = json.loads(file.read().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path}: not JSON ({error})\n  fix:     name .jsonl what has one object per line") from None
    if isinstance(loaded, dict):
        lists = [value for value in loaded.values() if isinstance(value, list)]
        if len(lists) != 1 and isinstance(loaded.get("data"), list):
            lists = [loaded["data"]]
        loaded = lists[0] if len(lists) == 1 else loaded
    if not isinstance(loaded, list):
        raise DataError(
            f"{path}: a JSON file holds a list of rows, or an object with one list, such as data\n"
            "  fix:     write [{...}, {...}], or name .jsonl what has one object per line"
        )
    for first in range(start[0] if start else 0, len(loaded), _RECORDS):
        yield Chunk(str(path), first, loaded[first : first + _RECORDS], numbered_rows, [first])


def _has_an_object_per_line(path: Path) -> bool:
    """Whether the first line is a whole object and something follows it."""
    with reading(path) as file:
        first = next((line for line in file if not line.removeprefix(_BOM).isspace()), b"").removeprefix(_BOM)
        if not first.lstrip().startswith(b"{") or not any(not line.isspace() for line in file):
            return False
        try:
            return isinstance(json.loads(first.decode("utf-8")), dict)
        except (ValueError, RecursionError):
            return False


def numbered_rows(chunk: Chunk) -> Iterator[tuple[str, Any]]:
    """Rows that are there already, named by their number."""
    yield from ((f"{chunk.name}: row {i}", row) for i, row in enumerate(chunk.content, start=chunk.first))


class _Lines:
    """Decoded lines of a file, which knows how far a reader of records has come."""

    def __init__(self, file: IO[bytes], path: Path, offset: int, number: int) -> None:
        self._file, self._path, self.offset, self.number = file, path, offset, number
        file.seek(offset)

    def __iter__(self) -> Iterator[str]:
        for line in self._file:
            start, self.offset, self.number = self.offset, self.offset + len(line), self.number + 1
            try:
                yield line.decode("utf-8-sig" if start == 0 else "utf-8")
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{self._path}:{self.number}: not UTF-8 at byte {error.start} of the line\n"
                    "  fix:     save the file as UTF-8"
                ) from None


def csv_chunks(path: Path, start: Position | None, delimiter: str = ",") -> Iterator[Chunk]:
    """A header and one row per record, named by the line on which it ends. Position: byte offset and lines before."""
    csv.field_size_limit(_LARGEST_CELL)
    with reading(path) as file:
        lines = _Lines(file, path, 0, 0)
        records = _records(lines, path, delimiter)
        _, header = next(records, (0, []))
        twice = sorted({name for name in header if header.count(name) > 1})
        if twice:
            raise DataError(f"{path}:1: two columns are called {twice[0]!r}\n  fix:     rename one of them")
        if start:
            lines = _Lines(file, path, *start)
            records = _records(lines, path, delimiter)
        found, at = [], [lines.offset, lines.number]
        for number, cells in records:
            if len(cells) != len(header):
                raise DataError(f"{path}:{number}: another number of cells than the {len(header)} columns")
            found.append((number, cells))
            if len(found) == _RECORDS:
                yield Chunk(str(path), at[1] + 1, (header, found), _cells, at)
                found, at = [], [lines.offset, lines.number]
        if found:
            yield Chunk(str(path), at[1] + 1, (header, found), _cells, at)


def _records(lines: _Lines, path: Path, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    try:
        yield from ((lines.number, cells) for cells in csv.reader(lines, delimiter=delimiter, strict=True) if cells)
    except csv.Error as error:
        raise DataError(
            f"{path}:{lines.number}: not CSV ({error})\n  fix:     mend the quotes of this record"
        ) from None


def _cells(chunk: Chunk) -> Iterator[tuple[str, Any]]:
    header, records = chunk.content
    yield from ((f"{chunk.name}:{number}", dict(zip(header, cells, strict=True))) for number, cells in records)


def tsv_chunks(path: Path, start: Position | None) -> Iterator[Chunk]:
    """As :func:`csv_chunks`, with tabs."""
    return csv_chunks(path, start, "\t")
