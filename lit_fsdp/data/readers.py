"""Readers of row files and data sets: chunks of rows as they lie there, and their parsing, which any process can do.

JSON lines, CSV and text are read here, everything else by ``datasets``: its JSON reader infers one type for each key,
which makes dates of texts like "2020-01-01", floats of whole numbers, and None of keys that only other rows have; its
CSV reader shifts the columns where the first record has a cell too many. Cutting a file into chunks is cheap and
parsing them is not, so one process reads and many parse; every chunk knows from where reading can go on later.
"""

from __future__ import annotations

import csv
import glob
import gzip
import io
import json
import logging
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from lit_fsdp.config.data import GENERATED, SourceConfig
from lit_fsdp.data.generated import generated_rows
from lit_fsdp.errors import DataError

Row = tuple[str, dict[str, Any] | DataError]
"""Location (``rows.jsonl:12``) and columns, or why it cannot be read."""
Position = Any
"""Where a chunk begins, for JSON: what it holds is the affair of the reader of that kind of file."""

_log = logging.getLogger(__name__)
_COMMIT = re.compile("[0-9a-f]{40}")
_BOM = b"\xef\xbb\xbf"
_BLOCK_BYTES = 2**18
_ROWS = 250
_TABLES = {".parquet": "parquet", ".arrow": "arrow"}
_SEPARATORS = {".csv": ",", ".tsv": "\t"}
KINDS = (".jsonl", ".ndjson", ".json", ".txt", *_TABLES, *_SEPARATORS)
"""Endings of row files; ``.gz`` may follow."""


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows, not parsed yet; can be sent to another process."""

    name: str
    """File or data set, for the locations of its rows."""
    first: int
    """Number of its first line or row."""
    content: Any
    """What ``parse`` takes apart: bytes of lines, an Arrow table, or rows."""
    parse: Callable[[Chunk], Iterator[tuple[str, Any]]]
    start: Position
    columns: tuple[tuple[str, str], ...] = ()
    """Pairs of our column and the source's."""

    def rows(self) -> list[Row]:
        """Every row in order, a broken one as the error that it is; DataError if the chunk as a whole is damaged."""
        return [(location, self._renamed(location, row)) for location, row in self.parse(self)]

    def _renamed(self, location: str, row: Any) -> dict[str, Any] | DataError:
        if isinstance(row, DataError):
            return row
        if not isinstance(row, dict):
            return DataError(f"{location}: {type(row).__name__}, not an object with columns")
        if not self.columns:
            return row
        taken = {name for pair in self.columns for name in pair}
        rest = {name: value for name, value in row.items() if name not in taken}
        return {**rest, **{ours: row[theirs] for ours, theirs in self.columns if theirs in row}}


