"""Batches without end from sources that are never tokenized as a whole.

Every rank reads and tokenizes every row, so that all of them meet a bad row, or rows without a supervised token, at
the same global batch. Rows are shuffled, and packed, inside windows. Which samples form a global batch is a function of
the sources, the seed and the settings, never of the number of ranks, and a position is small: where a window begins,
and how far into it.

Without weights the sources come one after another. With weights each next row is of the source that has given least
for its weight, and a source at its end begins again until each has ended once. That is an epoch, and the next one
begins at the first rows again; a window holds rows of one epoch only.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from lit_fsdp.config.data import DataConfig
from lit_fsdp.data.batches import Batch, Resumable, Sample, collate_items
from lit_fsdp.data.cache import check_dropped, encode_rows, nothing_supervised
from lit_fsdp.data.encode import EncodedRow, RowEncoder
from lit_fsdp.data.order import generator_of, micro_batches
from lit_fsdp.data.packing import holds_pairs, plan_packs
from lit_fsdp.data.readers import Position, Row
from lit_fsdp.data.sources import Source, find_sources
from lit_fsdp.data.workers import load
from lit_fsdp.errors import DataError
from lit_fsdp.host import is_first_process

_log = logging.getLogger(__name__)
_ENOUGH_ROWS = 1000
_TOGETHER = 256
_END, _ERROR = "stream_end", "stream_error"
_KEPT = 16  # the loader is ahead of the step by a batch or two


@dataclass(frozen=True)
class Window:
    """Rows that are shuffled together, each with the number of its source; ``number`` counts windows of an epoch.

    ``start`` is where its first row is, for JSON: :meth:`SampleStream.windows` goes on from there.
    """

    epoch: int
    number: int
    rows: list[tuple[int, Row]]
    start: dict[str, Any]


@dataclass(frozen=True)
class GlobalBatch:
    """Items of one optimizer step, each with its number in its window, and the position after it, for JSON."""

    items: list[list[Sample]]
    numbers: list[int]
    end: dict[str, Any]


class SampleStream:
    """Global batches of samples, one after another, in an order that ``seed`` decides.

    Raises:
        DataError: A source is missing, or has no rows or rows of no known format.
    """

    def __init__(self, config: DataConfig, encoder: RowEncoder, seed: int) -> None:
        assert config.train is not None
        self._config, self._encoder, self._seed = config, encoder, seed
        self.sources = find_sources(config.train, config, streaming=True)
        self.name = ", ".join(source.name for source in self.sources)
        self.formats = [source.row_format for source in self.sources]
        self.pairs = holds_pairs(self.formats, "data.train", config)
        digests = [source.edges_digest() for source in self.sources]
        self.fingerprint = hashlib.blake2b("/".join(digests).encode(), digest_size=16).hexdigest()
        """Of the content, as far as it is known; the order depends on it."""
        self._read, self._dropped = 0, Counter[str]()

    def record(self) -> dict[str, Any]:
        """What the order of the samples depends on, for checkpoints."""
        config = self._config
        weights = [source.weight for source in self.sources]
        forms = [[form, source.columns] for form, source in zip(self.formats, self.sources, strict=True)]
        text = json.dumps([self._encoder.text, forms])
        revisions = {part.name: part.revision for source in self.sources for part in source.parts if part.revision}
        names = ("shuffle", "shuffle_window", "packing", "global_batch_size", "max_seq_length")
        return {
            "fingerprint": self.fingerprint,
            **({"revisions": revisions} if revisions else {}),
            "weights": None if weights[0] is None else weights,
            "seed": self._seed,
            **{name: getattr(config, name) for name in names},
            "encoding": hashlib.blake2b(text.encode(), digest_size=8).hexdigest(),
        }

    def global_batches(self, start: dict[str, Any] | None = None) -> Iterator[GlobalBatch]:
        """Global batches from a :attr:`GlobalBatch.end` on; ``None``: from the beginning."""
        items: list[list[Sample]] = []
        numbers: list[int] = []
        first = int(start["item"]) if start else 0
        for window in self.windows(start):
            planned = self._plan(window)
            for index in range(first, len(planned)):
                items.append(planned[index])
                numbers.append(index)
                if len(items) == self._config.global_batch_size:
                    yield GlobalBatch(items, numbers, {**window.start, "item": index + 1})
                    items, numbers = [], []
            first = 0

    def _plan(self, window: Window) -> list[list[Sample]]:
        encoded = self.encode(window)
        self._check(window, encoded)
        samples = [(sample.input_ids, sample.supervised) for row in encoded for sample in row.samples]
        size = 2 if self.pairs else 1
        items = [samples[i : i + size] for i in range(0, len(samples), size)]
        if self._config.packing:
            lengths = np.array([len(ids) for ids, _ in samples], dtype=np.int64)
            members, offsets = plan_packs(lengths, self._config.max_seq_length)
            items = [[samples[i] for i in members[a:b]] for a, b in pairwise(offsets.tolist())]
        if not self._config.shuffle:
            return items
        generator = generator_of(self.fingerprint, self._seed, window.epoch, window.number)
        return [items[i] for i in generator.permutation(len(items))]

    def encode(self, window: Window) -> list[EncodedRow]:
        """What becomes of every row of a window, in order."""
        found: dict[int, EncodedRow] = {}
        for form in dict.fromkeys(self.formats):
            mine = [i for i, (source, _) in enumerate(window.rows) if self.formats[source] == form]
            for some in (mine[i : i + _TOGETHER] for i in range(0, len(mine), _TOGETHER)):
                rows = [window.rows[i][1] for i in some]
                encoded, refused = encode_rows(rows, form, self._encoder, self._config.on_bad_row == "drop")
                found.update(zip(some, encoded, strict=True))
                for line in refused if is_first_process() else ():
                    _log.warning("dropped (data.on_bad_row): %s", line.split("\n")[0])
        return [found[i] for i in range(len(window.rows))]

    def _check(self, window: Window, encoded: Sequence[EncodedRow]) -> None:
        """Refuse a stream of little use, once enough of it, or an epoch, has been seen."""
        self._read += len(encoded)
        self._dropped.update(row.dropped for row in encoded if row.dropped is not None)
        if self._read >= _ENOUGH_ROWS or window.epoch:
            if self._read == self._dropped.total():
                raise nothing_supervised(self.name, self._dropped)
            check_dropped(self.name, self._dropped, self._read, self._config)

    # -- windows of rows

    def windows(self, start: dict[str, Any] | None = None) -> Iterator[Window]:
        """Windows without end from a :attr:`Window.start` on; ``None``: from the first row.

        Raises:
            DataError: A file is broken, a whole epoch has no row, or a source is not what it was when ``start`` was
                noted.
        """
        if start and start["fingerprint"] != self.fingerprint:
            then = "".join(f"\n  then:    {name} at revision {commit}" for name, commit in start["revisions"].items())
            raise DataError(
                f"{self.name}: not what was streamed when the checkpoint was written{then}\n"
                "  fix:     resume with the same files, or the same revision of each source"
            )
        revisions = self.record().get("revisions", {})
        epoch, number = (start["epoch"], start["window"]) if start else (0, 0)
        positions = start["sources"] if start else [{} for _ in self.sources]
        while True:
            readers = [_Reader(source, **at) for source, at in zip(self.sources, positions, strict=True)]
            rows = self._epoch(readers)
            while True:
                at = [reader.position() for reader in readers]
                found = list(islice(rows, self._config.shuffle_window))
                if not found:
                    break
                names = {"epoch": epoch, "window": number, "fingerprint": self.fingerprint, "revisions": revisions}
                yield Window(epoch, number, found, {**names, "sources": at})
                number += 1
            if number == 0:
                raise DataError(f"{self.name}: no rows\n  fix:     a source needs at least one row")
            epoch, number, positions = epoch + 1, 0, [{} for _ in self.sources]

    def _epoch(self, readers: Sequence[_Reader]) -> Iterator[tuple[int, Row]]:
        weights = [source.weight for source in self.sources]
        if weights[0] is None:
            for index, reader in enumerate(readers):
                while not reader.ended and (row := reader.next()):
                    yield index, row
            return
        while True:
            index = min(range(len(readers)), key=lambda i: ((readers[i].taken + 1) / float(weights[i] or 1), i))
            row = readers[index].next()
            if all(reader.ended for reader in readers):
                return
            row = row or readers[index].next()
            if row is None:
                raise DataError(f"{self.sources[index].name}: no rows\n  fix:     a source needs at least one row")
            yield index, row


class _Reader:
    """The rows of one source, and how far it has been read."""

    def __init__(self, source: Source, at: Position = None, skip: int = 0, ended: int = 0, taken: int = 0) -> None:
        self._source, self._at, self._skip = source, at, skip
        self.ended, self.taken = ended, taken
        """Times that it has ended, and rows that it has given, in this epoch."""
        self._rows: Iterator[Row] | None = None

    def position(self) -> dict[str, Any]:
        """Arguments that make a reader which goes on here: the chunk, and rows of it that have been read."""
        return {"at": self._at, "skip": self._skip, "ended": self.ended, "taken": self.taken}

    def next(self) -> Row | None:
        """The next row; ``None`` at the end, after which it begins again."""
        self._rows = self._rows or self._read()
        row = next(self._rows, None)
        if row is None:
            self.ended += 1
            self._rows, self._at, self._skip = None, None, 0
        else:
            self._skip += 1
            self.taken += 1
        return row

    def _read(self) -> Iterator[Row]:
        skip = self._skip
        for chunk in self._source.chunks(self._at):
            self._at, self._skip = chunk.start, skip
            yield from chunk.rows()[skip:]
            skip = 0


# -- batches of one rank


class StreamLoader(Resumable):
    """An iterable of batches without length, with the position after each step.

    Args:
        stream: What is read.
        rank: Of this process.
        ranks: All of them; each gets its part of every global batch.
        pad_id: Token put where there is none.
        config: The ``data`` section; of ``num_workers`` one is used, as each would read and tokenize every row.
        pin_memory: Copy batches into page-locked memory.
    """

    def __init__(
        self, stream: SampleStream, rank: int, ranks: int, pad_id: int, config: DataConfig, pin_memory: bool = False
    ) -> None:
        self.stream, self._num_workers, self._pin_memory = stream, min(config.num_workers, 1), pin_memory
        self._cut = partial(micro_batches, micro_batch_size=config.micro_batch_size, ranks=ranks, rank=rank)
        pack_length = config.max_seq_length if config.packing else None
        self._collate = partial(collate_items, pack_length=pack_length, pad_id=pad_id, pairs=stream.pairs)
        self.begin: Callable[[], tuple[int, dict[str, Any] | None]] = lambda: (0, None)
        """Step and position to begin at; asked for with the first batch, when a resumed Trainer knows them."""
        self._ends: dict[int, dict[str, Any] | None] = {}

    def position(self, step: int) -> dict[str, Any] | None:
        """The position after optimizer step ``step``, which is one of the last few; ``None``: the beginning.

        A step that Lightning ends early, by ``limit_train_batches``, ends behind all of its global batch.
        """
        return self._ends[min(step, max(self._ends))] if self._ends else self.begin()[1]

    def record(self, step: int) -> dict[str, Any]:
        """What the order depends on, and the position after a step, for a checkpoint."""
        return {**self.stream.record(), "position": self.position(step)}

    def __iter__(self) -> Iterator[Batch]:
        step, position = self.begin()
        position = self._ends.get(step, position)  # a Trainer may begin again
        if step and position is None and is_first_process():
            _log.warning("the checkpoint of step %d has no position in a stream, which begins at its first rows", step)
        self._ends = {step: position}
        found = load(_Batches(self.stream, position, self._cut, self._collate), self._num_workers, self._pin_memory)
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
    """The batches of a rank; a DataError travels as its text, without a traceback."""

    def __init__(self, stream: SampleStream, start: dict[str, Any] | None, cut: Any, collate: Any) -> None:
        self._stream, self._start, self._cut, self._collate = stream, start, cut, collate

    def __iter__(self) -> Iterator[Batch]:
        try:
            for found in self._stream.global_batches(self._start):
                end: dict[str, Any] | None = found.end
                for mine in self._cut(np.arange(len(found.items))):
                    batch = self._collate([found.items[i] for i in mine])
                    yield {**batch, "row": torch.tensor([found.numbers[i] for i in mine]), _END: end}
                    end = None  # with the first of them: the step may be ended early
        except DataError as error:
            yield {_ERROR: str(error)}
