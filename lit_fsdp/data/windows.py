"""Windows of rows, read from sources on and on: what is shuffled together while streaming.

Without weights the sources come one after another. With weights each next row is of the source that has given least
for its weight, and a source at its end begins again until each has ended once. That is an epoch, and the next one
begins at the first rows again; a window holds rows of one epoch only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from lit_fsdp.data.files import Position, Row
from lit_fsdp.data.parts import combined
from lit_fsdp.data.sources import Source
from lit_fsdp.errors import DataError


@dataclass(frozen=True)
class Window:
    """Rows that are shuffled together."""

    epoch: int
    number: int
    """In its epoch, from 0."""
    rows: list[tuple[int, Row]]
    """Number of the source, place and columns."""
    start: dict[str, Any]
    """Where its first row stands, for JSON: :meth:`RowWindows.read` goes on from there."""


class RowWindows:
    """Reads windows of rows; any number of readers see the same ones.

    Args:
        sources: In the order of the recipe; with weights all of them have one.
        size: Rows of a window; the last one of an epoch may have less.

    Raises:
        DataError: A source has no rows, or of no known format.
    """

    def __init__(self, sources: Sequence[Source], size: int) -> None:
        self.sources, self.size = list(sources), size
        self.formats = [source.row_format for source in self.sources]
        self.fingerprint = combined([source.digest for source in self.sources])
        """Of the content; the order depends on it."""

    def read(self, start: dict[str, Any] | None = None) -> Iterator[Window]:
        """Windows without end from a :attr:`Window.start` on; ``None``: from the first row.

        Raises:
            DataError: A row or file is broken, a whole epoch has no row, or a source is not what it was when ``start``
                was noted.
        """
        self._check(start)
        epoch, number = (start["epoch"], start["window"]) if start else (0, 0)
        readers = self._readers(start["sources"] if start else None)
        while True:
            stream = self._epoch(readers)
            while True:
                at = {
                    "epoch": epoch,
                    "window": number,
                    "fingerprint": self.fingerprint,
                    "sources": [reader.state() for reader in readers],
                }
                rows = list(islice(stream, self.size))
                if rows:
                    yield Window(epoch, number, rows, at)
                    number += 1
                if len(rows) < self.size:
                    break
            if number == 0:
                raise DataError(f"{self._names()}: no rows\n  fix:     a source needs at least one row")
            epoch, number, readers = epoch + 1, 0, self._readers(None)

    def _readers(self, states: list[dict[str, Any]] | None) -> list[_Reader]:
        states = states or [{} for _ in self.sources]
        return [_Reader(source, **state) for source, state in zip(self.sources, states, strict=True)]

    def _check(self, start: dict[str, Any] | None) -> None:
        if start and start["fingerprint"] != self.fingerprint:
            raise DataError(
                f"{self._names()}: not what was streamed when the checkpoint was written\n"
                "  fix:     resume with the same files; train on others from an exported model"
            )

    def _names(self) -> str:
        return ", ".join(source.name for source in self.sources)

    def _epoch(self, readers: list[_Reader]) -> Iterator[tuple[int, Row]]:
        weights = [source.weight for source in self.sources]
        if weights[0] is None:
            for index, reader in enumerate(readers):
                while reader.ended == 0 and (row := reader.next()) is not None:
                    yield index, row
            return
        while True:
            index = min(range(len(readers)), key=lambda i: ((readers[i].taken + 1) / float(weights[i] or 1), i))
            row = readers[index].next()
            if all(reader.ended for reader in readers):
                return
            yield index, row if row is not None else readers[index].again()


class _Reader:
    """The rows of one source, and where it stands."""

    def __init__(
        self, source: Source, at: Position | None = None, skip: int = 0, ended: int = 0, taken: int = 0
    ) -> None:
        self._source = source
        self._at, self._skip = at, skip
        self.ended, self.taken = ended, taken
        """Times that it has ended, and rows that it has given, in this epoch."""
        self._rows: Iterator[Row] | None = None

    def state(self) -> dict[str, Any]:
        """Arguments that make a reader which goes on here."""
        return {"at": self._at, "skip": self._skip, "ended": self.ended, "taken": self.taken}

    def next(self) -> Row | None:
        """The next row, ``None`` at the end."""
        if self._rows is None:
            self._rows = self._read()
        row = next(self._rows, None)
        if row is None:
            self.ended += 1
            self._rows, self._at, self._skip = None, None, 0
            return None
        self._skip += 1
        self.taken += 1
        return row

    def again(self) -> Row:
        """The first row, after the end."""
        row = self.next()
        if row is None:
            raise DataError(f"{self._source.name}: no rows\n  fix:     a source needs at least one row")
        return row

    def _read(self) -> Iterator[Row]:
        skip = self._skip
        for chunk in self._source.chunks(self._at):
            rows = chunk.rows()
            if skip > len(rows):
                raise DataError(
                    f"{self._source.name}: ends earlier than when the checkpoint was written\n"
                    "  fix:     resume with the same files"
                )
            self._at, self._skip = chunk.start, skip
            yield from rows[skip:]
            skip = 0
