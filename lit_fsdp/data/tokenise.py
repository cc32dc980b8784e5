"""A chunk of rows to a block of samples: parsed, rendered and tokenised, by whichever process has the time."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from lit_fsdp.config.data import RowFormat
from lit_fsdp.data.encode import EncodedRow, RowEncoder
from lit_fsdp.data.files import Chunk, Row
from lit_fsdp.errors import DataError

_CONTENT: dict[RowFormat, tuple[str, ...]] = {
    "messages": ("messages", "system", "tools"),
    "sharegpt": ("conversations", "system", "tools"),
    "instruction": ("system", "instruction", "input", "output", "tools"),
    "prompt_completion": ("system", "prompt", "completion", "tools"),
    "text": ("text",),
    "tokens": ("input_ids", "labels"),
}
"""Columns that make a row what it is: another id or date in a further one makes no other row of it."""


@dataclass(frozen=True)
class Task:
    """Rows that one process does at a time."""

    source: int
    """Number of the source."""
    chunk: Chunk
    form: RowFormat


@dataclass(frozen=True)
class Block:
    """What became of one chunk. N: samples, T: their tokens together."""

    source: int
    rows_read: int
    rows_split: int
    """Rows that became several samples."""
    truncated: int
    """Rows of which a part is left."""
    dropped: Counter[str]
    input_ids: np.ndarray
    """int32, (T,)."""
    supervised: np.ndarray
    """uint8, (T,)."""
    lengths: np.ndarray
    """int64, (N,)."""
    learnt: np.ndarray
    """Supervised tokens per sample; int32, (N,)."""
    numbers: np.ndarray
    """Which row of the chunk each sample comes from; int64, (N,)."""
    keys: np.ndarray
    """Hash of the row's content, whatever tokenizer reads it; uint64, (N,)."""
    digests: np.ndarray
    """Hash of the sample's tokens; uint64, (N,)."""


def encode_chunk(task: Task, encoder: RowEncoder) -> Block:
    """Samples of one chunk of rows.

    Raises:
        DataError: The first bad row.
    """
    rows: list[Row] = []
    try:
        rows.extend(task.chunk.each())
    except DataError:  # a row before it may be bad in another way
        _encode(rows, task.form, encoder)
        raise
    return _block(task, rows, _encode(rows, task.form, encoder))


def _encode(rows: list[Row], form: RowFormat, encoder: RowEncoder) -> list[EncodedRow]:
    try:
        return encoder.encode([row for _, row in rows], form, [place for place, _ in rows])
    except DataError:  # of whatever step looked at all of them first
        for place, row in rows:
            encoder.encode([row], form, [place])
        raise


def _block(task: Task, rows: list[Row], found: list[EncodedRow]) -> Block:
    samples = [sample for row in found for sample in row.samples]
    pieces = np.array([len(row.samples) for row in found], dtype=np.int64)
    keys = [_key(row, task.form) if encoded.samples else 0 for (_, row), encoded in zip(rows, found, strict=True)]
    ids = [np.ascontiguousarray(sample.input_ids, dtype="<i4") for sample in samples]
    masks = [sample.supervised for sample in samples]
    return Block(
        source=task.source,
        rows_read=len(rows),
        rows_split=int((pieces > 1).sum()),
        truncated=sum(row.truncated and bool(row.samples) for row in found),
        dropped=Counter(row.dropped for row in found if row.dropped is not None),
        input_ids=np.concatenate(ids) if ids else np.zeros(0, dtype="<i4"),
        supervised=np.concatenate(masks).astype("u1") if ids else np.zeros(0, dtype="u1"),
        lengths=np.array([len(part) for part in ids], dtype="<i8"),
        learnt=np.array([np.count_nonzero(mask) for mask in masks], dtype="<i4"),
        numbers=np.repeat(np.arange(len(rows)), pieces).astype("<i8"),
        keys=np.repeat(np.array(keys, dtype="<u8"), pieces),
        digests=np.array([_digest(part.tobytes()) for part in ids], dtype="<u8"),
    )


def _digest(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def _key(row: dict[str, Any], form: RowFormat) -> int:
    content = {name: value for name, value in row.items() if name in _CONTENT[form]}
    return _digest(json.dumps(content, sort_keys=True, default=_plain).encode())


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)
