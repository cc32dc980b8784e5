"""Tokenized rows as flat arrays on disk, made once per content by the cores of one node and mapped by every rank."""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from lit_fsdp.config.data import DataConfig, RowFormat, Sources
from lit_fsdp.data.encode import CUT, TOO_LONG, EncodedRow, RowEncoder
from lit_fsdp.data.readers import Chunk, Row
from lit_fsdp.data.sources import Source, find_sources
from lit_fsdp.data.workers import load
from lit_fsdp.errors import CheckpointError, ConfigError, DataError
from lit_fsdp.host import cache_root, is_first_process, make_once

REFUSED = "refused"
"""Why a bad row is dropped where ``data.on_bad_row`` says drop."""
ARRAYS: dict[str, str] = {
    "input_ids": "<i4",
    "supervised": "u1",
    "offsets": "<i8",
    "num_supervised": "<i4",
    "numbers": "<i8",
    "keys": "<u8",
    "digests": "<u8",
}
"""Files of a folder of tokenized rows (``NAME.bin``) and the type of what is in them."""

_log = logging.getLogger(__name__)
_VERSION = 11
"""Of what is written; another one is another folder."""
_NAMED = 20
_CONTENT: dict[RowFormat, tuple[str, ...]] = {
    "messages": ("messages", "system", "tools"),
    "sharegpt": ("conversations", "system", "tools"),
    "instruction": ("system", "instruction", "input", "output", "tools"),
    "prompt_completion": ("system", "prompt", "completion", "tools"),
    "text": ("text",),
    "tokens": ("input_ids", "labels"),
    "preference": ("system", "prompt", "chosen", "rejected", "tools"),
}
"""Columns that make a row what it is: another id or date in a further one makes no other row of it."""


@dataclass(frozen=True)
class TokenizedRows:
    """Rows of tokens, memory-mapped. N rows of T tokens together, with the types of :data:`ARRAYS`.

    A row is a sample: a row of a source after truncation, or one piece of a longer plain text. ``numbers`` (N,) says
    which row over all sources, from 0, it comes from, ``keys`` (N,) is a hash of that row's content, the same with any
    tokenizer, and ``digests`` (N,) one of its tokens. ``meta`` has the fingerprint, digests of the sources,
    ``longest``, counts, the same for each source in ``entries``, and the first bad rows in ``refused``.
    """

    folder: Path
    meta: dict[str, Any]
    input_ids: np.ndarray
    """(T,), all rows one after another."""
    supervised: np.ndarray
    """(T,)."""
    offsets: np.ndarray
    """Where each row begins; (N + 1,)."""
    num_supervised: np.ndarray
    numbers: np.ndarray
    keys: np.ndarray
    digests: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """Tokens per row, int64 (N,)."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __reduce__(self) -> tuple[Any, ...]:
        return open_rows, (self.folder,)

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids (int32) and supervision (uint8) of one row, both of shape (T of the row,)."""
        part = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        return self.input_ids[part], self.supervised[part]


