"""Tokenized rows as flat arrays on disk, created once per content by one node and memory-mapped by every rank."""

import json
import logging
import multiprocessing
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from lit_fsdp.config.data import COLUMNS, DataConfig, RowFormat, Sources
from lit_fsdp.data.encode import CUT, EQUAL, NOTHING_LEFT, TOO_LONG, EncodedRow, RowEncoder
from lit_fsdp.data.readers import RawRow, Row
from lit_fsdp.data.sources import Source, content_hash, find_sources
from lit_fsdp.data.workers import load
from lit_fsdp.errors import ConfigError, DataError
from lit_fsdp.host import cache_root, is_first_process, make_once, num_cores

ARRAYS = {
    "input_ids": "<i4",
    "supervised": "u1",
    "lengths": "<i4",
    "num_supervised": "<i4",
    "numbers": "<i8",
    "keys": "<u8",
}
"""Files in a folder of tokenized rows (``NAME.bin``) and their dtypes."""

_log = logging.getLogger(__name__)
_VERSION = 14
"""Version of the written format; a change creates a new folder."""
_FIXES = {
    CUT: "increase data.max_seq_length, or set data.truncation: start",
    TOO_LONG: "increase data.max_seq_length",
    EQUAL: "remove these pairs; those that differ only later need a larger data.max_seq_length",
    NOTHING_LEFT: "each row needs an assistant message or a completion; data.turns.roles maps the names of roles",
}
"""Fixes for a source without supervised tokens, by the reason of most of its dropped rows."""
_NAMED = 20
_MANY = 0.1  # share of dropped rows above which a warning is logged
_ROWS = 250