@dataclass(frozen=True)
class Part:
    """One file or data set of a source."""

    name: str
    """Path, name of a data set, or ``generated:N``."""
    kind: str
    """Ending of a file, or ``saved``, ``hub``, ``hub stream``, ``generated``."""
    split: str | None = None
    configuration: str | None = None
    revision: str | None = None
    """Commit of a data set on the hub."""

    @property
    def is_hub(self) -> bool:
        """Whether it is a data set on the hub."""
        return self.kind.startswith("hub")

    def files(self) -> list[Path]:
        """What lies on this machine, in an order of its own."""
        if self.kind == "saved":  # without the caches that datasets leaves beside them
            state, folder = Path(self.name, "state.json"), Path(self.name)
            arrows = [folder / named["filename"] for named in json.loads(state.read_text("utf-8"))["_data_files"]]
            return sorted([state, folder / "dataset_info.json", *arrows])
        return [Path(self.name)] if self.kind.startswith(".") else []

    def chunks(self, start: Position = None) -> Iterator[Chunk]:
        """Its rows from the ``start`` of a chunk on, or DataError where it cannot be read."""
        if self.kind == "generated":
            yield from self._listed(generated_rows(int(self.name.removeprefix(GENERATED))), start)
        elif self.kind == ".json" and not _has_an_object_per_line(self.name):
            yield from self._listed(_document(self.name), start)
        elif self.kind in _SEPARATORS:
            yield from self._listed(_records(self.name, _SEPARATORS[self.kind]), start)
        elif self.kind in KINDS and self.kind not in _TABLES:
            yield from self._lines(start)
        else:
            yield from self._tables(start)

    def _lines(self, start: Position) -> Iterator[Chunk]:
        """Blocks of whole lines. Position: byte offset and number of the line there."""
        parse = _text_lines if self.kind == ".txt" else _json_lines
        offset, number = start or (0, 1)
        with reading(self.name) as file:
            file.seek(offset)
            while block := file.read(_BLOCK_BYTES):
                block += b"" if block.endswith(b"\n") else file.readline()
                yield Chunk(self.name, number, block, parse, [offset, number])
                offset, number = offset + len(block), number + block.count(b"\n")

    def _listed(self, rows: Iterable[Any], start: Position) -> Iterator[Chunk]:
        """Rows that are parsed already. Position: row; those before it are read again."""
        left, number = iter(rows), 0
        while some := list(islice(left, _ROWS)):
            if number >= (start or 0):
                yield Chunk(self.name, number, some, _numbered_rows, number)
            number += len(some)

    def _tables(self, start: Position) -> Iterator[Chunk]:
        """What ``datasets`` reads, in batches. Position: its own state, and the number of the row."""
        state, number = start or (None, 0)
        try:
            opened = self._open().with_format("arrow")
            if state is not None:
                opened.load_state_dict(state)
            before = state or opened.state_dict()
            for batch in opened.iter(batch_size=_ROWS):
                yield Chunk(self.name, number, batch, _table_rows, [before, number])
                before, number = opened.state_dict(), number + len(batch)
        except DataError:
            raise
        except Exception as error:  # datasets raises its own, OSError, ValueError, pyarrow's and pandas', by version
            raise unreadable(self.name, f", after row {number}", error) from error

    def _open(self) -> Any:
        """The data set as an iterable one, which can be resumed."""
        import datasets

        datasets.disable_progress_bars()
        if self.kind == "saved":
            return datasets.load_from_disk(self.name).to_iterable_dataset()
        if self.is_hub:
            _builder(self.name, self.configuration, self.revision)
            streaming = self.kind == "hub stream"
            loaded = datasets.load_dataset(
                self.name, self.configuration, split=self.split, revision=self.revision, streaming=streaming
            )
            return loaded if streaming else loaded.to_iterable_dataset()
        named: dict[str, Any] = {"data_files": glob.escape(self.name), "split": "train"}
        return datasets.load_dataset(_TABLES[self.kind], streaming=True, **named)


def kind_of(path: str) -> str:
    """The ending that says how a file is read; ``.gz`` behind it counts for nothing."""
    return Path(path.removesuffix(".gz")).suffix.lower()


def file_part(path: str) -> Part:
    """A file of rows, or DataError if its kind is unknown."""
    if kind_of(path) not in KINDS:
        raise DataError(f"{path}: unknown kind of file {kind_of(path)!r}\n  allowed: {', '.join(KINDS)}, also .gz")
    return Part(path, kind_of(path))


def folder_parts(name: str, folder: str, split: str | None) -> list[Part]:
    """A folder that ``datasets`` saved, or the files that it finds for a split: by their names, or by the README.md."""
    saved = Path(folder) / "dataset_dict.json"
    if (Path(folder) / "state.json").is_file():
        splits = {"train": [Part(folder, "saved")]}
    elif saved.is_file():
        splits = {key: [Part(f"{folder}/{key}", "saved")] for key in json.loads(saved.read_text("utf-8"))["splits"]}
    else:
        import datasets

        try:
            found = datasets.load_dataset_builder(folder).config.data_files
        except Exception as error:  # datasets raises its own, OSError and ValueError, by version
            raise unreadable(name, "", error) from error
        splits = {str(key): [file_part(path) for path in paths] for key, paths in found.items()}
        _warn_of_others(Path(folder), {part.name for parts in splits.values() for part in parts})
    if (split or "train") not in splits:
        raise DataError(f"{name}: no split {split or 'train'!r}\n  allowed: {', '.join(splits)} (write name:split)")
    return splits[split or "train"]