def prepare_rows(sources: Sources, config: DataConfig, encoder: RowEncoder) -> TokenizedRows:
    """Tokenize the rows of some sources, or take them from the cache; safe when many processes start together.

    One of them works, with ``data.num_tokenizers`` processes of its own; the bytes do not depend on their number.

    Raises:
        DataError: A source or row is bad (file and row are named), no token of any row is supervised, or more rows
            than ``data.max_dropped_share`` are cut so far that nothing is left.
    """
    found = find_sources(sources, config)
    name = ", ".join(source.name for source in found)
    root = Path(config.cache_dir).expanduser() if config.cache_dir else cache_root()
    try:
        seen = [source.seen() for source in found]
        digests = [source.digest(root) for source in found]
        parts = [[digest, source.format, source.columns] for digest, source in zip(digests, found, strict=True)]
        fingerprint = _hash(json.dumps([_VERSION, parts, encoder.text])).hexdigest()

        def make(folder: Path) -> None:
            meta = {"fingerprint": fingerprint, "digests": digests, **_write(folder, found, config, encoder)}
            if [source.seen() for source in found] != seen:
                raise DataError(f"{name}: changed while it was read\n  fix:     start again once it is complete")
            (folder / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")

        rows = open_rows(make_once(root / "data" / fingerprint, make, f"tokenizing {name}"))
    except CheckpointError as error:  # of make_once
        raise DataError(f"tokenizing {name}: {error}") from error
    refused = rows.meta["refused"]
    if refused and config.on_bad_row == "error":
        raise DataError(refused[0])
    for line in refused if is_first_process() else ():
        _log.warning("dropped (data.on_bad_row): %s", line.split("\n")[0])
    check_dropped(name, rows.meta["dropped"], rows.meta["rows_read"], config)
    return rows


def open_rows(folder: Path) -> TokenizedRows:
    """Map rows that :func:`prepare_rows` has written, or raise DataError if a file is missing or of another length."""
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        arrays = {name: np.memmap(folder / f"{name}.bin", dtype, mode="r") for name, dtype in ARRAYS.items()}
        sizes = dict.fromkeys(ARRAYS, meta["rows"])
        sizes |= {"input_ids": meta["tokens"], "supervised": meta["tokens"], "offsets": meta["rows"] + 1}
        found = {name: len(array) for name, array in arrays.items()}
        if found != sizes:
            raise ValueError(f"lengths {found} in place of {sizes}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{folder}: damaged tokenized rows ({error})\n  fix:     delete this folder, it will be made again"
        ) from error
    return TokenizedRows(folder, meta, **arrays)


def check_dropped(name: str, dropped: dict[str, int], rows_read: int, config: DataConfig) -> None:
    """Raise DataError if more rows than ``data.max_dropped_share`` are cut so far that no supervised token is left."""
    cut = dropped.get(CUT, 0) + dropped.get(TOO_LONG, 0)
    if cut > config.max_dropped_share * rows_read:
        raise DataError(
            f"{name}: of {cut} of {rows_read} rows nothing is left within data.max_seq_length {config.max_seq_length}\n"
            f"  allowed: data.max_dropped_share {config.max_dropped_share:g} of the rows\n"
            "  fix:     raise data.max_seq_length, set data.truncation: start, or raise data.max_dropped_share"
        )


def nothing_supervised(name: str, dropped: dict[str, int]) -> DataError:
    """The error of a source without any supervised token."""
    reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items()) or "0"
    return DataError(
        f"{name}: no token of any row is supervised; dropped {reasons}\n"
        "  fix:     rows need an assistant turn within data.max_seq_length tokens (or data.train_on_prompt: true)"
    )


def encode_rows(
    rows: Sequence[Row], form: RowFormat, encoder: RowEncoder, drops: bool
) -> tuple[list[EncodedRow], list[str]]:
    """What becomes of each row, and what is wrong with the bad ones, if ``drops``; else the first of them is raised."""
    if not any(isinstance(row, DataError) for _, row in rows):
        try:
            return encoder.encode([row for _, row in rows], form, [location for location, _ in rows]), []  # type: ignore[misc]
        except DataError:  # of whatever step looked at all of them first
            pass
    found, refused = [], []
    for location, row in rows:
        try:
            if isinstance(row, DataError):
                raise row
            found += encoder.encode([row], form, [location])
        except DataError as error:
            if not drops:
                raise
            refused.append(str(error))
            found.append(EncodedRow([], False, REFUSED))
    return found, refused


def sample_digest(input_ids: np.ndarray) -> int:
    """Hash of a sample's token ids, as in ``digests`` of tokenized rows."""
    return int.from_bytes(_hash(np.ascontiguousarray(input_ids, dtype="<i4").tobytes(), 8).digest(), "little")


def _hash(content: bytes | str, size: int = 16) -> Any:
    return hashlib.blake2b(content.encode() if isinstance(content, str) else content, digest_size=size)


# -- tokenizing

_Task = tuple[int, Chunk, RowFormat]
"""Number of the source, rows, and their format."""


@dataclass(frozen=True)
class _Block:
    """What became of one chunk."""

    source: int
    counts: Counter[str]
    dropped: Counter[str]
    refused: list[str]
    arrays: dict[str, np.ndarray]
    """As :data:`ARRAYS`, but lengths in place of offsets, and numbers within the chunk."""


