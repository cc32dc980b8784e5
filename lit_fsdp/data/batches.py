"""Samples to batches, padded or packed, in loader processes if asked to and in an order that nobody else touches.

Shapes: B rows or packs, T tokens of each, N sequences of all packs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from lit_fsdp.data.order import FILLER
from lit_fsdp.data.packing import Samples

IGNORED = -100
Batch = dict[str, Any]
"""Tensors by name, and what a packed batch knows as plain numbers."""
Sample = tuple[np.ndarray, np.ndarray]
"""Token ids and supervision of one sample, both of shape (T of the sample,)."""


def collate(samples: Sequence[Sample | None], pad_id: int) -> Batch:
    """The batch of some samples, padded on the right to the longest of them.

    ``None`` becomes a single token without supervision, for a rank that is short of samples. Labels never depend on
    ``pad_id``: it may well be a token that is supervised.

    Returns:
        int64 ``input_ids``, ``attention_mask`` and ``labels`` (B, T), -100 where nothing is supervised, and ``counts``,
        as :data:`~lit_fsdp.metrics.step_metrics.BATCH_COUNTS`.
    """
    lengths = np.array([len(sample[0]) if sample else 1 for sample in samples])
    batch = _filled([[sample] if sample else [] for sample in samples], int(lengths.max()), pad_id)
    mask = np.arange(lengths.max()) < lengths[:, None]
    return {**batch, "attention_mask": torch.from_numpy(mask.astype(np.int64))}


def collate_packs(packs: Sequence[Sequence[Sample]], length: int, pad_id: int) -> Batch:
    """The batch of some packs: samples one after another, each with its own positions, and no attention mask.

    A 2-D mask beside such positions would switch off that transformers tells the samples apart. Padding at the end of
    a pack is a sequence of its own without labels, so that no token attends to nothing.

    Returns:
        int64 ``input_ids``, ``labels`` and ``position_ids`` (B, ``length``). Positions restart at 0 with every
        sequence, whose first label is -100, because nothing predicts it. ``cu_seq_lens`` is int32 (N + 1,): where each
        sequence begins in the flattened tokens, and their number. ``longest`` is a bound of the longest one, a power of
        two, at most T, and ``sample_lengths`` their lengths, as plain numbers. ``counts`` as for :func:`collate`, where
        a sample is a row, not a pack.
    """
    starts: list[int] = []
    for b, pack in enumerate(packs):
        ends = np.cumsum([0, *(len(tokens) for tokens, _ in pack)])
        # where the last one ends, its padding begins
        starts += (b * length + ends[ends < length]).tolist()
    borders = np.array([*starts, len(packs) * length], dtype=np.int32)
    sizes = np.diff(borders)
    positions = np.arange(len(packs) * length) - np.repeat(borders[:-1], sizes)
    return {
        **_filled(packs, length, pad_id),
        "position_ids": torch.from_numpy(positions.reshape(len(packs), length)),
        "cu_seq_lens": torch.from_numpy(borders),
        # kernels need a bound; few different ones, as compiled code is made for each
        "longest": min(length, 1 << int(sizes.max() - 1).bit_length()),
        "sample_lengths": tuple(sizes.tolist()),
    }


def _filled(packs: Sequence[Sequence[Sample]], length: int, pad_id: int) -> Batch:
    """Token ids and labels of some packs, both int64 (B, ``length``), and their counts."""
    ids = np.full((len(packs), length), pad_id, dtype=np.int64)
    labels = np.full_like(ids, IGNORED)
    for b, pack in enumerate(packs):
        end = 0
        for tokens, supervised in pack:
            start, end = end, end + len(tokens)
            assert end <= length
            ids[b, start:end] = tokens
            labels[b, start:end] = np.where(supervised.astype(bool), tokens, IGNORED)
            labels[b, start] = IGNORED
    lengths = [len(tokens) for pack in packs for tokens, _ in pack]
    counts = torch.tensor([sum(lengths), len(lengths), ids.size, sum(length**2 for length in lengths)])
    return {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels), "counts": counts}


def collate_items(items: Sequence[Sequence[Sample]], pack_length: int | None, pad_id: int, pairs: bool) -> Batch:
    """Items as a batch: packs of ``pack_length`` tokens, or one sample each; one without samples is a filler.

    Pairs are two samples each: all that are chosen, then all that are rejected in the same order; they count as one.
    """
    if pack_length is not None:
        return collate_packs(items, pack_length, pad_id)
    if pairs:
        batch = collate([item[side] if item else None for side in (0, 1) for item in items], pad_id)
        batch["counts"][1] //= 2
        return batch
    return collate([item[0] if item else None for item in items], pad_id)


class SampleBatches(Dataset[Batch]):
    """Maps item ids, -1 for a filler, to a batch, with the ids themselves as ``row`` (B,)."""

    def __init__(self, samples: Samples, pad_id: int) -> None:
        self._samples, self._pad_id = samples, pad_id

    def __getitem__(self, items: Sequence[int]) -> Batch:
        samples = self._samples
        members = [samples.members(item) if item != FILLER else () for item in items]
        found = [[samples.rows.row(int(row)) for row in rows] for rows in members]
        return {**collate_items(found, samples.capacity, self._pad_id, samples.pairs), "row": torch.tensor(items)}


class Resumable:
    """What tells Lightning that a loader can be resumed; the position is the Trainer's step, or the datamodule's."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing."""


class BatchLoader(Resumable):
    """``length`` batches; not a torch DataLoader, so that Lightning leaves its order alone.

    ``batches`` is called when the first one is asked for, and not before: a resumed Trainer knows its step by then.
    """

    def __init__(self, batches: Callable[[], Iterator[Batch]], length: int) -> None:
        self._batches, self._length = batches, length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Batch]:
        yield from self._batches()
