"""Read rows of files and data sets in order, unchanged; JSON lines are parsed later, in any process.

JSON, CSV and text are read here, tables by ``datasets``. The JSON reader of ``datasets`` infers one type per key: it
turns text like "2020-01-01" into dates, integers into floats, and keys that only other rows have into None. Its CSV
reader shifts the columns if the first record has an extra cell.
"""

import csv
import glob
import gzip
import io
import json
import random
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any

from lit_fsdp.config.data import GENERATED
from lit_fsdp.errors import DataError
from lit_fsdp.host import is_first_process, say_once

Row = tuple[str, dict[str, Any] | DataError]
"""Location (``rows.jsonl:12``), and columns or the error."""
RawRow = tuple[str, Any]
"""Location, and columns, or the error, or JSON bytes."""

_WORDS = ("red", "green", "blue", "white", "black", "yellow", "box", "ball", "cup", "book", "lamp", "hat")
_BOM = b"\xef\xbb\xbf"
_TABLE_ROWS = 250
_TABLES = {".parquet": "parquet", ".arrow": "arrow"}
_SEPARATORS = {".csv": ",;\t", ".tsv": "\t"}
"""Separators in the order in which they are tried: Excel writes the list separator of the user's region."""
SPREADSHEETS = (".xlsx", ".xls", ".ods", ".numbers")
_NOT_SUPPORTED = (".bz2", ".xz", ".zst", ".zip")
KINDS = (".jsonl", ".ndjson", ".json", ".txt", *_TABLES, *_SEPARATORS)
"""File extensions of row files; the extension ``.gz`` may follow."""


def kind_of(path: str) -> str:
    """Return the file extension that selects the reader, without a trailing ``.gz``."""
    return Path(path.lower().removesuffix(".gz")).suffix


def read_file(path: str, start: int = 0) -> Iterator[RawRow]:
    """Read the rows of a file, or of ``generated:N``, from row ``start``; DataError if reading fails."""
    kind = kind_of(path)
    if kind in _NOT_SUPPORTED:
        raise DataError(f"{path}: compression {kind} is not supported\n  allowed: .gz\n  fix:     decompress it")
    if kind in SPREADSHEETS:
        raise DataError(f"{path}: spreadsheets are not supported\n  allowed: CSV\n  fix:     save it as CSV in UTF-8")
    if kind in _TABLES:
        import datasets

        options: Any = {"data_files": glob.escape(path), "split": "train", "streaming": True}
        if kind == ".parquet":  # the default of datasets 5.2, the size of the first row group, must not be 0
            options["batch_size"] = 4 * _TABLE_ROWS
        with naming(path):
            table = datasets.load_dataset(_TABLES[kind], **options)
        return read_table(path, table, start)
    if path.startswith(GENERATED):
        with naming(path):
            rows: Iterable[Any] = generated_rows(int(path.removeprefix(GENERATED)))
    elif kind in _SEPARATORS:
        return islice(_records(path, _SEPARATORS[kind]), start, None)
    elif kind == ".json" and not _has_lines(path):
        rows = _document(path)
    else:
        return islice(_lines(path, kind == ".txt"), start, None)
    return islice(((f"{path}: row {number}", row) for number, row in enumerate(rows)), start, None)


def read_table(name: str, table: Any, start: int = 0) -> Iterator[RawRow]:
    """Read the rows of a ``datasets`` data set from row ``start``, in batches."""
    number = 0
    with naming(name):
        for batch in table.with_format("arrow").iter(batch_size=_TABLE_ROWS):
            if number + len(batch) > start:
                batch.validate(full=True)  # a damaged file may have offsets outside the text
                kinds = {field.name: field.type for field in batch.schema}
                for index, row in enumerate(batch.to_pylist(), number):
                    if index >= start:
                        yield f"{name}: row {index}", {key: _as_written(row[key], kinds[key]) for key in row}
            number += len(batch)


def files_of_split(folder: str, split: str) -> list[str]:
    """List the files of a split, saved by ``datasets`` or found by it through file names or the README.md."""
    import datasets

    found: Any
    with naming(folder):
        if Path(folder, "state.json").is_file() or Path(folder, "dataset_dict.json").is_file():
            found = datasets.load_from_disk(folder).cache_files
        else:
            found = datasets.load_dataset_builder(folder).config.data_files or {}
            _say_unread(folder, found)
    splits = {str(name): files for name, files in found.items()} if isinstance(found, dict) else {"train": found}
    if split not in splits:
        raise DataError(f"{folder}: no split {split!r}\n  allowed: {', '.join(splits)} (write folder:split)")
    return [file if isinstance(file, str) else file["filename"] for file in splits[split]]


def _say_unread(folder: str, found: dict[str, list[str]]) -> None:
    """Warn about row files that ``datasets`` leaves out: it reads those of the most frequent kind."""
    if not is_first_process():
        return
    readme = Path(folder, "README.md")
    if readme.is_file() and re.search("^configs:", readme.read_text(encoding="utf-8", errors="replace"), re.M):
        return  # which lists the files
    read = {Path(file).resolve() for files in found.values() for file in files}
    kinds = (*_TABLES, *_SEPARATORS, ".jsonl", ".ndjson")  # a .json file may be a configuration
    there = (file for file in Path(folder).rglob("*") if kind_of(str(file)) in kinds and file.resolve() not in read)
    others = sorted(str(file.relative_to(folder)) for file in there)
    names = [name for name in others if not re.search(r"(^|/)(\.|__)", name)]  # hidden
    if names:
        shown = ", ".join([*names[:5], *["…"] * (len(names) > 5)])
        why = "because datasets reads one kind of file in a folder, and chooses by the names of splits"
        text = f"{folder}: files that are not read, {why}: {shown}"
        say_once(f"{text}\n  fix:     list the sources: data.train: [{folder}, {folder}/{names[0]}]")


