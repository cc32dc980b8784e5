"""What a source consists of: files, generated rows; each gives chunks of rows and knows whether it has changed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lit_fsdp.config.data import GENERATED
from lit_fsdp.data.columnar import arrow_chunks, parquet_chunks
from lit_fsdp.data.files import Chunk, Position, csv_chunks, json_chunks, jsonl_chunks, numbered_rows, tsv_chunks
from lit_fsdp.data.folders import kind_of
from lit_fsdp.data.generated import generated_rows
from lit_fsdp.errors import DataError

_EDGE_BYTES = 2**16
_ROWS = 500

READERS: dict[str, Callable[[Path, Position | None], Iterator[Chunk]]] = {
    ".jsonl": jsonl_chunks,
    ".ndjson": jsonl_chunks,
    ".json": json_chunks,
    ".parquet": parquet_chunks,
    ".arrow": arrow_chunks,
    ".csv": csv_chunks,
    ".tsv": tsv_chunks,
}
"""By the ending of the file; each gives chunks from a position on, and raises DataError where it cannot."""


class Part(Protocol):
    """One file or data set of a source."""

    @property
    def name(self) -> str:
        """As errors name it."""

    @property
    def digest(self) -> str:
        """Of its content."""

    def chunks(self, start: Position | None) -> Iterator[Chunk]:
        """Its rows, unparsed, from a position on that a chunk of it has as ``start``."""

    def check(self) -> None:
        """Raise DataError if it is not what was hashed."""


@dataclass(frozen=True)
class FilePart:
    """A file of rows."""

    path: Path
    digest: str
    streamed: bool
    """Whether only its edges were hashed."""
    seen: tuple[int, int]
    """Bytes and time of change when it was hashed."""

    @property
    def name(self) -> str:
        """Its path."""
        return str(self.path)

    def chunks(self, start: Position | None) -> Iterator[Chunk]:
        """Chunks of the reader for this kind of file."""
        return READERS[kind_of(self.path)](self.path, start)

    def check(self) -> None:
        """Raise DataError if the file is another one by now."""
        same = _seen(self.path) == self.seen
        if not same and (self.streamed or _digest(self.path, False) != self.digest):
            raise DataError(f"{self.path}: changed while it was read\n  fix:     start again once the file is complete")


def file_part(path: Path, streamed: bool) -> FilePart:
    """A file, hashed; while streaming only its size and edges.

    Raises:
        DataError: It cannot be read, or its kind is unknown.
    """
    if kind_of(path) not in READERS:
        raise DataError(f"{path}: unknown kind of file {path.suffix!r}\n  allowed: {', '.join(READERS)}, also .gz")
    seen = _seen(path)
    return FilePart(path, _digest(path, streamed), streamed, seen)


def _seen(path: Path) -> tuple[int, int]:
    try:
        now = os.stat(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})\n  fix:     check the permissions") from error
    return now.st_size, now.st_mtime_ns


def digest_of(path: Path) -> str:
    """Of a file's bytes and of what they are read as.

    Raises:
        DataError: It cannot be read.
    """
    return _digest(path, edges_only=False)


def _digest(path: Path, edges_only: bool) -> str:
    try:
        with path.open("rb") as file:
            if not edges_only:
                found = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
                return found + kind_of(path)
            size = os.fstat(file.fileno()).st_size
            content = file.read(_EDGE_BYTES)
            file.seek(max(0, size - _EDGE_BYTES))
            return _hash(b"%d/" % size + content + file.read(_EDGE_BYTES)) + kind_of(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})\n  fix:     check the permissions") from error


def combined(digests: Sequence[str]) -> str:
    """One digest of several, in their order."""
    return _hash("/".join(digests).encode())


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


class GeneratedPart:
    """Rows made on the spot: ``generated:N``; the name has been checked."""

    def __init__(self, name: str) -> None:
        self.name = self.digest = name
        self.count = int(name.removeprefix(GENERATED))

    def chunks(self, start: Position | None) -> Iterator[Chunk]:
        """Chunks of rows. Position: number of the row."""
        rows = generated_rows(self.count)
        for first in range(start[0] if start else 0, self.count, _ROWS):
            yield Chunk(self.name, first, rows[first : first + _ROWS], numbered_rows, [first])

    def check(self) -> None:
        """Nothing: they are always the same."""
