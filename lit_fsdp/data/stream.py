"""Samples without end for training from sources that are never tokenised as a whole.

Rows are shuffled inside windows. Which of them form a global batch is a function of the sources, the seed and the
settings, never of the number of ranks, and a position is small: where a window begins and how far into it.

Where one row is one sample (conversations and token ids, not packed) a rank tokenises only the rows it trains on, and a
row without anything to learn leaves its place in the global batch empty. Packs, and plain texts that are split, depend
on the lengths of all rows of a window, so there every rank tokenises every row.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any, Protocol

import numpy as np

from lit_fsdp.config.data import DataConfig, RowFormat
from lit_fsdp.data.encode import CUT, TOO_LONG, EncodedRow, RowEncoder
from lit_fsdp.data.files import Row
from lit_fsdp.data.masks import Encoded
from lit_fsdp.data.order import FILLER
from lit_fsdp.data.packing import plan_packs
from lit_fsdp.data.saved import StreamedPart
from lit_fsdp.data.sources import find_sources
from lit_fsdp.data.windows import RowWindows, Window
from lit_fsdp.errors import DataError

_log = logging.getLogger(__name__)
_ENOUGH_ROWS = 1000
_TOGETHER = 256

Item = list[Encoded]
"""Samples of one place of a global batch: one, those of a pack, or none where there is nothing to learn."""


@dataclass(frozen=True)
class Share:
    """Which part of every global batch somebody gets."""

    rank: int
    ranks: int
    micro_batch_size: int
    worker: int = 0
    workers: int = 1
    """Of the micro-batches of this rank, worker w makes those with number w, w + workers, …"""


@dataclass(frozen=True)
class MicroBatch:
    """Items of one forward pass."""

    items: list[Item]
    numbers: list[int]
    """Of each item in the plan of its window; -1 where there is nothing to learn."""
    end: dict[str, Any] | None
    """With the last micro-batch of a global batch: the position after it."""


class SampleStream:
    """Global batches of samples, one after another.

    Args:
        config: The ``data`` section.
        encoder: Makes samples of rows.
        seed: Of the order.

    Raises:
        DataError: A source is missing, or has no rows or rows of no known format.
    """

    def __init__(self, config: DataConfig, encoder: RowEncoder, seed: int) -> None:
        assert config.train is not None
        self._config, self._encoder, self._seed = config, encoder, seed
        self.windows = RowWindows(find_sources(config.train, config, streaming=True), config.shuffle_window)
        self.tokenises_all = config.packing or "text" in self.windows.formats
        """Whether every rank has to tokenise every row."""
        parts = [part for source in self.windows.sources for part in source.parts]
        self.deals_out = any(isinstance(part, StreamedPart) for part in parts)
        """Whether several loader processes would each get other rows: ``datasets`` deals them out by itself."""
        self.counts = _Counts()

    def record(self) -> dict[str, Any]:
        """What the order of the samples depends on, for checkpoints."""
        config, windows = self._config, self.windows
        weights = [source.weight for source in windows.sources]
        return {
            "fingerprint": windows.fingerprint,
            "weights": None if weights[0] is None else weights,
            "seed": self._seed,
            "shuffle": config.shuffle,
            "shuffle_window": config.shuffle_window,
            "packing": config.packing,
            "global_batch_size": config.global_batch_size,
            **(self._lengths_record() if self.tokenises_all else {}),
        }

    def _lengths_record(self) -> dict[str, Any]:
        """What the lengths of samples depend on, and with them which of them a position means."""
        forms = [
            [form, source.columns] for form, source in zip(self.windows.formats, self.windows.sources, strict=True)
        ]
        text = json.dumps([self._encoder.text, forms])
        encoding = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        return {"max_seq_length": self._config.max_seq_length, "encoding": encoding}

    def micro_batches(self, start: dict[str, Any] | None, share: Share) -> Iterator[MicroBatch]:
        """The micro-batches of a share from a position on.

        Args:
            start: :attr:`MicroBatch.end` of the last global batch that was trained on; ``None``: the beginning.
            share: Whose part.

        Raises:
            DataError: A row or file is bad, or there is nothing to learn.
        """
        yield from islice(self._of_rank(start, share), share.worker, None, share.workers)

    def _of_rank(self, start: dict[str, Any] | None, share: Share) -> Iterator[MicroBatch]:
        size, per_step = share.micro_batch_size, share.micro_batch_size * share.ranks
        number = 0
        for places, end in self._global_batches(start):
            firsts = range(share.rank * size, len(places), per_step)
            for first in firsts:
                mine = number % share.workers == share.worker
                items = _items(places[first : first + size]) if mine else []
                numbers = [index if item else FILLER for (_, index), item in zip(places[first:], items, strict=False)]
                yield MicroBatch(items, numbers, end if first == firsts[-1] else None)
                number += 1

    def _global_batches(self, start: dict[str, Any] | None) -> Iterator[tuple[list[_Place], dict[str, Any]]]:
        places: list[_Place] = []
        first = int(start["item"]) if start else 0
        for window in self.windows.read(start):
            self._check(window)
            planned = self._plan(window)
            for index in range(first, len(planned)):
                places.append((planned, index))
                if len(places) == self._config.global_batch_size:
                    yield places, {**window.start, "item": index + 1}
                    places = []
            first = 0

    def _plan(self, window: Window) -> _Planned:
        if self.tokenises_all:
            samples = [sample for row in self.encode(window) for sample in row.samples]
            return _Packs(self._packs(samples, window))
        return _Rows(window.rows, self._order(len(window.rows), window), self)

    def _packs(self, samples: list[Encoded], window: Window) -> list[Item]:
        if not self._config.packing:
            return [[samples[i]] for i in self._order(len(samples), window)]
        lengths = np.array([len(sample.input_ids) for sample in samples], dtype=np.int64)
        members, offsets = plan_packs(lengths, self._config.max_seq_length)
        packs = [members[a:b].tolist() for a, b in pairwise(offsets)]
        return [[samples[i] for i in packs[p]] for p in self._order(len(packs), window)]

    def _order(self, count: int, window: Window) -> list[int]:
        if not self._config.shuffle:
            return list(range(count))
        key = f"{self.windows.fingerprint}/{self._seed}/{window.epoch}/{window.number}"
        digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
        generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "big")))
        return generator.permutation(count).tolist()

    def encode(self, window: Window) -> list[EncodedRow]:
        """What becomes of every row of a window, in file order.

        Raises:
            DataError: A row is bad.
        """
        parts = (window.rows[i : i + _TOGETHER] for i in range(0, len(window.rows), _TOGETHER))
        return [row for part in parts for row in self.encode_rows(part)]

    def encode_rows(self, rows: Sequence[tuple[int, Row]]) -> list[EncodedRow]:
        """What becomes of some rows, each with the number of its source; they are counted.

        Raises:
            DataError: A row is bad.
        """
        found: dict[int, EncodedRow] = {}
        for form in dict.fromkeys(self.windows.formats):
            wanted = [i for i, (source, _) in enumerate(rows) if self.windows.formats[source] == form]
            found.update(zip(wanted, self._encode([rows[i][1] for i in wanted], form), strict=True))
        self.counts.add(found.values())
        return [found[i] for i in range(len(rows))]

    def _encode(self, rows: list[Row], form: RowFormat) -> list[EncodedRow]:
        return self._encoder.encode([row for _, row in rows], form, [place for place, _ in rows]) if rows else []

    def _check(self, window: Window) -> None:
        """Before a window: enough of what came before it was of use."""
        counts, largest = self.counts, self._config.max_dropped_share
        if counts.read < _ENOUGH_ROWS and not (window.epoch and counts.read):
            return
        names = ", ".join(source.name for source in self.windows.sources)
        if counts.read == sum(counts.dropped.values()):
            raise DataError(
                f"{names}: no token of any row is supervised; {counts}\n"
                "  fix:     rows need an assistant turn within data.max_seq_length tokens"
            )
        if counts.dropped[CUT] + counts.dropped[TOO_LONG] > largest * counts.read:
            raise DataError(
                f"{names}: too many rows are cut so far that nothing is left to learn; {counts}\n"
                f"  allowed: a share of data.max_dropped_share {largest}\n  fix:     raise data.max_seq_length"
            )
        if window.number == 0:
            _log.info("%s: epoch %d begins; so far %s", names, window.epoch, counts)


class _Counts:
    """Rows tokenised here, and what became of them."""

    def __init__(self) -> None:
        self.read = self.truncated = 0
        self.dropped: Counter[str] = Counter()

    def add(self, rows: Any) -> None:
        for row in rows:
            self.read += 1
            self.truncated += row.truncated
            if row.dropped:
                self.dropped[row.dropped] += 1

    def __str__(self) -> str:
        dropped = ", ".join(f"{count} {reason}" for reason, count in self.dropped.items())
        return f"{self.read} rows tokenised here, dropped {dropped or '0'}, truncated {self.truncated}"


class _Planned(Protocol):
    """Items of one window."""

    def __len__(self) -> int: ...

    def items(self, indices: Sequence[int]) -> list[Item]: ...


_Place = tuple[_Planned, int]


@dataclass(frozen=True)
class _Packs:
    """Items that are there already."""

    packs: list[Item]

    def __len__(self) -> int:
        return len(self.packs)

    def items(self, indices: Sequence[int]) -> list[Item]:
        return [self.packs[index] for index in indices]


@dataclass(frozen=True)
class _Rows:
    """Rows that are tokenised when they are asked for."""

    rows: list[tuple[int, Row]]
    order: list[int]
    stream: SampleStream

    def __len__(self) -> int:
        return len(self.order)

    def items(self, indices: Sequence[int]) -> list[Item]:
        encoded = self.stream.encode_rows([self.rows[self.order[index]] for index in indices])
        return [list(row.samples) for row in encoded]


def _items(places: Sequence[_Place]) -> list[Item]:
    """Tokenised window by window: a global batch may lie across the border of two."""
    found: list[Item] = []
    for planned in dict.fromkeys(id(planned) for planned, _ in places):
        mine = [(owner, index) for owner, index in places if id(owner) == planned]
        found += mine[0][0].items([index for _, index in mine])
    return found