def hub_shards(hub: dict[str, Any], streaming: bool) -> list[Any]:
    """Load a data set from the hub with the arguments of ``datasets.load_dataset``; a stream as its shards."""
    import datasets

    datasets.disable_progress_bars()
    hub_builder(hub["path"], hub["name"], hub["revision"])
    with naming(hub["path"]):
        table: Any = datasets.load_dataset(**hub, streaming=streaming)
        return [table.shard(table.num_shards, n) for n in range(table.num_shards)] if streaming else [table]


def hub_builder(name: str, configuration: str | None, revision: str | None) -> Any:
    """Return the builder of a data set on the hub, whose ``hash`` is the commit."""
    import datasets

    with naming(f"{name} (no such file in {Path.cwd()}; looked up on the hub)"):
        builder = datasets.load_dataset_builder(name, configuration, revision=revision)
    # without a network, datasets uses any commit in its cache
    if revision and type(builder).__name__ == "Cache" and builder.hash != revision:
        held = f"its cache has commit {builder.hash}, not revision {revision}"
        raise DataError(f"{name}: cannot reach the hub, and {held}\n  fix:     set that commit, or check the network")
    return builder


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Convert a library's error to a DataError with the source's name and the root cause, which ``datasets`` wraps."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # by version, datasets raises its own errors, OSError, ValueError, or pyarrow's
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        why = " ".join(str(cause).split())[:300]
        fix = _to_utf8(cause) if isinstance(cause, UnicodeDecodeError) else ""
        raise DataError(f"{name}: cannot be read ({type(cause).__name__}: {why}){fix}") from error


def _to_utf8(error: UnicodeDecodeError) -> str:
    """The fix for text in another encoding, which its first bytes may name."""
    encoding = "UTF-16" if error.object.startswith((b"\xff\xfe", b"\xfe\xff")) else "WINDOWS-1252"
    return f"\n  fix:     convert the file to UTF-8, for example with iconv -f {encoding} -t UTF-8"


@contextmanager
def _opened(path: str) -> Iterator[Any]:
    with naming(path), gzip.open(path, "rb") if path.lower().endswith(".gz") else open(path, "rb") as file:
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
    """Return the rows of a JSON file: a list of rows, or a single row."""
    with _opened(path) as file:
        loaded = from_json(file.read(), path)
    if isinstance(loaded, DataError):
        raise loaded
    return loaded if isinstance(loaded, list) else [loaded]


def _records(path: str, separators: str) -> Iterator[RawRow]:
    """Yield rows of text, each with the line where it ends: "007" and "NA" stay unchanged.

    The first separator by which the header has several columns applies, or else the first one. Excel may name it in a
    line before the header (``sep=;``).
    """
    csv.field_size_limit(2**31 - 1)  # cells may be whole documents
    with _opened(path) as file, io.TextIOWrapper(file, "utf-8-sig", newline="") as text:
        first = text.readline()
        named = re.fullmatch(r"sep=(.)\s*", first)
        head = [text.readline() if named else first]
        used = (one for one in separators if len(next(csv.reader(head, delimiter=one), [])) > 1)
        records = csv.reader(chain(head, text), delimiter=named[1] if named else next(used, separators[0]), strict=True)
        names = next(records, [])
        if len(set(names)) < len(names):
            fix = "give each column its own name"
            raise DataError(f"{path}: duplicate column names in {', '.join(names)}\n  fix:     {fix}")
        try:
            for cells in filter(None, records):  # skips empty lines
                location = f"{path}:{records.line_num + bool(named)}"
                problem = f"{location}: {len(cells)} cells for the {len(names)} columns {', '.join(names)}"
                is_whole = len(cells) == len(names)
                yield location, dict(zip(names, cells, strict=True)) if is_whole else DataError(problem)
        except csv.Error as error:
            raise DataError(f"{path}:{records.line_num + bool(named)}: not CSV ({error})") from error


def from_json(content: bytes, location: str, is_text: bool = False) -> Any:
    """Parse the content; return the error if it is invalid."""
    try:
        text = content.removeprefix(_BOM).decode("utf-8")
        return {"text": text.rstrip("\r\n")} if is_text else json.loads(text)
    except UnicodeDecodeError as error:
        return DataError(f"{location}: not UTF-8 at byte {error.start}{_to_utf8(error)}")
    except (ValueError, RecursionError) as error:
        shown = content[:60].decode("utf-8", "replace").rstrip()
        why = re.sub(r"line 1 (column \d+) \(char \d+\)", r"\1", str(error))
        fix = "correct the line, or set data.on_bad_row: drop"
        return DataError(f"{location}: not JSON ({why}): {shown!r}\n  fix:     {fix}")


def _as_written(value: Any, kind: Any) -> Any:
    """Convert an Arrow value to what was written: parsed JSON, without keys that only other rows have."""
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
    """Generate ``count`` short conversations of one or two turns (words in reverse order), deterministic by seed.

    Each row has ``messages``, and ``chosen`` with ``rejected``, whose last answer ends in another word.
    """
    source = random.Random(seed)  # noqa: S311 (not for secrets)
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
