"""Rows of files and data sets, one after another, as they lie there; JSON lines are parsed later, by any process.

JSON, CSV and text are read here, tables by ``datasets``: its JSON reader infers one type for each key, which makes
dates of texts like "2020-01-01", floats of whole numbers, and None of keys that only other rows have; its CSV reader
shifts the columns where the first record has a cell too many.
"""

from __future__ import annotations

import csv
import glob
import gzip
import io
import json
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from lit_fsdp.config.data import GENERATED
from lit_fsdp.errors import DataError

Row = tuple[str, dict[str, Any] | DataError]
"""Location (``rows.jsonl:12``) and columns, or why it cannot be read."""
RawRow = tuple[str, Any]
"""Location, and columns, or why they cannot be read, or bytes of JSON."""

_WORDS = ("red", "green", "blue", "white", "black", "yellow", "box", "ball", "cup", "book", "lamp", "hat")
_BOM = b"\xef\xbb\xbf"
_TABLE_ROWS = 250
_TABLES = {".parquet": "parquet", ".arrow": "arrow"}
_SEPARATORS = {".csv": ",", ".tsv": "\t"}
KINDS = (".jsonl", ".ndjson", ".json", ".txt", *_TABLES, *_SEPARATORS)
"""Endings of row files; ``.gz`` may follow."""


def kind_of(path: str) -> str:
    """The ending that says how a file is read; ``.gz`` behind it counts for nothing."""
    return Path(path.removesuffix(".gz")).suffix.lower()


def read_file(path: str, start: int = 0) -> Iterator[RawRow]:
    """The rows of a file, or of ``generated:N``, from the ``start``-th on; DataError where it cannot be read on."""
    kind = kind_of(path)
    if kind in _TABLES:
        import datasets

        options: Any = {"data_files": glob.escape(path), "split": "train", "streaming": True}
        with naming(path):
            table = datasets.load_dataset(_TABLES[kind], **options)
        return read_table(path, table, start)
    if path.startswith(GENERATED):
        with naming(path):
            rows: Iterable[Any] = generated_rows(int(path.removeprefix(GENERATED)))
    elif kind in _SEPARATORS:
        rows = _records(path, _SEPARATORS[kind])
    elif kind == ".json" and not _has_lines(path):
        rows = _document(path)
    else:
        return islice(_lines(path, kind == ".txt"), start, None)
    return islice(((f"{path}: row {number}", row) for number, row in enumerate(rows)), start, None)


def read_table(name: str, table: Any, start: int = 0) -> Iterator[RawRow]:
    """The rows of a data set of ``datasets``, which is read in batches, from the ``start``-th on."""
    number = 0
    with naming(name):
        for batch in table.with_format("arrow").iter(batch_size=_TABLE_ROWS):
            if number + len(batch) > start:
                batch.validate(full=True)  # a damaged file may hold offsets that point beside the text
                kinds = {field.name: field.type for field in batch.schema}
                for index, row in enumerate(batch.to_pylist(), number):
                    if index >= start:
                        yield f"{name}: row {index}", {key: _as_written(row[key], kinds[key]) for key in row}
            number += len(batch)


def files_of_split(folder: str, split: str) -> list[str]:
    """Files of a split: of what ``datasets`` saved in a folder, or as it finds them by their names or the README.md."""
    import datasets

    found: Any
    with naming(folder):
        if Path(folder, "state.json").is_file() or Path(folder, "dataset_dict.json").is_file():
            found = datasets.load_from_disk(folder).cache_files
        else:
            found = datasets.load_dataset_builder(folder).config.data_files or {}
    splits = {str(name): files for name, files in found.items()} if isinstance(found, dict) else {"train": found}
    if split not in splits:
        raise DataError(f"{folder}: no split {split!r}\n  allowed: {', '.join(splits)} (write folder:split)")
    return [file if isinstance(file, str) else file["filename"] for file in splits[split]]


def hub_shards(hub: dict[str, Any], streaming: bool) -> list[Any]:
    """A data set on the hub, by the arguments of ``datasets.load_dataset``; a stream as the shards that it has."""
    import datasets

    datasets.disable_progress_bars()
    hub_builder(hub["path"], hub["name"], hub["revision"])
    with naming(hub["path"]):
        table: Any = datasets.load_dataset(**hub, streaming=streaming)
        return [table.shard(table.num_shards, n) for n in range(table.num_shards)] if streaming else [table]


