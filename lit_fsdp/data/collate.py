"""Rows to a batch, padded or packed. Shapes: B rows or packs, T tokens of each, N sequences of all packs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lit_fsdp.data.cache import TokenisedRows
from lit_fsdp.data.order import FILLER

IGNORED = -100
Batch = dict[str, Any]
"""Tensors by name, and what a packed batch knows as plain numbers."""


def collate(rows: TokenisedRows, indices: Sequence[int], pad_id: int) -> Batch:
    """The batch of some rows, padded on the right to the longest of them.

    Args:
        rows: Token ids and supervision per row.
        indices: Row ids; a filler (-1) becomes a single token without supervision.
        pad_id: Put where there is no token. Labels never depend on it: it may well be a token that is learnt.

    Returns:
        int64 tensors: ``input_ids``, ``attention_mask``, ``labels`` (B, T), the last aligned with the first and -100
        where nothing is learnt, and ``row`` (B,). ``counts`` is int64, in the order of
        :data:`lit_fsdp.metrics.counts.BATCH_COUNTS`.
    """
    parts = [(np.array([pad_id]), np.array([False])) if i == FILLER else rows.row(i) for i in indices]
    longest = max(len(ids) for ids, _ in parts)
    batch = {
        "input_ids": torch.full((len(parts), longest), pad_id, dtype=torch.int64),
        "attention_mask": torch.zeros((len(parts), longest), dtype=torch.int64),
        "labels": torch.full((len(parts), longest), IGNORED, dtype=torch.int64),
        "row": torch.tensor(list(indices), dtype=torch.int64),
    }
    for b, (ids, supervised) in enumerate(parts):
        tokens = torch.from_numpy(ids.astype(np.int64))
        batch["input_ids"][b, : len(ids)] = tokens
        batch["attention_mask"][b, : len(ids)] = 1
        batch["labels"][b, : len(ids)] = torch.where(torch.from_numpy(supervised.astype(bool)), tokens, IGNORED)
    lengths = [len(ids) for (ids, _), index in zip(parts, indices, strict=True) if index != FILLER]
    batch["counts"] = _counts(lengths, batch["input_ids"].numel())
    return batch


def collate_packs(rows: TokenisedRows, packs: Sequence[Sequence[int] | np.ndarray], length: int, pad_id: int) -> Batch:
    """The batch of some packs: samples one after another, each with its own positions, and no attention mask.

    A 2-D mask beside such positions would switch off that transformers tells the samples apart. Padding at the end of
    a pack is a sequence of its own without labels, so that no token attends to nothing.

    Args:
        rows: Token ids and supervision per row.
        packs: Row ids of each pack, no more than ``length`` tokens together; none make a pack without supervision,
            for a rank that is short of packs.
        length: T.
        pad_id: Put where there is no token.

    Returns:
        int64 ``input_ids``, ``labels`` and ``position_ids`` (B, T). Positions restart at 0 with every sequence, whose
        first token has the label -100, because nothing predicts it. ``cu_seq_lens`` is int32 (N + 1,): where each
        sequence begins in the flattened (B * T) tokens, and their number. ``longest`` is a plain number, at least
        the longest sequence, one of few: the next power of two, at most T. ``counts`` as for :func:`collate`, where a
        sample is a row, not a pack.
    """
    ids = np.full((len(packs), length), pad_id, dtype=np.int64)
    labels = np.full((len(packs), length), IGNORED, dtype=np.int64)
    starts: list[int] = []
    lengths: list[int] = []
    for b, pack in enumerate(packs):
        end = 0
        for row in pack:
            tokens, supervised = rows.row(int(row))
            part = slice(end, end + len(tokens))
            ids[b, part] = tokens
            labels[b, part] = np.where(supervised.astype(bool), tokens, IGNORED)
            labels[b, end] = IGNORED
            starts.append(b * length + end)
            lengths.append(len(tokens))
            end += len(tokens)
        assert end <= length
        starts += [b * length + end] if end < length else []
    borders = np.array([*starts, len(packs) * length], dtype=np.int32)
    sizes = np.diff(borders)
    positions = np.arange(len(packs) * length) - np.repeat(borders[:-1], sizes)
    return {
        "input_ids": torch.from_numpy(ids),
        "labels": torch.from_numpy(labels),
        "position_ids": torch.from_numpy(positions.reshape(len(packs), length)),
        "cu_seq_lens": torch.from_numpy(borders),
        # kernels need a bound; few different ones, as compiled code is made for each
        "longest": min(length, 1 << int(sizes.max() - 1).bit_length()),
        "counts": _counts(lengths, ids.size),
    }


def _counts(lengths: Sequence[int], slots: int) -> torch.Tensor:
    squared = sum(length * length for length in lengths)
    return torch.tensor([sum(lengths), len(lengths), slots, squared])
