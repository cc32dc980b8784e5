"""Batches of a stream for one rank, made ahead in loader processes if there are any, with the position after each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lit_fsdp.config.data import DataConfig
from lit_fsdp.data.collate import Batch, collate, collate_packs
from lit_fsdp.data.order import FILLER
from lit_fsdp.data.stream import Item, SampleStream, Share
from lit_fsdp.data.workers import obey_parent_only, signals_held
from lit_fsdp.errors import DataError
from lit_fsdp.host import is_first_process

_log = logging.getLogger(__name__)
_END, _ERROR = "stream_end", "stream_error"
_KEPT = 16  # the loader is ahead of the step by a batch or two


class StreamLoader:
    """An iterable of batches without length.

    Args:
        stream: What is read.
        share: This rank's.
        pad_id: Token put where there is none.
        config: The ``data`` section.
        pin_memory: Copy batches into page-locked memory.
    """

    def __init__(
        self, stream: SampleStream, share: Share, pad_id: int, config: DataConfig, pin_memory: bool = False
    ) -> None:
        self.stream, self.share, self.pad_id = stream, share, pad_id
        self.pack_length = config.max_seq_length if config.packing else None
        one = stream.tokenises_all or stream.deals_out
        self.num_workers, self.pin_memory = min(config.num_workers, 1) if one else config.num_workers, pin_memory
        self.begin: Callable[[], tuple[int, dict[str, Any] | None]] = lambda: (0, None)
        """Step and position to begin at; asked for with the first batch, when a resumed Trainer knows them."""
        self._ends: dict[int, dict[str, Any] | None] = {}
        if is_first_process():
            self._say(config.num_workers)

    def _say(self, num_workers: int) -> None:
        if self.stream.tokenises_all:
            what = "packs" if self.pack_length else "a plain text is split, so samples"
            _log.info(
                "data.streaming: %s depend on the lengths of all rows of a window, so every rank tokenises every row%s",
                what,
                ", in one loader process" if num_workers > 1 else "",
            )
        elif num_workers > self.num_workers:
            _log.info(
                "data.num_workers %d: a stream of datasets is read by one loader process, as each of several would get "
                "other rows of it",
                num_workers,
            )

    def position(self, step: int) -> dict[str, Any] | None:
        """The position after optimizer step ``step``, which is one of the last few; ``None``: the beginning."""
        return self._ends[step] if self._ends else self.begin()[1]

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the datamodule keeps the position. Having it tells Lightning that the loader can be resumed."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing, see :meth:`state_dict`."""

    def __iter__(self) -> Iterator[Batch]:
        step, position = self.begin()
        position = self._ends.get(step, position)  # a Trainer may fit once more
        if step and position is None and is_first_process():
            _log.warning("the checkpoint of step %d has no position in a stream, which begins at its first rows", step)
        self._ends = {step: position}
        batches = _Batches(self, position)
        loader: DataLoader[Any] = DataLoader(
            batches,
            batch_size=None,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            generator=torch.Generator(),  # the global one stays as it is, which resuming relies on
            worker_init_fn=obey_parent_only,
        )
        with signals_held():
            found = iter(loader)
        for batch in found:
            if _ERROR in batch:
                del found  # its processes end now, not when the traceback is let go
                raise DataError(batch[_ERROR])
            end = batch.pop(_END)
            if end is not None:
                step += 1
                self._ends[step] = end
                self._ends.pop(step - _KEPT, None)
            yield batch


class _Batches(IterableDataset[Batch]):
    """The batches of one loader process, or of this one; a DataError travels as its text, without a traceback."""

    def __init__(self, loader: StreamLoader, start: dict[str, Any] | None) -> None:
        self._stream, self._share, self._start = loader.stream, loader.share, start
        self._pack_length, self._pad_id = loader.pack_length, loader.pad_id

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        share = replace(self._share, worker=worker.id, workers=worker.num_workers) if worker else self._share
        try:
            for found in self._stream.micro_batches(self._start, share):
                yield {**self._collated(found.items), "row": torch.tensor(found.numbers), _END: found.end}
        except DataError as error:
            yield {_ERROR: str(error)}

    def _collated(self, items: list[Item]) -> Batch:
        samples = [sample for item in items for sample in item]
        rows: Any = _SampleRows([(sample.input_ids, sample.supervised) for sample in samples])
        numbers = iter(range(len(samples)))
        members = [[next(numbers) for _ in item] for item in items]
        if self._pack_length is not None:
            return collate_packs(rows, members, self._pack_length, self._pad_id)
        return collate(rows, [item[0] if item else FILLER for item in members], self._pad_id)


class _SampleRows:
    """Samples that are looked up by number, as tokenised rows are."""

    def __init__(self, samples: list[tuple[Any, Any]]) -> None:
        self._samples = samples

    def row(self, index: int) -> tuple[Any, Any]:
        return self._samples[index]
