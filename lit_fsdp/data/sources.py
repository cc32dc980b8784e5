"""Where rows come from: files, data sets that ``datasets`` saved or names, and generated ones.

A source is found and its content hashed at once; its rows are read only when they have to be tokenised.
"""

from __future__ import annotations

import difflib
import glob
import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_fsdp.data.files import READERS, Row
from lit_fsdp.data.generated import generated_rows
from lit_fsdp.errors import DataError

_CHUNK = 1000
_MOST_GENERATED = 1_000_000


@dataclass(frozen=True)
class Source:
    """The rows of one source, not read yet."""

    name: str
    digest: str
    """Of the source's content."""
    read: Callable[[], Iterator[Row]]

    def rows(self) -> Iterator[Row]:
        """Each row with its place (``file.jsonl:12``), in order.

        Raises:
            DataError: A row is broken, there is none, or the content is not what was hashed.
        """
        empty = True
        for row in self.read():
            empty = False
            yield row
        if empty:
            raise DataError(f"{self.name}: no rows\n  fix:     a source needs at least one row")


def find_sources(sources: str | list[str]) -> list[Source]:
    """One or several sources; globs become their files in sorted order.

    Raises:
        DataError: A source that is missing, unreadable or of an unknown kind.
    """
    found: list[Source] = []
    for name in [sources] if isinstance(sources, str) else sources:
        paths = [name]
        if glob.has_magic(name) and not os.path.exists(os.path.expanduser(name)):
            paths = sorted(glob.glob(os.path.expanduser(name), recursive=True))
        if not paths:
            raise DataError(
                f"{name}: no file matches this pattern\n  fix:     check the path, relative to {Path.cwd()}"
            )
        found.extend(_find(path) for path in paths)
    if not found:
        raise DataError("an empty list of sources\n  fix:     name at least one file, data set or generated:N")
    return found


def _find(name: str) -> Source:
    if name.startswith("generated:"):
        return _generated(name)
    # os.path's functions answer no where pathlib's raise: a name too long, a home that does not exist
    path = Path(os.path.expanduser(name))
    if os.path.isfile(path):
        return _file(name, path)
    folder, _, split = os.path.expanduser(name).rpartition(":")
    if os.path.isdir(folder):
        return _data_set(name, Path(folder), split)
    if os.path.isdir(path) or not (path.suffix in READERS or name.startswith((".", "/", "~"))):
        return _data_set(name, path)
    raise DataError(_missing(name, path))


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


def _file(name: str, path: Path) -> Source:
    if path.suffix not in READERS:
        raise DataError(f"{name}: unknown kind of file {path.suffix!r}\n  allowed: {', '.join(READERS)}")
    digest = _digest(path)

    def read() -> Iterator[Row]:
        for place, row in READERS[path.suffix](path):
            if not isinstance(row, dict):
                raise DataError(f"{place}: {type(row).__name__}, not an object with columns")
            yield place, row
        if _digest(path) != digest:
            raise DataError(f"{name}: changed while it was read\n  fix:     start again once the file is complete")

    return Source(name, digest, read)


def _digest(path: Path) -> str:
    """Of the bytes and of what they are read as."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest() + path.suffix
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})\n  fix:     check the permissions") from error


def _generated(name: str) -> Source:
    count = name.removeprefix("generated:")
    if not (count.isascii() and count.isdigit() and len(count) < 10 and 0 < int(count) <= _MOST_GENERATED):
        raise DataError(
            f"{name}: not a number of rows\n  allowed: 1 to {_MOST_GENERATED}\n  fix:     write generated:64"
        )
    return Source(name, name, lambda: ((f"{name}: row {i}", row) for i, row in enumerate(generated_rows(int(count)))))


def _data_set(name: str, path: Path, split: str = "train") -> Source:
    """A folder that ``datasets`` saved, or a name on the hub with an optional ``:split``."""
    import datasets

    datasets.disable_progress_bars()
    try:
        if os.path.isdir(path):
            loaded = datasets.load_from_disk(str(path))
        else:
            base, _, named = name.partition(":")
            loaded, split = datasets.load_dataset(base), named or split
    except Exception as error:  # datasets raises its own, OSError, ValueError and the hub's, by version
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise DataError(
            f"{name}: no such file below {Path.cwd()}, and datasets cannot load it ({why})\n"
            "  fix:     check the name; without a network name a file, or a folder written by save_to_disk"
        ) from error
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise DataError(f"{name}: no split {split!r}\n  allowed: {', '.join(loaded)} (write name:split)")
        loaded = loaded[split]
    return Source(name, str(loaded._fingerprint), lambda: _data_set_rows(name, loaded))


def _data_set_rows(name: str, loaded: Any) -> Iterator[Row]:
    for start in range(0, len(loaded), _CHUNK):
        part = loaded.select(range(start, min(start + _CHUNK, len(loaded)))).to_list()
        yield from ((f"{name}: row {start + i}", row) for i, row in enumerate(part))
