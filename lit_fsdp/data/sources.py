"""Find the sources of a recipe by file, glob, folder or name, with their row format and a digest of their content."""

import glob
import hashlib
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from lit_fsdp.config.data import GENERATED, DataConfig, RowFormat, SourceConfig, Sources, TurnsConfig, check_sources
from lit_fsdp.data import readers
from lit_fsdp.data.formats import find_format, map_turns, unread_columns
from lit_fsdp.data.readers import RawRow, Row, kind_of, naming
from lit_fsdp.errors import DataError, require
from lit_fsdp.host import make_once

_COMMIT = re.compile("[0-9a-f]{40}")
_SLICE = re.compile(r"[\w./-]+:[^*?]*\[[^]]*:[^]]*\].*")  # imdb:train[:10%], not a file pattern
_JSON = json.JSONEncoder(sort_keys=True, default=str)
_EDGE_BYTES = 2**16
_HEAD_ROWS = 100
_RACY_NS = 2 * 10**9
"""A file modified this recently may be written again without a new modification time."""


@dataclass(frozen=True)
class Source:
    """One data entry of the recipe, read lazily."""

    name: str
    files: tuple[str, ...] = ()
    """Paths, or ``generated:N``; empty for a data set on the hub."""
    hub: dict[str, Any] | None = None
    """Arguments of ``datasets.load_dataset``, including the commit."""
    streaming: bool = False
    """Stream a data set from the hub instead of downloading it."""
    format: RowFormat = "auto"
    """Format set in the recipe; :attr:`row_format` is the resolved format."""
    weight: float | None = None
    columns: dict[str, str] | None = None
    turns: TurnsConfig | None = None

    @property
    def unread(self) -> list[str]:
        """Columns of the first rows that the row format does not read."""
        if self.files and all(path.startswith(GENERATED) for path in self.files):
            return []
        head = (row for _, row in islice(self.rows(), _HEAD_ROWS) if isinstance(row, dict))
        return unread_columns({str(name) for row in head for name in row}, self.row_format)

    @cached_property
    def row_format(self) -> RowFormat:
        """Row format from the recipe, or detected from the columns of the first row.

        Raises:
            DataError: There is no row, the format cannot be detected, or a mapped column is missing.
        """
        head = list(islice(self.rows(), _HEAD_ROWS))
        good = [(location, row) for location, row in head if isinstance(row, dict)]
        if not good:
            raise next((row for _, row in head if isinstance(row, DataError)), DataError(f"{self.name}: no rows"))
        there = {name for _, row in good for name in row}
        for ours, theirs in (self.columns or {}).items():
            if ours not in there:
                names = sorted({(self.columns or {}).get(name, name) for name in there})
                others = set((self.columns or {}).values()) - {theirs}
                near = get_close_matches(theirs, names, n=1) if others <= {*names} else []
                whole = {**(self.columns or {}), ours: near[0]} if near else {}
                same = {name.lower(): name for name in names}  # with other capitals
                spelled = {key: same.get(name.lower(), "") for key, name in (self.columns or {}).items()}
                if not near and "" not in spelled.values() and len({*spelled.values()}) == len(spelled):
                    near, whole = [theirs], spelled
                shown = yaml.safe_dump(
                    whole, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10_000
                )
                fix = f"set data.columns: {shown.strip()}"
                if not near:
                    fix = "set columns for one source, not data.columns for all: [{source: FILE, columns: {…}}]"
                text = f"{self.name}: no column {theirs!r}, mapped to {ours!r}\n  allowed: {names}\n  fix:     {fix}"
                raise DataError(text)
        turns = [turn for _, row in good for part in row.values() if isinstance(part, list) for turn in part]
        there = {key for turn in turns if isinstance(turn, dict) for key in turn}
        for ours, theirs in (self.turns.keys if self.turns else {}).items():
            if ours not in there:
                given = f"no message has the key {theirs!r}, which data.turns maps to {ours!r}"
                raise DataError(f"{self.name}: {given}\n  allowed: {sorted(there)}")
        location, row = good[0]
        return find_format(set(row), location) if self.format == "auto" else self.format

    def read(self, part: int = 0, row: int = 0) -> Iterator[tuple[tuple[int, int], RawRow]]:
        """Read unparsed rows starting at ``row`` of ``part``, each with the position after it.

        Parts are files, or shards of a stream; the starting part is read again from its beginning.
        """
        parts = self.files if self.hub is None else readers.hub_shards(self.hub, self.streaming)
        for number, one in islice(enumerate(parts), part, None):
            is_file, name = isinstance(one, str), f"{self.name}:{number}"
            rows = readers.read_file(one, row) if is_file else readers.read_table(name, one, row)
            for index, raw in enumerate(rows, row + 1):
                yield (number, index), raw
            row = 0

    def parse(self, raw: RawRow) -> Row:
        """Parse a raw row and rename its columns."""
        location, content = raw
        row = readers.from_json(content, location) if isinstance(content, bytes) else content
        if isinstance(row, dict):
            if mapped := self.columns:
                rest = {name: value for name, value in row.items() if name not in {*mapped, *mapped.values()}}
                row = rest | {ours: row[theirs] for ours, theirs in mapped.items() if theirs in row}
            row = map_turns(row, self.turns) if self.turns else row
        elif not isinstance(row, DataError):
            row = DataError(f"{location}: {type(row).__name__}, not an object with columns")
        return location, row

    def rows(self) -> Iterator[Row]:
        """Yield all rows, parsed."""
        return (self.parse(raw) for _, raw in self.read())

    def seen(self) -> list[tuple[str, int, int]]:
        """Return path, size and modification time of every file."""
        with naming(self.name):
            found = [(os.path.abspath(path), os.stat(path)) for path in self.files if not path.startswith(GENERATED)]
        return [(path, now.st_size, now.st_mtime_ns) for path, now in found]

    def digest(self, root: Path | None) -> str:
        """Hash the content: extension and bytes (not path) of every file, or the commit of a data set on the hub.

        One process per cache ``root`` reads the bytes once; the digest is cached by path, size and modification time.
        Without ``root`` (streams, which should not be read twice) only size, beginning and end of each file are hashed.
        """
        if root is None:
            return self._content(_EDGE_BYTES)
        seen = self.seen()
        if not seen or max(changed for *_, changed in seen) > time.time_ns() - _RACY_NS:
            return self._content()

        def make(partial: Path) -> None:
            (partial / "digest").write_text(self._content())

        key = content_hash([[kind_of(path) for path in self.files], seen])
        return (make_once(root / "digests" / key, make, f"hashing {self.name}") / "digest").read_text()

    def _content(self, most: int | None = None) -> str:
        """Hash all bytes, or ``most`` bytes at the beginning and end of each file."""
        with naming(self.name):
            files = [
                [kind_of(path), path if path.startswith(GENERATED) else _digest(path, most)] for path in self.files
            ]
        return content_hash([files, self.hub])