@dataclass(frozen=True)
class TokenizedRows:
    """Memory-mapped tokenized rows: N rows with T tokens in total, with the dtypes of :data:`ARRAYS`.

    A row is a sample: a source row after truncation, or one piece of a longer plain text. The mapping ``meta`` is the
    metadata that :func:`prepare_rows` saved with the rows.
    """

    folder: Path
    meta: dict[str, Any]
    input_ids: np.ndarray
    """Concatenated token ids of all rows (T,); the mask ``supervised`` has the same layout."""
    supervised: np.ndarray
    lengths: np.ndarray
    """Tokens of each row (N,)."""
    num_supervised: np.ndarray
    numbers: np.ndarray
    """Index, from 0 over all sources, of the source row of each row (N,)."""
    keys: np.ndarray
    """Hash of the columns of that source row, independent of the tokenizer (N,)."""

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum(self.lengths, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.lengths)

    def __reduce__(self) -> tuple[Any, ...]:
        return open_rows, (self.folder,)

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return token ids (int32) and supervision mask (uint8) of one row, both of shape (T of the row,)."""
        part = slice(int(self._ends[index] - self.lengths[index]), int(self._ends[index]))
        return self.input_ids[part], self.supervised[part]


def prepare_rows(sources: Sources, config: DataConfig, encoder: RowEncoder) -> TokenizedRows:
    """Tokenize the rows of the sources or load them from the cache; safe when many processes call it concurrently.

    One caller tokenizes with ``data.num_tokenizers`` worker processes; the result does not depend on their number.

    Raises:
        DataError: A source or row is invalid, or no row is left with supervised tokens.
        CheckpointError: The cache cannot be written.
    """
    found = find_sources(sources, config)
    name = ", ".join(source.name for source in found)
    root = Path(config.cache_dir).expanduser() if config.cache_dir else cache_root()
    seen = [source.seen() for source in found]
    digests = [source.digest(root) for source in found]
    parts = [[digest, one.format, one.columns, one.turns] for digest, one in zip(digests, found, strict=True)]
    fingerprint = content_hash([_VERSION, parts, encoder.text, config.on_bad_row])

    def make(folder: Path) -> None:
        meta = {"fingerprint": fingerprint, "digests": digests, **_write(folder, found, config, encoder)}
        if [source.seen() for source in found] != seen:
            raise DataError(f"{name}: changed while it was read\n  fix:     restart once the files are complete")
        (folder / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")

    rows = open_rows(make_once(root / "data" / fingerprint, make, f"tokenizing {name}"))
    # the same rows may have another name by now
    names = {made["name"]: source.name for made, source in zip(rows.meta["sources"], found, strict=True)}
    rows.meta["sources"] = [{**made, "name": names[made["name"]]} for made in rows.meta["sources"]]
    for number, line in enumerate(rows.meta["refused"]):
        before = next((name for name in sorted(names, key=len, reverse=True) if line.startswith(f"{name}:")), "")
        rows.meta["refused"][number] = names.get(before, before) + line.removeprefix(before)
    say_dropped(rows.meta["refused"])
    total = rows.meta["rows_read"]
    dropped = {why: count for why, count in rows.meta["dropped"].items() if why in _FIXES}
    if (count := sum(dropped.values())) > _MANY * total and is_first_process():
        reasons = ", ".join(f"{number:,} {reason}" for reason, number in dropped.items())
        _log.warning("%s: %s of %s rows dropped: %s%s", name, f"{count:,}", f"{total:,}", reasons, _fix_for(dropped))
    return rows


def open_rows(folder: Path) -> TokenizedRows:
    """Memory-map rows that :func:`prepare_rows` has written."""
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    arrays = {name: np.memmap(folder / f"{name}.bin", dtype, "r") for name, dtype in ARRAYS.items()}
    return TokenizedRows(folder, meta, **arrays)


def nothing_supervised(name: str, dropped: dict[str, int], refused: Sequence[str] = ()) -> DataError:
    """Build the error for a source without supervised tokens, with the first of its invalid rows."""
    reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items()) or "0"
    first = "".join(f"\n  first invalid row: {line.splitlines()[0]}" for line in refused[:1])
    return DataError(
        f"{name}: no row is left with supervised tokens; rows dropped: {reasons}{first}{_fix_for(dropped)}"
    )


def _fix_for(dropped: dict[str, int]) -> str:
    """The fix for the reason of most dropped rows, as a line; empty if unknown."""
    fix = _FIXES.get(max(dropped, key=lambda reason: dropped[reason], default=""))
    return f"\n  fix:     {fix}" if fix else ""


def say_dropped(refused: Sequence[str]) -> None:
    """Log dropped rows on the first process."""
    for line in refused if is_first_process() else ():
        _log.warning("dropped (data.on_bad_row): %s", line.split("\n")[0])


def encode_rows(
    rows: Sequence[Row], form: RowFormat, encoder: RowEncoder, drops: bool
) -> tuple[list[EncodedRow], list[str]]:
    """Encode rows; with ``drops``, also return the errors of invalid rows, else raise the first of them."""
    good = [row for _, row in rows if not isinstance(row, DataError)]
    if len(good) == len(rows):
        with suppress(DataError):  # may not be of the first invalid row, which is found row by row below
            return encoder.encode(good, form, [location for location, _ in rows]), []
    found, refused = [], []
    for location, row in rows:
        try:
            if isinstance(row, DataError):
                raise row
            found += encoder.encode([row], form, [location])
        except DataError as error:
            if not drops and "\n  fix:" not in str(error):
                fix = "correct the row, or set data.on_bad_row: drop"
                raise DataError(f"{error}\n  fix:     {fix}") from error
            if not drops:
                raise
            refused.append(str(error))
            found.append(EncodedRow([], 0, ("refused",)))
    return found, refused


def tokenized(encoded: Sequence[EncodedRow], keys: Sequence[int] = ()) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return counts of the rows, and their samples as :data:`ARRAYS`, with row numbers relative to ``encoded``."""
    samples = [sample for row in encoded for sample in row.samples]
    numbers = [number for number, row in enumerate(encoded) for _ in row.samples]
    arrays: dict[str, Any] = {
        "input_ids": np.concatenate([np.zeros(0, "<i4"), *(sample.input_ids for sample in samples)]),
        "supervised": np.concatenate([np.zeros(0, bool), *(sample.supervised for sample in samples)]),
        "lengths": [len(sample.input_ids) for sample in samples],
        "num_supervised": [np.count_nonzero(sample.supervised) for sample in samples],
        "numbers": numbers,
        "keys": [keys[number] if keys else 0 for number in numbers],
    }
    counts = {
        "rows_read": len(encoded),
        "rows": len(samples),
        "truncated": sum(row.truncated for row in encoded),
        "tokens": len(arrays["input_ids"]),
        "dropped": Counter(why for row in encoded for why in row.dropped),
        "unwritten": Counter(kind for row in encoded for kind in row.unwritten),
        "plain_text": sum(row.is_plain for row in encoded),
        "answers_without_text": sum(row.lacks_text for row in encoded),
    }
    return counts, {name: np.array(array, dtype=ARRAYS[name]) for name, array in arrays.items()}


