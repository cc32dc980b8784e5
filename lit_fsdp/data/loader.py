"""From item ids to batches: lazily, in other processes if asked to, and in an order that nobody else touches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from lit_fsdp.data.collate import Batch, collate, collate_packs
from lit_fsdp.data.order import FILLER
from lit_fsdp.data.samples import Samples
from lit_fsdp.data.workers import obey_parent_only, signals_held


class SampleBatches(Dataset[Batch]):
    """Maps item ids to a batch: packs where the samples are packed, else rows padded to the longest of them.

    Args:
        samples: Of one split.
        pad_id: Token put where there is none.
    """

    def __init__(self, samples: Samples, pad_id: int) -> None:
        self._samples, self._pad_id = samples, pad_id

    def __getitem__(self, items: Sequence[int]) -> Batch:
        samples = self._samples
        assert all(FILLER <= item < len(samples) for item in items)
        if samples.capacity is not None:
            packs = [samples.members(item) if item != FILLER else () for item in items]
            return {**collate_packs(samples.rows, packs, samples.capacity, self._pad_id), "row": torch.tensor(items)}
        rows = [int(samples.members(item)[0]) if item != FILLER else FILLER for item in items]
        return collate(samples.rows, rows, self._pad_id)


class BatchLoader:
    """An iterable of batches; not a torch DataLoader, so that Lightning leaves its order alone.

    Args:
        batches: Maps what ``indices`` yields to a batch.
        indices: Called when the first batch is asked for, and not before: a resumed Trainer knows its step by then.
        length: Batches per epoch; the iterator may go on beyond it.
        num_workers: Loader processes.
        pin_memory: Copy batches into page-locked memory.
    """

    def __init__(
        self,
        batches: Dataset[Batch],
        indices: Callable[[], Iterator[list[int]]],
        length: int,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        self.batches, self.indices, self.length = batches, indices, length
        self.num_workers, self.pin_memory = num_workers, pin_memory

    def __len__(self) -> int:
        return self.length

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the position is the Trainer's step. Having it tells Lightning that the loader can be resumed."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing, see :meth:`state_dict`."""

    def __iter__(self) -> Iterator[Batch]:
        loader: DataLoader[Any] = DataLoader(
            self.batches,
            batch_size=None,
            sampler=_Lazy(self.indices),
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            generator=torch.Generator(),  # the global one stays as it is, which resuming relies on
            worker_init_fn=obey_parent_only,
        )
        with signals_held():
            batches = iter(loader)
        yield from batches


class _Lazy:
    """A sampler of item ids per batch."""

    def __init__(self, indices: Callable[[], Iterator[list[int]]]) -> None:
        self._indices = indices

    def __iter__(self) -> Iterator[list[int]]:
        return self._indices()