def find_sources(sources: Sources, config: DataConfig | None = None, streaming: bool = False) -> list[Source]:
    """Find the sources of one split, one per entry; format and columns default to those of ``config``.

    Raises:
        DataError: A source is missing.
    """
    config = config or DataConfig()
    found = []
    for entry in check_sources("train", sources):
        files, hub = _found(entry)
        require(entry.revision is None or hub, "data", f"revision of {entry.source}", "a name on the hub")
        columns = config.columns if entry.columns is None else entry.columns
        form, turns = entry.format or config.format, entry.turns or config.turns
        if files and all(file.startswith(GENERATED) for file in files):
            # data.columns and so on describe the user's files; generated rows are conversations, or pairs of them
            columns, turns = entry.columns, entry.turns
            form = form if entry.format or form == "preference" else "messages"
        found.append(Source(entry.source, tuple(files), hub, streaming, form, entry.weight, columns, turns))
    return found


def pinned(sources: Sources | None) -> list[SourceConfig]:
    """Return the entries of one split, with data sets on the hub pinned to their current commit."""
    entries = check_sources("train", sources)
    return [replace(entry, revision=hub["revision"]) if (hub := _found(entry)[1]) else entry for entry in entries]


def check_files(config: DataConfig, splits: Sequence[str]) -> None:
    """Check that the files of some splits exist, before a model is downloaded; names on the hub are not looked up.

    Raises:
        DataError: A file or folder is missing.
    """
    for split in splits:
        split = "train" if split == "val" and config.val_split is not None else split
        for entry in check_sources(split, getattr(config, split)):
            _files(entry.source)


def _found(entry: SourceConfig) -> tuple[list[str], dict[str, Any] | None]:
    """Return the files of an entry, or its hub arguments."""
    files = _files(entry.source)
    return files, None if files else _hub(entry)


def _files(name: str) -> list[str]:
    """Return the files of a source, or ``generated:N``; empty for a name on the hub."""
    if name.startswith(GENERATED):
        return [name]
    if re.fullmatch(r"0?\.\d+", name):
        fix = f"set data.val_split: {name} for a share of the rows of data.train"
        raise DataError(f"{name}: a number, not a source of rows\n  fix:     {fix}")
    # os.path returns False where pathlib raises: a name too long, a missing home folder
    path = os.path.expanduser(name)
    folder, _, split = path.rpartition(":")
    if os.path.isdir(path):
        return readers.files_of_split(path, "train")
    if os.path.isfile(path):
        return [path]
    if os.path.isdir(folder):
        return readers.files_of_split(folder, split)
    is_pattern = glob.has_magic(name) and not _SLICE.fullmatch(name)
    files = [found for found in sorted(glob.glob(path, recursive=True)) if os.path.isfile(found)] if is_pattern else []
    kinds = [*readers.KINDS, *readers.SPREADSHEETS]
    is_file_name = kind_of(path) in kinds
    if "/" not in path or os.path.isdir(os.path.dirname(path)):  # else it may be a name on the hub
        is_file_name |= bool(get_close_matches(kind_of(path), kinds, n=1, cutoff=0.7))  # misspelled
    if not files and (is_pattern or is_file_name or name.startswith((".", "/", "~"))):
        raise DataError(f"{name}: no such file\n  fix:     check the path, relative to {Path.cwd()}")
    return files


def _hub(entry: SourceConfig) -> dict[str, Any]:
    """Parse ``name``, ``name:split`` or ``name:configuration:split``, and resolve the revision to a commit.

    This queries the hub unless the revision is a commit.
    """
    path, _, rest = entry.source.partition(":")
    rest, bracket, rows = rest.partition("[")  # the colon in train[:10%] is not a separator
    name, _, split = rest.rpartition(":")
    revision = entry.revision
    if not (revision and _COMMIT.fullmatch(revision)):
        revision = readers.hub_builder(path, name or None, revision).hash
    return {"path": path, "name": name or None, "split": (split or "train") + bracket + rows, "revision": revision}


def _digest(path: str, most: int | None) -> list[Any]:
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if most is None:
            return [size, hashlib.file_digest(file, "blake2b").hexdigest()]
        first = file.read(most)
        file.seek(max(0, size - most))
        return [size, hashlib.blake2b(first + file.read(most)).hexdigest()]


def content_hash(value: Any) -> str:
    """Hash a JSON value to 32 hexadecimal digits."""
    return hashlib.blake2b(_JSON.encode(value).encode(), digest_size=16).hexdigest()