def hub_builder(name: str, configuration: str | None, revision: str | None) -> Any:
    """What knows the commit of a data set on the hub, as its ``hash``."""
    import datasets

    with naming(f"{name}: no such file below {Path.cwd()}, and on the hub"):
        builder = datasets.load_dataset_builder(name, configuration, revision=revision)
    # without a network datasets takes whatever commit it finds in its cache
    if revision and type(builder).__name__ == "Cache" and builder.hash != revision:
        held = f"its cache has commit {builder.hash}, not revision {revision}"
        raise DataError(f"{name}: the hub does not answer, and {held}\n  fix:     name that commit, or find a network")
    return builder


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Put the name of what is read into a library's error: into that of its first cause, as ``datasets`` wraps it."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # datasets raises its own, OSError, ValueError, pyarrow's and the hub's, by version
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        why = " ".join(str(cause).split())[:300]
        raise DataError(f"{name}: cannot be read ({type(cause).__name__}: {why})") from error


@contextmanager
def _opened(path: str) -> Iterator[Any]:
    with naming(path), gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb") as file:
        yield file


def _lines(path: str, is_text: bool) -> Iterator[RawRow]:
    with _opened(path) as file:
        for number, line in enumerate(file, start=1):
            location = f"{path}:{number}"
            if line.removeprefix(_BOM).strip():
                yield location, from_json(line, location, is_text) if is_text else line


def _has_lines(path: str) -> bool:
    """Whether the first line of a JSON file is a row."""
    with _opened(path) as file:
        first = next((line for line in file if line.removeprefix(_BOM).strip()), b"").removeprefix(_BOM).lstrip()
    return first[:1] == b"{" and isinstance(from_json(first, path), dict)  # a list may be the whole file on one line


def _document(path: str) -> list[Any]:
    """The rows of a JSON file: a list of them, or one."""
    with _opened(path) as file:
        loaded = from_json(file.read(), path)
    if isinstance(loaded, DataError):
        raise loaded
    return loaded if isinstance(loaded, list) else [loaded]


def _records(path: str, separator: str) -> Iterator[dict[str, str] | DataError]:
    """Rows of texts: "007" and "NA" stay what they are."""
    csv.field_size_limit(2**31 - 1)  # cells may be whole documents
    with _opened(path) as file, io.TextIOWrapper(file, "utf-8-sig", newline="") as text:
        records = csv.reader(text, delimiter=separator, strict=True)
        names = next(records, [])
        if len(set(names)) < len(names):
            raise DataError(f"{path}: two columns of one name among {', '.join(names)}")
        try:
            for number, cells in enumerate(filter(None, records)):  # without empty lines
                problem = f"{path}: row {number}: {len(cells)} cells for the {len(names)} columns {', '.join(names)}"
                yield dict(zip(names, cells, strict=True)) if len(cells) == len(names) else DataError(problem)
        except csv.Error as error:
            raise DataError(f"{path}: line {records.line_num}: not CSV ({error})") from error


def from_json(content: bytes, location: str, is_text: bool = False) -> Any:
    """What the content says, or the error that it is none."""
    try:
        text = content.removeprefix(_BOM).decode("utf-8")
        return {"text": text.rstrip("\r\n")} if is_text else json.loads(text)
    except UnicodeDecodeError as error:
        return DataError(f"{location}: not UTF-8 at byte {error.start}")
    except (ValueError, RecursionError) as error:
        shown = content[:60].decode("utf-8", "replace").rstrip()
        return DataError(f"{location}: not JSON ({error}): {shown!r}")


def _as_written(value: Any, kind: Any) -> Any:
    """A value of an Arrow type as it was written: JSON taken apart, no key that only other rows have."""
    import pyarrow

    if value is None or pyarrow.types.is_primitive(kind):
        return value
    if isinstance(kind, pyarrow.JsonType):
        return json.loads(value)
    if pyarrow.types.is_struct(kind):
        return {part.name: _as_written(value[part.name], part.type) for part in kind if value[part.name] is not None}
    is_list = pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind)
    if is_list and not pyarrow.types.is_primitive(kind.value_type):
        return [_as_written(part, kind.value_type) for part in value]
    return value


def generated_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """``count`` short conversations, the same for the same seed: words in reverse order, in one turn or two.

    As ``messages``, and as ``chosen`` beside ``rejected``, whose last answer ends in another word.
    """
    source = random.Random(seed)  # noqa: S311 (nothing secret is made)
    rows = []
    for number in range(count):
        turns = [{"role": "system", "content": "Repeat the words in reverse order."}] if number % 3 == 1 else []
        for _ in range(1 + (number % 3 == 2)):
            words = source.choices(_WORDS, k=source.randint(2, 6))
            answer = {"role": "assistant", "content": " ".join(reversed(words))}
            turns += [{"role": "user", "content": " ".join(words)}, answer]
        worse = {"role": "assistant", "content": f"{answer['content']}x"}
        rows.append({"messages": turns, "chosen": turns, "rejected": [*turns[:-1], worse]})
    return rows
