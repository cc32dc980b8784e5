"""Where rows come from: files, folders, data sets of ``datasets`` by path or name, and generated ones.

A source is found and its content hashed at once; its rows are read only when they have to be tokenised.
"""

from __future__ import annotations

import difflib
import glob
import itertools
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lit_fsdp.config.data import GENERATED, HUB_SLICE, DataConfig, RowFormat, SourceConfig, Sources, check_sources
from lit_fsdp.data.files import Chunk, Position, Row
from lit_fsdp.data.folders import folder_files, is_saved
from lit_fsdp.data.formats import find_format
from lit_fsdp.data.parts import READERS, GeneratedPart, Part, combined, file_part
from lit_fsdp.data.saved import hub_data_set, saved_folder
from lit_fsdp.errors import DataError

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """The rows of one entry of the recipe, not read yet.

    To tokenise with several processes, send each of :meth:`chunks` to one of them and call ``chunk.rows()`` there.
    """

    name: str
    """As the recipe has it."""
    parts: tuple[Part, ...]
    format: RowFormat = "auto"
    """As the recipe has it; :attr:`row_format` is what the rows have."""
    weight: float | None = None
    columns: tuple[tuple[str, str], ...] = ()
    """Pairs of our column and the source's."""

    @property
    def digest(self) -> str:
        """Of the content: bytes and kind of each file, not its place."""
        digests = [part.digest for part in self.parts]
        return digests[0] if len(digests) == 1 else combined(digests)

    @cached_property
    def row_format(self) -> RowFormat:
        """The format of the rows, found from the columns of the first one unless the recipe says it.

        Raises:
            DataError: There is no row, its columns are of no known format, or a mapped column is not there.
        """
        chunks = self.chunks()
        seen = []
        rows: list[Row] = []
        for chunk in chunks:
            seen.append(chunk)
            try:
                rows.extend(chunk.each())
            except DataError:
                if not rows:  # else it is told when its turn comes, as a row before it may be bad in another way
                    raise
            if rows:
                break
        if not rows:
            raise DataError(f"{self.name}: no rows\n  fix:     a source needs at least one row")
        # JSON is parsed whole, so what is open is read on instead of beginning again, but by nobody else.
        self.__dict__["_opened"] = os.getpid(), itertools.chain(seen, chunks)
        self._check_columns(replace(seen[-1], columns=()).rows())
        if self.format != "auto":
            return self.format
        form = find_format(set(rows[0][1]), rows[0][0])
        _log.info("%s: rows of format %s, found from their columns (data.format sets another)", self.name, form)
        return form

    def _check_columns(self, rows: list[Row]) -> None:
        for ours, theirs in self.columns:
            if not any(theirs in row for _, row in rows):
                there = {name for _, row in rows for name in row}
                raise DataError(
                    f"{rows[0][0]}: no column {theirs!r}, which columns maps to {ours!r}\n"
                    f"  allowed: {', '.join(sorted(map(str, there)))}"
                )

    def chunks(self, start: Position | None = None) -> Iterator[Chunk]:
        """Chunks of rows in order; cheap, as nothing is parsed.

        Args:
            start: ``chunk.start`` of an earlier chunk, from which to go on without reading what came before.

        Raises:
            DataError: A file cannot be read, or its content is not what was hashed.
        """
        process, opened = self.__dict__.pop("_opened", (None, iter(())))
        return opened if start is None and process == os.getpid() else self._chunks(start)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_opened"}

    def _chunks(self, start: Position | None) -> Iterator[Chunk]:
        first, inside = start or (0, None)
        for index in range(first, len(self.parts)):
            part = self.parts[index]
            for chunk in part.chunks(inside if index == first else None):
                yield replace(chunk, start=[index, chunk.start], columns=self.columns)
            part.check()

    def rows(self) -> Iterator[Row]:
        """Each row with its place (``file.jsonl:12``), in order, parsed here.

        Raises:
            DataError: A row is broken, there is none, or the content is not what was hashed.
        """
        empty = True
        for chunk in self.chunks():
            for row in chunk.rows():
                empty = False
                yield row
        if empty:
            raise DataError(f"{self.name}: no rows\n  fix:     a source needs at least one row")


def find_sources(sources: Sources, config: DataConfig | None = None, streaming: bool = False) -> list[Source]:
    """The sources of one split, one per entry; globs and folders hold their files in sorted order.

    Args:
        sources: The value of ``data.train`` (or val, test, predict).
        config: Gives format and columns to entries without their own.
        streaming: Hash only the edges of files and leave data sets on the hub there.

    Raises:
        DataError: A source that is missing, unreadable or of an unknown kind.
        ConfigError: Some entries have a weight and some have none.
    """
    config = config or DataConfig()
    return [_find(entry, config, streaming) for entry in check_sources("train", sources)]


def _find(entry: SourceConfig, config: DataConfig, streaming: bool) -> Source:
    columns = config.columns if entry.columns is None else entry.columns
    return Source(
        name=entry.source,
        parts=tuple(_parts(entry.source, streaming)),
        format=entry.format or config.format,
        weight=entry.weight,
        columns=tuple(sorted((columns or {}).items())),
    )


def _parts(name: str, streaming: bool) -> list[Part]:
    if name.startswith(GENERATED):
        return [GeneratedPart(name)]
    # os.path's functions answer no where pathlib's raise: a name too long, a home that does not exist
    path = Path(os.path.expanduser(name))
    base, colon, split = name.rpartition(":")
    folder, wanted = (Path(os.path.expanduser(base)), split) if colon and not os.path.exists(path) else (path, None)
    if glob.has_magic(name) and not (os.path.exists(path) or os.path.isdir(folder) or HUB_SLICE.fullmatch(name)):
        paths = [Path(found) for found in sorted(glob.glob(str(path), recursive=True)) if os.path.isfile(found)]
        if not paths:
            raise DataError(
                f"{name}: no file matches this pattern\n  fix:     check the path, relative to {Path.cwd()}"
            )
        return [file_part(path, streaming) for path in paths]
    if os.path.isdir(folder):
        if is_saved(folder):
            return [saved_folder(name, folder, wanted)]
        return [file_part(file, streaming) for file in folder_files(name, folder, wanted, frozenset(READERS))]
    if os.path.isfile(path):
        return [file_part(path, streaming)]
    if path.suffix in (*READERS, ".gz") or name.startswith((".", "/", "~")):
        raise DataError(_missing(name, path))
    return [hub_data_set(name, streaming)]


def _missing(name: str, path: Path) -> str:
    if not os.path.isdir(path.parent):
        return f"{name}: no such file; the folder {path.parent} does not exist\n  fix:     check the path of the source"
    try:
        names = [entry for entry in os.listdir(path.parent) if entry != path.name]
    except OSError as error:
        return f"{name}: the folder {path.parent} cannot be read ({error.strerror})\n  fix:     check its permissions"
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.4)
    hint = f"did you mean {path.parent / near[0]}?" if near else "check the path of the source"
    return f"{name}: no such file in {path.parent.resolve()}\n  fix:     {hint}"