class _Blocks(Dataset[Any]):
    """Maps a task to its block, or to the error of its first bad row, which is not to be raised in a loader."""

    def __init__(self, encoder: RowEncoder, drops: bool) -> None:
        self._encoder, self._drops = encoder, drops

    def __getitem__(self, task: _Task) -> _Block | Exception:
        source, chunk, form = task
        try:
            rows = chunk.rows()
            found, refused = encode_rows(rows, form, self._encoder, self._drops)
        except (DataError, ConfigError) as error:
            return error
        samples = [sample for row in found for sample in row.samples]
        pieces = np.array([len(row.samples) for row in found], dtype=np.int64)
        keys = [_key(row, form) if encoded.samples else 0 for (_, row), encoded in zip(rows, found, strict=True)]
        ids, masks = [sample.input_ids for sample in samples], [sample.supervised for sample in samples]
        arrays = {
            "input_ids": np.concatenate([np.zeros(0, "<i4"), *ids]),
            "supervised": np.concatenate([np.zeros(0, "u1"), *masks]),
            "offsets": np.array([len(part) for part in ids]),
            "num_supervised": np.array([np.count_nonzero(mask) for mask in masks]),
            "numbers": np.repeat(np.arange(len(rows)), pieces),
            "keys": np.repeat(np.array(keys, dtype="<u8"), pieces),
            "digests": np.array([sample_digest(part) for part in ids], dtype="<u8"),
        }
        counts = {
            "rows_read": len(rows),
            "rows": len(samples),
            "truncated": sum(row.truncated and bool(row.samples) for row in found),
            "tokens": len(arrays["input_ids"]),
            "supervised_tokens": int(arrays["num_supervised"].sum()),
        }
        dropped = Counter(row.dropped for row in found if row.dropped is not None)
        arrays = {name: array.astype(ARRAYS[name]) for name, array in arrays.items()}
        return _Block(source, Counter(counts), dropped, refused, arrays)


def _key(row: Any, form: RowFormat) -> int:
    content = {name: value for name, value in row.items() if name in _CONTENT[form]}
    text = json.dumps(content, sort_keys=True, default=lambda value: getattr(value, "tolist", value.__str__)())
    return int.from_bytes(_hash(text, 8).digest(), "little")


def _write(folder: Path, sources: Sequence[Source], config: DataConfig, encoder: RowEncoder) -> dict[str, Any]:
    """Tokenize everything into ``folder``; returns what ``meta.json`` holds."""
    forms = [source.row_format for source in sources]
    tasks = ((n, chunk, forms[n]) for n, source in enumerate(sources) for chunk in source.chunks())
    entries = [Counter[str](rows_read=0, rows=0, truncated=0, tokens=0, supervised_tokens=0) for _ in sources]
    dropped = [Counter[str]() for _ in sources]
    refused: list[str] = []
    total, longest = Counter[str](), 0
    with ExitStack() as stack:
        files = {name: stack.enter_context((folder / f"{name}.bin").open("wb")) for name in ARRAYS}
        for block in _in_order(tasks, config, encoder):
            arrays, lengths = block.arrays, block.arrays["offsets"]
            longest = max(longest, int(lengths.max(initial=0)))
            arrays["offsets"] = total["tokens"] + lengths.cumsum() - lengths  # where each begins
            arrays["numbers"] += total["rows_read"]
            for name, file in files.items():
                file.write(arrays[name].tobytes())
            for counter in (total, entries[block.source]):
                counter.update(block.counts)
            dropped[block.source].update(block.dropped)
            refused += block.refused[: _NAMED - len(refused)]
        files["offsets"].write(np.array([total["tokens"]], ARRAYS["offsets"]).tobytes())
    if not total["rows"]:
        raise nothing_supervised(", ".join(source.name for source in sources), sum(dropped, Counter()))
    return {
        **{name: total[name] for name in entries[0]},
        "dropped": dict(sum(dropped, Counter())),
        "refused": refused,
        "longest": longest,
        "entries": [
            {"name": source.name, "format": form, **entry, "dropped": dict(reasons)}
            for source, form, entry, reasons in zip(sources, forms, entries, dropped, strict=True)
        ],
    }


def _in_order(tasks: Iterator[_Task], config: DataConfig, encoder: RowEncoder) -> Iterator[_Block]:
    """A block per task, in their order, so that the first bad row is the one that is told.

    Not by ``Dataset.map``: its processes, and the one that collects their progress, outlive a parent that is killed,
    and with them the lock of the cache, which they inherit.
    """
    first = list(islice(tasks, 2))
    # a small file is not worth a process, and a process of a pool may have none
    is_alone = len(first) < 2 or multiprocessing.current_process().daemon
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    num_processes = config.num_tokenizers or cores
    blocks = _Blocks(encoder, config.on_bad_row == "drop")
    for block in load(blocks, 0 if is_alone or num_processes == 1 else num_processes, False, chain(first, tasks)):
        if isinstance(block, Exception):
            raise block
        yield block