def _warn_of_others(folder: Path, taken: set[str]) -> None:
    """Say so if ``datasets``, which takes files of one kind and with one way to name splits, leaves some out."""
    names = sorted(str(path) for path in folder.rglob("*") if kind_of(str(path)) in KINDS and path.is_file())
    left = [name for name in names if name not in taken and str(Path(name).resolve()) not in taken]
    if left and not (folder / "README.md").is_file():  # which may declare just some of them
        _log.warning("%s: %d of its files belong to no split and are left out, such as %s", folder, len(left), left[0])


def hub_part(entry: SourceConfig, streaming: bool) -> Part:
    """``name``, ``name:split`` or ``name:configuration:split``, at the commit that its revision is now.

    The hub is asked for it, unless the revision is a commit.
    """
    base, _, rest = entry.source.partition(":")
    rest, bracket, rows = rest.partition("[")  # of train[:10%], whose colon is no border
    configuration, _, split = rest.rpartition(":")
    commit = entry.revision
    if not (commit and _COMMIT.fullmatch(commit)):
        commit = _builder(base, configuration or None, entry.revision).hash
    kind = "hub stream" if streaming else "hub"
    return Part(base, kind, (split or "train") + bracket + rows, configuration or None, commit)


def _builder(name: str, configuration: str | None, revision: str | None) -> Any:
    import datasets

    try:
        builder = datasets.load_dataset_builder(name, configuration, revision=revision)
    except Exception as error:  # datasets raises its own, OSError, ValueError and the hub's, by version
        raise unreadable(name, f": no such file below {Path.cwd()}, and on the hub", error) from error
    # without a network datasets takes whatever commit it finds in its cache
    if revision and type(builder).__name__ == "Cache" and builder.hash != revision:
        raise DataError(
            f"{name}: the hub does not answer, and its cache has commit {builder.hash}, which need not be "
            f"revision {revision}\n  fix:     start again where there is a network, or name that commit"
        )
    return builder


def unreadable(name: str, where: str, error: BaseException) -> DataError:
    """An error of a library, in its own words: those of its first cause, as ``datasets`` puts its own around them."""
    while error.__cause__ is not None:
        error = error.__cause__
    why = " ".join(str(error).split())[:300]
    return DataError(f"{name}{where}: cannot be read ({type(error).__name__}: {why})")


@contextmanager
def reading(path: str | Path, unpacked: bool = True) -> Iterator[Any]:
    """The bytes of a file, unpacked if it ends in ``.gz``."""
    try:
        with gzip.open(path, "rb") if unpacked and str(path).endswith(".gz") else open(path, "rb") as file:
            yield file
    except (EOFError, zlib.error, OSError) as error:
        raise unreadable(str(path), "", error) from error


def _has_an_object_per_line(path: str) -> bool:
    """Whether the first line is a whole object and something follows it."""
    with reading(path) as file:
        first = next((line for line in file if line.removeprefix(_BOM).strip()), b"").removeprefix(_BOM)
        return first[:1] == b"{" and isinstance(_from_json(first, path), dict) and bool(file.read(_BLOCK_BYTES).strip())


def _document(path: str) -> list[Any]:
    """The rows of a JSON file: a list of them, or one."""
    with reading(path) as file:
        loaded = _from_json(file.read(), path)
    if isinstance(loaded, DataError):
        raise loaded
    if not isinstance(loaded, (list, dict)):
        raise DataError(f"{path}: a JSON file holds a list of rows, or one row\n  fix:     write [{{...}}, {{...}}]")
    return loaded if isinstance(loaded, list) else [loaded]


