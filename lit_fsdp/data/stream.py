"""Infinite batches from sources that are tokenized on the fly.

Every rank reads and tokenizes every row, so that all ranks reach an invalid row at the same global batch. Rows are
shuffled and packed within windows. The result depends on the sources, the seed and the settings, never on the number
of ranks. A position is small: the start of a window, and an offset into it.

Without weights, sources are read one after another. With weights, the next row comes from the source with the fewest
rows read relative to its weight. Exhausted sources restart until each has ended once, which completes an epoch.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from lit_fsdp.config.data import DataConfig
from lit_fsdp.data.batches import Batch, Resumable, Sample, collate_items
from lit_fsdp.data.cache import TokenizedRows, encode_rows, nothing_supervised, prepare_rows, say_dropped, tokenized
from lit_fsdp.data.encode import EncodedRow, RowEncoder
from lit_fsdp.data.order import generator_of, micro_batches
from lit_fsdp.data.packing import Samples, holds_pairs, plan_items
from lit_fsdp.data.readers import Row
from lit_fsdp.data.sources import Source, content_hash, find_sources
from lit_fsdp.data.workers import load
from lit_fsdp.errors import DataError
from lit_fsdp.host import is_first_process

_log = logging.getLogger(__name__)
_ENOUGH_ROWS = _LOOKED_AT = 1000
_END = "stream_end"
_TOGETHER = 100  # rows tokenized at a time: a tokenizer's output takes 100 bytes per token
_KEPT = 16  # the loader is one or two batches ahead of the step

Window = tuple[dict[str, Any], list[tuple[int, Row]]]
"""Start position (JSON), and rows that are shuffled together, each with its source index."""
GlobalBatch = tuple[list[tuple[int, list[Sample]]], dict[str, Any]]
"""Items of one optimizer step, each with its index in its window, and the position after the step (JSON)."""


@dataclass
class _Reader:
    """Read position of a source within an epoch."""

    part: int = 0
    row: int = 0
    ended: int = 0
    """Number of completed passes."""
    taken: int = 0
    """Number of rows read."""

    def rows(self, source: Source) -> Iterator[Row | None]:
        """Yield rows from this position, repeating the source, with None after each pass."""
        while True:
            for at, raw in source.read(self.part, self.row):
                self.part, self.row = at
                self.taken += 1
                yield source.parse(raw)
            self.part, self.row = 0, 0
            self.ended += 1
            yield None


class SampleStream:
    """Global batches of samples in an order determined by ``seed``; DataError if a source cannot be used."""

    def __init__(self, config: DataConfig, encoder: RowEncoder, seed: int) -> None:
        assert config.train is not None
        self._config, self._encoder, self._seed = config, encoder, seed
        self.sources = find_sources(config.train, config, streaming=True)
        self.formats = [source.row_format for source in self.sources]
        self.pairs = holds_pairs(self.formats, "data.train", config)
        self._weights = [source.weight for source in self.sources if source.weight is not None]
        self.fingerprint = content_hash([source.digest(None) for source in self.sources])
        """Hash of the content, as far as it is known; the order depends on it."""
        self._read, self._kept, self._dropped = 0, 0, Counter[str]()

    def record(self) -> dict[str, Any]:
        """Return everything that the sample order depends on, for checkpoints."""
        names = ("shuffle", "shuffle_window", "packing", "global_batch_size", "max_seq_length")
        return {
            "fingerprint": self.fingerprint,
            "revisions": {source.name: source.hub["revision"] for source in self.sources if source.hub},
            "weights": self._weights,
            "seed": self._seed,
            **{name: getattr(self._config, name) for name in names},
            "encoding": content_hash([self._encoder.text, self.formats, [(s.columns, s.turns) for s in self.sources]]),
        }

    def global_batches(self, start: dict[str, Any] | None = None) -> Iterator[GlobalBatch]:
        """Yield global batches from a position; ``None``: from the beginning."""
        items: list[tuple[int, list[Sample]]] = []
        first = int(start["item"]) if start else 0
        for at, rows in self.windows(start):
            for number, item in islice(enumerate(self._plan(at, rows)), first, None):
                items.append((number, item))
                if len(items) == self._config.global_batch_size:
                    yield items, {**at, "item": number + 1}
                    items = []
            first = 0

    def _plan(self, at: dict[str, Any], rows: list[tuple[int, Row]]) -> list[list[Sample]]:
        """Plan the items of a window; DataError if enough rows, or a full epoch, give no sample."""
        samples = self.samples(rows)
        self._read += samples.rows.meta["rows_read"]
        self._kept += len(samples)
        self._dropped += samples.rows.meta["dropped"]
        if (self._read >= _ENOUGH_ROWS or at["epoch"]) and not self._kept:
            raise nothing_supervised(", ".join(source.name for source in self.sources), self._dropped)
        order = np.arange(len(samples))
        if self._config.shuffle:
            order = generator_of(self.fingerprint, self._seed, at["epoch"], at["window"]).permutation(order)
        return [[samples.rows.row(int(row)) for row in samples.members(int(item))] for item in order]

    def samples(self, rows: Sequence[tuple[int, Row]]) -> Samples:
        """Encode the rows of a window as items, in order."""
        found: dict[int, EncodedRow] = {}
        for form in dict.fromkeys(self.formats):
            mine = [i for i, (source, _) in enumerate(rows) if self.formats[source] == form]
            for some in (mine[i : i + _TOGETHER] for i in range(0, len(mine), _TOGETHER)):
                drops = self._config.on_bad_row == "drop"
                encoded, refused = encode_rows([rows[i][1] for i in some], form, self._encoder, drops)
                found.update(zip(some, encoded, strict=True))
                say_dropped(refused)
        counts, arrays = tokenized([found[i] for i in range(len(rows))])
        names = zip(self.sources, self.formats, strict=True)
        sources = [{"name": source.name, "format": form} for source, form in names]
        return plan_items(TokenizedRows(Path(), {**counts, "sources": sources}, **arrays), "train", self._config)

    def windows(self, start: dict[str, Any] | None = None) -> Iterator[Window]:
        """Yield windows endlessly from the start of a window, or from the first row."""
        start = start or {"epoch": 0, "window": 0, "sources": [{} for _ in self.sources]}
        epoch, number = start["epoch"], start["window"]
        readers = [_Reader(**at) for at in start["sources"]]
        while True:
            rows, at = self._epoch(readers), [asdict(reader) for reader in readers]
            while found := list(islice(rows, self._config.shuffle_window)):
                yield {"epoch": epoch, "window": number, "sources": at}, found
                number, at = number + 1, [asdict(reader) for reader in readers]
            epoch, number, readers = epoch + 1, 0, [_Reader() for _ in self.sources]

    def _epoch(self, readers: Sequence[_Reader]) -> Iterator[tuple[int, Row]]:
        rows = [reader.rows(source) for reader, source in zip(readers, self.sources, strict=True)]
        while not all(reader.ended for reader in readers):
            if self._weights:
                index = min(range(len(rows)), key=lambda i: ((readers[i].taken + 1) / self._weights[i], i))
            else:
                index = next(i for i, reader in enumerate(readers) if not reader.ended)
            row = next(rows[index])
            if row is not None:
                yield index, row


def prepare_samples(config: DataConfig, splits: Sequence[str], encoder: RowEncoder) -> dict[str, Samples]:
    """Tokenize the requested splits of the recipe or load them from the cache, and plan their items in memory.

    Any number of processes may call it concurrently; only one tokenizes. A streamed data.train is represented by its
    first rows: one window, at most 1,000 rows.

    Raises:
        DataError: A source or row is invalid, a split has no supervised token, or data.val_split leaves a split empty.
        ConfigError: A source of a mix would never be read.
    """
    found: dict[str, Samples] = {}
    for split in filter(config.has, splits):
        if split == "train" and config.streaming:
            found[split] = _first_samples(config, encoder)
        else:
            sources: Any = config.train if split == "val" and config.val_split is not None else getattr(config, split)
            found[split] = plan_items(prepare_rows(sources, config, encoder), split, config)
    return found


def _first_samples(config: DataConfig, encoder: RowEncoder) -> Samples:
    stream = SampleStream(replace(config, shuffle_window=min(config.shuffle_window, _LOOKED_AT)), encoder, 0)
    _, rows = next(stream.windows())
    samples = stream.samples(rows)
    samples.rows.meta["seen"] = seen = f"the first {len(rows):,} rows of a stream"
    if not len(samples):
        raise nothing_supervised(f"data.train, {seen}", samples.rows.meta["dropped"])
    return samples


# -- batches of one rank


class StreamLoader(Resumable):
    """Infinite batches of one rank, and the position after each step.

    At most one of ``data.num_workers`` is used, because each worker would read and tokenize every row.
    """

    def __init__(
        self, stream: SampleStream, rank: int, ranks: int, pad_id: int, config: DataConfig, pin_memory: bool = False
    ) -> None:
        self.stream, self._num_workers, self._pin_memory = stream, min(config.num_workers, 1), pin_memory
        self._cut = partial(micro_batches, micro_batch_size=config.micro_batch_size, ranks=ranks, rank=rank)
        pack_length = config.max_seq_length if config.packing else None
        self._collate = partial(collate_items, pack_length=pack_length, pad_id=pad_id, pairs=stream.pairs)
        self.begin: Callable[[], tuple[int, dict[str, Any] | None]] = lambda: (0, None)
        """Return the start step and position; called with the first batch, when a resumed Trainer knows them."""
        self._ends: dict[int, dict[str, Any] | None] = {}

    def position(self, step: int) -> dict[str, Any] | None:
        """Return the position after a recent optimizer step; a step that Lightning cuts short ends after its batch."""
        return self._ends[min(step, max(self._ends))] if self._ends else self.begin()[1]

    def record(self, step: int) -> dict[str, Any]:
        """Return everything that the order depends on, and the position after a step, for a checkpoint."""
        return {**self.stream.record(), "position": self.position(step)}

    def __iter__(self) -> Iterator[Batch]:
        step, position = self.begin()
        position = self._ends.get(step, position)  # a Trainer may restart
        if step and position is None and is_first_process():
            _log.warning("the checkpoint of step %d has no stream position; the stream restarts at its first row", step)
        self._ends = {step: position}
        batches = _Batches(self.stream, position, self._cut, self._collate)
        for batch in load(batches, self._num_workers, self._pin_memory):
            end = batch.pop(_END)
            if end is not None:
                step += 1
                self._ends[step] = end
                self._ends.pop(step - _KEPT, None)
            yield batch


class _Batches(IterableDataset[Any]):
    """Batches of a rank; a DataError is the last item."""

    def __init__(self, stream: SampleStream, start: dict[str, Any] | None, cut: Any, collate: Any) -> None:
        self._stream, self._start, self._cut, self._collate = stream, start, cut, collate

    def __iter__(self) -> Iterator[Batch | DataError]:
        try:
            for items, after in self._stream.global_batches(self._start):
                end: dict[str, Any] | None = after
                for mine in self._cut(np.arange(len(items))):
                    batch = self._collate([items[i][1] for i in mine])
                    yield {**batch, "row": torch.tensor([items[i][0] for i in mine]), _END: end}
                    end = None  # with the first micro-batch, because the step may end early
        except DataError as error:
            yield error
