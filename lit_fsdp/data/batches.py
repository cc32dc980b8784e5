"""Collate samples into batches, padded or packed, optionally in loader processes, in an order that Lightning keeps.

Shapes: B rows or packs, T tokens per row or pack, N sequences over all packs.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from lit_fsdp.data.order import FILLER
from lit_fsdp.data.packing import Samples

IGNORED = -100
Batch = dict[str, Any]
"""Tensors by name; a packed batch also has plain numbers."""
Sample = tuple[np.ndarray, np.ndarray]
"""Token ids and supervision mask of one sample, both of shape (T of the sample,)."""


def collate(samples: Sequence[Sample | None], pad_id: int) -> Batch:
    """Collate samples into a batch, padded on the right to the longest sample.

    The item ``None`` becomes a single unsupervised token, for a rank that is short of samples. Labels never depend on
    ``pad_id``, because that token may be supervised elsewhere.

    Returns:
        int64 ``input_ids``, ``attention_mask`` and ``labels`` (B, T), with -100 for unsupervised tokens, and ``counts``
        as in :data:`~lit_fsdp.metrics.step_metrics.BATCH_COUNTS`.
    """
    lengths = np.array([len(sample[0]) if sample else 1 for sample in samples])
    batch = _filled([[sample] if sample else [] for sample in samples], int(lengths.max()), pad_id)
    mask = np.arange(lengths.max()) < lengths[:, None]
    return {**batch, "attention_mask": torch.from_numpy(mask.astype(np.int64))}


def collate_packs(packs: Sequence[Sequence[Sample]], length: int, pad_id: int) -> Batch:
    """Collate packs into a batch: concatenated samples, each with its own positions, without an attention mask.

    With a 2-D mask, transformers would no longer separate the samples by their positions. Padding at the end of a
    pack is a separate sequence without labels, so that every token attends to at least one token.

    Returns:
        int64 ``input_ids``, ``labels`` and ``position_ids`` (B, ``length``). Positions restart at 0 with every
        sequence. The first label of a sequence is -100, because no token predicts it. The tensor ``cu_seq_lens`` is
        int32 (N + 1,): the start of each sequence in the flattened tokens, then the number of tokens. As plain numbers,
        ``longest`` is an upper bound of the longest sequence (a power of two, at most T) and ``sample_lengths`` are the
        sequence lengths. The numbers ``num_filled``, int64 (B,), are the tokens of each pack before its padding. The
        tensor ``counts`` is as for :func:`collate`, where a sample is a row, not a pack.
    """
    starts: list[int] = []
    for b, pack in enumerate(packs):
        ends = np.cumsum([0, *(len(tokens) for tokens, _ in pack)])
        # padding begins where the last sample ends
        starts += (b * length + ends[ends < length]).tolist()
    borders = np.array([*starts, len(packs) * length], dtype=np.int32)
    sizes = np.diff(borders)
    positions = np.arange(len(packs) * length) - np.repeat(borders[:-1], sizes)
    return {
        **_filled(packs, length, pad_id),
        "position_ids": torch.from_numpy(positions.reshape(len(packs), length)),
        "cu_seq_lens": torch.from_numpy(borders),
        # kernels need a bound; few distinct values limit recompilation
        "longest": min(length, 1 << int(sizes.max() - 1).bit_length()),
        "sample_lengths": tuple(sizes.tolist()),
        "num_filled": torch.tensor([sum(len(tokens) for tokens, _ in pack) for pack in packs]),
    }


def _filled(packs: Sequence[Sequence[Sample]], length: int, pad_id: int) -> Batch:
    """Return token ids and labels of packs, both int64 (B, ``length``), and their counts."""
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
    """Collate items: packs of ``pack_length`` tokens, or one sample each; an item without samples is a filler.

    A pair has two samples but counts as one: all chosen samples come first, then all rejected ones in the same order.
    """
    if pack_length is not None:
        return collate_packs(items, pack_length, pad_id)
    if pairs:
        batch = collate([item[side] if item else None for side in (0, 1) for item in items], pad_id)
        batch["counts"][1] //= 2
        return batch
    return collate([item[0] if item else None for item in items], pad_id)


class SampleBatches(Dataset[Batch]):
    """Map item ids (-1 for a filler) to a batch, with the ids as ``row`` (B,)."""

    def __init__(self, samples: Samples, pad_id: int) -> None:
        self._samples, self._pad_id = samples, pad_id

    def __getitem__(self, items: Sequence[int]) -> Batch:
        samples = self._samples
        members = [samples.members(item) if item != FILLER else () for item in items]
        found = [[samples.rows.row(int(row)) for row in rows] for rows in members]
        return {**collate_items(found, samples.capacity, self._pad_id, samples.pairs), "row": torch.tensor(items)}


class Resumable:
    """Mark a loader as resumable for Lightning; the Trainer's step or the datamodule stores the position."""

    def state_dict(self) -> dict[str, Any]:
        """Return no state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Ignore the state."""


class BatchLoader(Resumable):
    """An iterable of ``length`` batches; not a torch DataLoader, so that Lightning does not change its order.

    The function ``batches`` is called only when the first batch is requested: by then a resumed Trainer knows its step.
    """

    def __init__(self, batches: Callable[[], Iterator[Batch]], length: int) -> None:
        self._batches, self._length = batches, length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Batch]:
        yield from self._batches()
