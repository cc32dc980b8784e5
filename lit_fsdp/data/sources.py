"""Sources of a recipe: found by file, glob, folder or name, with their row format and a digest of their content."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lit_fsdp.config.data import GENERATED, HUB_SLICE, DataConfig, RowFormat, SourceConfig, Sources, check_sources
from lit_fsdp.data.formats import find_format
from lit_fsdp.data.readers import (
    KINDS,
    Chunk,
    Part,
    Position,
    Row,
    file_part,
    folder_parts,
    hub_part,
    kind_of,
    reading,
    unreadable,
)
from lit_fsdp.errors import DataError, require
from lit_fsdp.host import make_once

_EDGE_BYTES = 2**16
_RACY_SECONDS = 2.0
"""A file that was written so recently may be written again without another time of change."""


@dataclass(frozen=True)
class Source:
    """The rows of one entry of the recipe, not read yet; ``columns`` are pairs of our column and the source's."""

    name: str
    parts: tuple[Part, ...]
    format: RowFormat = "auto"
    """As the recipe has it; :attr:`row_format` is what the rows have."""
    weight: float | None = None
    columns: tuple[tuple[str, str], ...] = ()

    @cached_property
    def row_format(self) -> RowFormat:
        """The format of the rows, found from the columns of the first one unless the recipe says it.

        Raises:
            DataError: There is no row, its columns are of no known format, or a mapped column is not there.
        """
        bad: DataError | None = None
        for chunk in self.chunks():
            for location, row in chunk.rows():
                if isinstance(row, dict):
                    self._check_columns(replace(chunk, columns=()).rows())
                    return find_format(set(row), location) if self.format == "auto" else self.format
                bad = bad or row
        raise bad or DataError(f"{self.name}: no rows\n  fix:     a source needs at least one row")

    def _check_columns(self, rows: list[Row]) -> None:
        there = {name for _, row in rows if isinstance(row, dict) for name in row}
        for ours, theirs in self.columns:
            if theirs not in there:
                raise DataError(
                    f"{rows[0][0]}: no column {theirs!r}, which columns maps to {ours!r}\n"
                    f"  allowed: {', '.join(sorted(map(str, there)))}"
                )

    def chunks(self, start: Position = None) -> Iterator[Chunk]:
        """Chunks of rows in order, from the ``start`` of a chunk on."""
        first, inside = start or (0, None)
        for index in range(first, len(self.parts)):
            for chunk in self.parts[index].chunks(inside if index == first else None):
                yield replace(chunk, start=[index, chunk.start], columns=self.columns)

    def seen(self) -> list[list[Any]]:
        """Path, size and time of change of every file."""
        paths = [path for part in self.parts for path in part.files()]
        try:
            return [[os.path.abspath(path), (now := path.stat()).st_size, now.st_mtime_ns] for path in paths]
        except OSError as error:
            raise unreadable(self.name, "", error) from error

    def digest(self, root: Path) -> str:
        """Of the content: kind and bytes of every file and not its path, or the commit of a data set on the hub.

        One process per cache ``root`` reads the bytes, once: it is remembered by path, size and time of change.
        """
        seen = self.seen()
        if not seen or max(time for *_, time in seen) > (time.time() - _RACY_SECONDS) * 1e9:
            return self._content(_file_digest)

        def make(partial: Path) -> None:
            (partial / "digest").write_text(self._content(_file_digest), encoding="ascii")

        key = _hash([[part.kind for part in self.parts], seen])
        return (make_once(root / "digests" / key, make, f"hashing {self.name}") / "digest").read_text(encoding="ascii")

    def edges_digest(self) -> str:
        """As :meth:`digest`, of size, beginning and end of each file: for streams, which nobody wants to read twice."""
        return self._content(_edges)

    def _content(self, read: Callable[[Path], Any]) -> str:
        return _hash([[_identity(part), *(read(path) for path in part.files())] for part in self.parts])


def find_sources(sources: Sources, config: DataConfig | None = None, streaming: bool = False) -> list[Source]:
    """The sources of one split, one per entry; globs and folders hold their files in sorted order.

    Args:
        sources: The value of ``data.train`` (or val, test, predict).
        config: Gives format and columns to entries without their own.
        streaming: Leave data sets on the hub there.

    Raises:
        DataError: A source that is missing or of an unknown kind.
    """
    config = config or DataConfig()
    found = []
    for entry in check_sources("train", sources):
        columns = config.columns if entry.columns is None else entry.columns
        pairs = tuple(sorted((columns or {}).items()))
        form = entry.format or config.format
        found.append(Source(entry.source, tuple(_parts(entry, streaming)), form, entry.weight, pairs))
    return found


def pinned(sources: Sources | None, commits: Sequence[str | None] = ()) -> list[SourceConfig]:
    """The entries of one split, data sets on the hub at a commit: of ``commits``, else what their names stand for."""
    entries = check_sources("train", sources)
    commits = commits or [_parts(entry, True)[0].revision for entry in entries]
    return [replace(entry, revision=commit) for entry, commit in zip(entries, commits, strict=True)]


def _parts(entry: SourceConfig, streaming: bool) -> list[Part]:
    parts = _found(entry, streaming)
    given = f"revision {entry.revision} of {entry.source}"
    require(entry.revision is None or parts[0].is_hub, "data", given, "a name on the hub")
    return parts


def _found(entry: SourceConfig, streaming: bool) -> list[Part]:
    name = entry.source
    if name.startswith(GENERATED):
        return [Part(name, "generated")]
    # os.path's functions answer no where pathlib's raise: a name too long, a home that does not exist
    path = os.path.expanduser(name)
    base, colon, split = path.rpartition(":")
    folder, wanted = (base, split) if colon and not os.path.exists(path) else (path, None)
    if glob.has_magic(name) and not (os.path.exists(path) or os.path.isdir(folder) or HUB_SLICE.fullmatch(name)):
        paths = [found for found in sorted(glob.glob(path, recursive=True)) if os.path.isfile(found)]
        if not paths:
            raise DataError(
                f"{name}: no file matches this pattern\n  fix:     check the path, relative to {Path.cwd()}"
            )
        return [file_part(found) for found in paths]
    if os.path.isdir(folder):
        return folder_parts(name, folder, wanted)
    if os.path.isfile(path):
        return [file_part(path)]
    if kind_of(path) in KINDS or name.startswith((".", "/", "~")):
        raise DataError(f"{name}: no such file\n  fix:     check the path, relative to {Path.cwd()}")
    return [hub_part(entry, streaming)]


def _identity(part: Part) -> list[str | None]:
    """What decides the rows of a part beside the bytes of its files."""
    if part.files():
        return [part.kind]
    return [part.kind.removesuffix(" stream"), part.name, part.configuration, part.split, part.revision]


def _file_digest(path: Path) -> str:
    with reading(path, unpacked=False) as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _edges(path: Path) -> list[Any]:
    with reading(path, unpacked=False) as file:
        size = os.fstat(file.fileno()).st_size
        first = file.read(_EDGE_BYTES)
        file.seek(max(0, size - _EDGE_BYTES))
        return [size, hashlib.blake2b(first + file.read(_EDGE_BYTES), digest_size=16).hexdigest()]


def _hash(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()