def _records(path: str, separator: str) -> Iterator[dict[str, str] | DataError]:
    """Rows of texts: "007" and "NA" stay what they are."""
    csv.field_size_limit(2**31 - 1)  # cells may be whole documents
    number = 0
    with reading(path) as file, io.TextIOWrapper(file, "utf-8-sig", newline="") as text:
        records = csv.reader(text, delimiter=separator, strict=True)
        try:
            names = next(records, [])
            if len(set(names)) < len(names):
                raise DataError(f"{path}: two columns of one name among {', '.join(names)}")
            for number, cells in enumerate(filter(None, records)):  # without empty lines
                if len(cells) == len(names):
                    yield dict(zip(names, cells, strict=True))
                else:
                    problem = f"{len(cells)} cells for the {len(names)} columns {', '.join(names)}"
                    fix = "quote cells that hold a separator"
                    yield DataError(f"{path}: row {number}: {problem}\n  fix:     {fix}")
        except (csv.Error, UnicodeDecodeError) as error:
            raise unreadable(path, f", after row {number}", error) from error


def _from_json(content: bytes, location: str) -> Any:
    """What the content says, or the error that it is none."""
    try:
        return json.loads(content.removeprefix(_BOM).decode("utf-8"))
    except UnicodeDecodeError as error:
        return DataError(f"{location}: not UTF-8 at byte {error.start}\n  fix:     save the file as UTF-8")
    except (ValueError, RecursionError) as error:
        shown = content[:60].decode("utf-8", "replace").rstrip()
        return DataError(f"{location}: not JSON ({error}): {shown!r}\n  fix:     mend or remove it")


def _json_lines(chunk: Chunk) -> Iterator[tuple[str, Any]]:
    for location, line in _full_lines(chunk):
        yield location, _from_json(line, location)


def _text_lines(chunk: Chunk) -> Iterator[tuple[str, Any]]:
    for location, line in _full_lines(chunk):
        try:
            yield location, {"text": line.removeprefix(_BOM).decode("utf-8").rstrip("\r")}
        except UnicodeDecodeError as error:
            yield location, DataError(f"{location}: not UTF-8 at byte {error.start}")


def _full_lines(chunk: Chunk) -> Iterator[tuple[str, bytes]]:
    for number, line in enumerate(chunk.content.split(b"\n"), start=chunk.first):
        if line.removeprefix(_BOM).strip():
            yield f"{chunk.name}:{number}", line


def _numbered_rows(chunk: Chunk) -> Iterator[tuple[str, Any]]:
    for number, row in enumerate(chunk.content, start=chunk.first):
        yield f"{chunk.name}: row {number}", row


def _table_rows(chunk: Chunk) -> Iterator[tuple[str, Any]]:
    try:
        chunk.content.validate(full=True)  # a damaged file may hold offsets that point beside the text
        read = {field.name: _as_written(field.type) for field in chunk.content.schema}
        rows = [{name: read[name](value) for name, value in row.items()} for row in chunk.content.to_pylist()]
    except (ValueError, OverflowError, RecursionError) as error:  # pyarrow's own are ValueErrors
        raise unreadable(chunk.name, f", after row {chunk.first}", error) from error
    for number, row in enumerate(rows, start=chunk.first):
        yield f"{chunk.name}: row {number}", row


def _same(value: Any) -> Any:
    return value


def _as_written(kind: Any) -> Callable[[Any], Any]:
    """What makes of a value of an Arrow type what was written: JSON taken apart, no key that only other rows have."""
    import pyarrow

    if isinstance(kind, pyarrow.JsonType):
        return lambda value: None if value is None else json.loads(value)
    if pyarrow.types.is_struct(kind):
        parts = {field.name: _as_written(field.type) for field in kind}
        return lambda value: value and {name: parts[name](part) for name, part in value.items() if part is not None}
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
        read = _as_written(kind.value_type)
        return _same if read is _same else lambda value: value and [read(part) for part in value]
    return _same
