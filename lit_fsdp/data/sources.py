"""Rows from files, saved data sets and data set names, each row with a place that an error can name."""

from __future__ import annotations

import difflib
import glob
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_fsdp.data.generated import generated_rows
from lit_fsdp.errors import DataError

_FILES = (".jsonl", ".ndjson", ".json", ".parquet", ".csv", ".tsv")
_WRAPPERS = ("data", "rows", "train", "instances")


@dataclass(frozen=True)
class Source:
    """The rows of one source."""

    name: str
    rows: list[dict[str, Any]]
    places: list[str]
    """Where each row stands: ``file.jsonl:12``."""
    digest: str
    """Of the source's content."""


def read_sources(sources: str | list[str]) -> list[Source]:
    """Read one or several sources; globs become their files in sorted order.

    Raises:
        DataError: A source that is missing, unreadable, of an unknown kind or empty.
    """
    found: list[Source] = []
    for name in [sources] if isinstance(sources, str) else sources:
        paths = sorted(glob.glob(name, recursive=True)) if glob.has_magic(name) else [name]
        if not paths:
            raise DataError(
                f"{name}: no file matches this pattern\n  fix:     check the path, relative to {Path.cwd()}"
            )
        found.extend(_read(path) for path in paths)
    for source in found:
        if not source.rows:
            raise DataError(f"{source.name}: no rows\n  fix:     a source needs at least one row")
    return found


def _read(name: str) -> Source:
    if name.startswith("generated:"):
        return _generated(name)
    path = Path(name).expanduser()
    if path.is_file():
        content = path.read_bytes()
        rows, places = _file_rows(path, content)
        return Source(name, rows, places, hashlib.blake2b(content, digest_size=16).hexdigest())
    if path.is_dir() or not (path.suffix in _FILES or name.startswith((".", "/", "~"))):
        return _data_set(name, path)
    raise DataError(_missing(name, path))


def _missing(name: str, path: Path) -> str:
    folder = next((p for p in path.parents if p.is_dir()), Path())
    if folder != path.parent:
        return f"{name}: no such file; the folder {path.parent} does not exist\n  fix:     check the path of the source"
    near = difflib.get_close_matches(path.name, [p.name for p in folder.iterdir()], n=1, cutoff=0.4)
    hint = f"did you mean {folder / near[0]}?" if near else f"{folder.resolve()} has no file of a similar name"
    return f"{name}: no such file\n  fix:     {hint}"


def _file_rows(path: Path, content: bytes) -> tuple[list[dict[str, Any]], list[str]]:
    if path.suffix in (".jsonl", ".ndjson"):
        pairs = list(_jsonl(path, content))
        return [row for row, _ in pairs], [place for _, place in pairs]
    readers = {".json": _json, ".parquet": _parquet, ".csv": _csv, ".tsv": _csv}
    if path.suffix not in readers:
        raise DataError(f"{path}: unknown kind of file {path.suffix!r}\n  allowed: {', '.join(_FILES)}")
    rows = readers[path.suffix](path, content)
    for i, row in enumerate(rows):
        if not isinstance(row, dict):
            raise DataError(f"{path}: row {i} is {type(row).__name__}, not an object with columns")
    return rows, [f"{path}: row {i}" for i in range(len(rows))]


def _jsonl(path: Path, content: bytes) -> Iterator[tuple[dict[str, Any], str]]:
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        place = f"{path}:{number}"
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise DataError(f"{place}: not UTF-8 at byte {error.start} of the line\n  fix:     save as UTF-8") from None
        except (json.JSONDecodeError, RecursionError) as error:
            shown = line[:60].decode("utf-8", "replace")
            raise DataError(f"{place}: not JSON ({error}): {shown!r}\n  fix:     mend or remove this line") from None
        if not isinstance(row, dict):
            raise DataError(
                f"{place}: {type(row).__name__}, not an object with columns\n  fix:     one object per line"
            )
        yield row, place


def _json(path: Path, content: bytes) -> list[Any]:
    try:
        loaded = json.loads(content.decode("utf-8-sig"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"{path}: not JSON ({error})\n  fix:     name .jsonl what has one object per line") from None
    if isinstance(loaded, dict):
        lists = [loaded[key] for key in _WRAPPERS if isinstance(loaded.get(key), list)]
        loaded = lists[0] if lists else loaded
    if not isinstance(loaded, list):
        raise DataError(f"{path}: a JSON file holds a list of rows, or one under {', '.join(_WRAPPERS)}")
    return loaded


def _parquet(path: Path, content: bytes) -> list[Any]:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(pyarrow.BufferReader(content)).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a Parquet file ({error})") from None


def _csv(path: Path, content: bytes) -> list[Any]:
    import csv
    import io

    try:
        text = content.decode("utf-8-sig")
        reader = csv.DictReader(io.StringIO(text), delimiter="\t" if path.suffix == ".tsv" else ",", strict=True)
        rows = list(reader)
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: not a CSV file in UTF-8 ({error})") from None
    for i, row in enumerate(rows):
        if None in row or None in row.values():
            raise DataError(f"{path}: row {i} has another number of cells than the header")
    return rows


def _generated(name: str) -> Source:
    count = name.removeprefix("generated:")
    if not count.isdigit():
        raise DataError(f"{name}: not a number of rows\n  fix:     write generated:64")
    rows = generated_rows(int(count))
    return Source(name, rows, [f"{name} row {i}" for i in range(len(rows))], name)


def _data_set(name: str, path: Path) -> Source:
    """A folder that ``datasets`` saved, or a name on the hub with an optional ``:split``."""
    import datasets

    datasets.disable_progress_bars()
    try:
        if path.is_dir():
            loaded, split = datasets.load_from_disk(str(path)), "train"
        else:
            base, _, split = name.partition(":")
            loaded, split = datasets.load_dataset(base), split or "train"
    except Exception as error:  # datasets raises its own, OSError, ValueError and the hub's, by version
        raise DataError(
            f"{name}: not a file, and datasets cannot load it ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
            "\n  fix:     check the name; without a network name a file, or a folder written by save_to_disk"
        ) from error
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise DataError(f"{name}: no split {split!r}\n  allowed: {', '.join(loaded)} (write name:split)")
        loaded = loaded[split]
    rows = loaded.to_list()
    return Source(name, rows, [f"{name} row {i}" for i in range(len(rows))], loaded._fingerprint)
