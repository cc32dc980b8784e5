"""Readers of row files: each row with the place that an error can name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lit_fsdp.errors import DataError

Row = tuple[str, dict[str, Any]]
"""Place and columns."""

_BOM = b"\xef\xbb\xbf"
_LARGEST_CELL = 2**31 - 1


def _jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    """One JSON object per line; empty lines and a byte order mark are skipped."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            content = line.removeprefix(_BOM) if number == 1 else line
            if content.strip():
                yield f"{path}:{number}", _json_line(content, f"{path}:{number}")


def _json_line(line: bytes, place: str) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(
            f"{place}: not UTF-8 at byte {error.start} of the line\n  fix:     save the file as UTF-8"
        ) from None
    except (ValueError, RecursionError) as error:
        shown = line[:60].decode("utf-8", "replace").rstrip()
        raise DataError(f"{place}: not JSON ({error}): {shown!r}\n  fix:     mend or remove this line") from None


def _json(path: Path) -> Iterator[tuple[str, Any]]:
    """A list of objects, alone or as the only list in an object."""
    try:
        loaded = json.loads(path.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON ({error})\n  fix:     name .jsonl what has one object per line") from None
    if isinstance(loaded, dict):
        lists = [value for value in loaded.values() if isinstance(value, list)]
        if len(lists) != 1 and isinstance(loaded.get("data"), list):
            lists = [loaded["data"]]
        loaded = lists[0] if len(lists) == 1 else loaded
    if not isinstance(loaded, list):
        raise DataError(
            f"{path}: a JSON file holds a list of rows, or an object with one list, such as data\n"
            "  fix:     write [{...}, {...}], or name .jsonl what has one object per line"
        )
    yield from ((f"{path}: row {i}", row) for i, row in enumerate(loaded))


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1000):
                for row in batch.to_pylist():
                    yield f"{path}: row {number}", row
                    number += 1
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise DataError(f"{path}: not a Parquet file, broken after row {number} ({error})") from None


def _csv(path: Path, delimiter: str = ",") -> Iterator[tuple[str, Any]]:
    """A header and one row per record; the place is the line on which the record ends."""
    import csv

    csv.field_size_limit(_LARGEST_CELL)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, delimiter=delimiter, strict=True)
            for row in reader:
                place = f"{path}:{reader.line_num}"
                if None in row or None in row.values():
                    raise DataError(f"{place}: another number of cells than the {len(reader.fieldnames or ())} columns")
                yield place, row
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: not a CSV file in UTF-8 ({error})\n  fix:     save the file as UTF-8") from None


def _tsv(path: Path) -> Iterator[tuple[str, Any]]:
    return _csv(path, "\t")


READERS: dict[str, Callable[[Path], Iterator[tuple[str, Any]]]] = {
    ".jsonl": _jsonl,
    ".ndjson": _jsonl,
    ".json": _json,
    ".parquet": _parquet,
    ".csv": _csv,
    ".tsv": _tsv,
}
"""By the ending of the file; each yields places and rows, and raises DataError where it cannot."""