# -- tokenizing


class _Blocks(Dataset[Any]):
    """Map rows of a source to the source's number, the result of :func:`tokenized`, and the errors of dropped rows.

    The error of an invalid row is returned, because a loader must not raise it.
    """

    def __init__(self, sources: Sequence[Source], encoder: RowEncoder, drops: bool) -> None:
        self._sources, self._encoder, self._drops = sources, encoder, drops

    def __getitem__(self, task: tuple[int, list[RawRow]]) -> Any:
        number, raw = task
        source = self._sources[number]
        try:
            rows = [source.parse(row) for row in raw]
            found, refused = encode_rows(rows, source.row_format, self._encoder, self._drops)
        except (DataError, ConfigError) as error:
            return error
        keys = [_key(row) if encoded.samples else 0 for (_, row), encoded in zip(rows, found, strict=True)]
        return number, *tokenized(found, keys), refused


def _key(row: Any) -> int:
    """Hash of the known columns; other columns, such as an id or date, do not change it."""
    content = {name: value for name, value in row.items() if name in COLUMNS}
    return int(content_hash(content), 16) >> 64


def _write(folder: Path, sources: Sequence[Source], config: DataConfig, encoder: RowEncoder) -> dict[str, Any]:
    """Tokenize all sources into ``folder``, in order, and return the content of ``meta.json``.

    The method ``Dataset.map`` is not used: its worker and progress processes outlive a killed parent, and so does the
    cache lock that they inherit.
    """
    made: list[dict[str, Any]] = [{"name": source.name, "format": source.row_format, "rows": 0} for source in sources]
    (total, _), refused = tokenized([]), list[str]()
    tasks = _tasks(sources)
    first = list(islice(tasks, 2))
    # a small file does not justify a process, and a daemonic pool process cannot have children
    is_alone = len(first) < 2 or multiprocessing.current_process().daemon
    num_processes = 1 if is_alone else config.num_tokenizers or num_cores()
    blocks = _Blocks(sources, encoder, config.on_bad_row == "drop")
    with ExitStack() as stack:
        files = {name: stack.enter_context((folder / f"{name}.bin").open("wb")) for name in ARRAYS}
        found = load(blocks, num_processes if num_processes > 1 else 0, sampler=chain(first, tasks))
        for number, counts, arrays, bad in found:
            arrays["numbers"] += total["rows_read"]
            for name, file in files.items():
                file.write(arrays[name].tobytes())
            total = {name: total[name] + count for name, count in counts.items()}
            refused += bad[: _NAMED - len(refused)]
            made[number]["rows"] += counts["rows"]
    if not total["rows"]:
        raise nothing_supervised(", ".join(source.name for source in sources), total["dropped"], refused)
    unread = sorted({column for source in sources for column in source.unread})
    return {**total, "refused": refused, "sources": made, "unread": unread}


def _tasks(sources: Sequence[Source]) -> Iterator[tuple[int, list[RawRow]]]:
    for number, source in enumerate(sources):
        rows = (raw for _, raw in source.read())
        while some := list(islice(rows, _ROWS)):
            yield number, some
