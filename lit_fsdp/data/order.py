"""Items of global batch g: a pure function of (data, seed, epoch, g), never of the number of ranks.

An item is a row, or a pack of rows. The data position of a run is its step; a resume with another order, for example
with another global batch size, adds the items that were consumed before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

FILLER = -1
"""Id of an unsupervised item, for a rank that is short of items."""


@dataclass(frozen=True)
class Start:
    """The items at which an order begins to apply: before a step, so many items of an epoch are consumed."""

    step: int = 0
    epoch: int = 0
    items: int = 0


@dataclass(frozen=True)
class GlobalOrder:
    """Items of every global batch of every epoch: each item once, or with ``weights`` a share of each source.

    A share consists of full passes over the source, each in its own order, and a partial pass, which the next epoch
    continues.
    """

    num_rows: int
    """Number of items: rows or packs."""
    global_batch_size: int
    fingerprint: str
    seed: int
    shuffle: bool = True
    groups: tuple[int, ...] = ()
    """Number of items of each source, in order; a single number without weights."""
    weights: tuple[float, ...] = ()
    """One weight per group, or empty."""

    @property
    def batches_per_epoch(self) -> int:
        """Global batches per epoch; the last one may be short."""
        return -(-self.num_rows // self.global_batch_size)

    def record(self) -> dict[str, Any]:
        """Return everything that determines the order, as JSON."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    def permutation(self, epoch: int) -> np.ndarray:
        """Return the ordered item ids of an epoch, int64 (num_rows,); unshuffled: file order, sources evenly spread."""
        if self.weights:
            return self._mix(epoch)
        return self._generator(epoch).permutation(self.num_rows) if self.shuffle else np.arange(self.num_rows)

    def position(self, step: int, start: Start) -> tuple[int, int]:
        """Return the epoch and its number of consumed items before optimizer step ``step`` of a run with ``start``."""
        if step == start.step:
            return start.epoch, start.items
        batches = start.epoch * self.batches_per_epoch + start.items // self.global_batch_size + step - start.step
        epoch, index = divmod(batches, self.batches_per_epoch)
        return epoch, index * self.global_batch_size

    def global_batch(self, permutation: np.ndarray, items: int) -> np.ndarray:
        """Return the ids of the global batch after ``items`` consumed items of the permuted epoch; the last is short.

        Batches end at multiples of the global batch size, so the first after a :class:`Start` may be short, too.
        """
        end = (items // self.global_batch_size + 1) * self.global_batch_size
        return permutation[items:end]

    def continued(self, before: GlobalOrder, start: Start, step: int) -> Start:
        """Return where step ``step`` of a run with another order continues in this one.

        Of the same items, those that remain in the epoch follow, whatever the global batch size; of other items, those
        after as many global batches of the epoch.
        """
        epoch, items = before.position(step, start)
        if replace(before, global_batch_size=self.global_batch_size) != self:
            items = items // before.global_batch_size * self.global_batch_size
        return Start(step, epoch, items) if items < self.num_rows else Start(step, epoch + 1, 0)

    def _mix(self, epoch: int) -> np.ndarray:
        shares = apportion(self.num_rows, self.weights)
        source_of = np.repeat(np.arange(len(self.groups)), shares)
        if self.shuffle:
            source_of = self._generator(epoch, "mix").permutation(source_of)
        else:
            places = np.concatenate([(np.arange(share) + 0.5) / share for share in shares])
            source_of = source_of[np.argsort(places, kind="stable")]
        firsts = np.cumsum([0, *self.groups])
        taken = [
            firsts[group] + self._taken(group, size, epoch * share, share)
            for group, (size, share) in enumerate(zip(self.groups, shares, strict=True))
        ]
        order = np.empty(self.num_rows, dtype=np.int64)
        order[np.argsort(source_of, kind="stable")] = np.concatenate(taken)  # for any number of sources
        return order

    def _taken(self, group: int, size: int, start: int, count: int) -> np.ndarray:
        """Return ``count`` items of one source from item ``start``, counted over consecutive passes."""
        first, last = start // size, (start + count - 1) // size
        orders = [
            self._generator(number, f"source {group}").permutation(size) if self.shuffle else np.arange(size)
            for number in range(first, last + 1)
        ]
        return np.concatenate(orders)[start - first * size :][:count]

    def _generator(self, *parts: Any) -> np.random.Generator:
        return generator_of(self.fingerprint, self.seed, *parts)


def generator_of(*parts: Any) -> np.random.Generator:
    """Build a random generator that depends only on these parts."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "big")))


def apportion(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Split ``total`` into integers proportional to ``weights``, by largest remainder; ties go to the first."""
    whole = sum(weights)
    exact = [total * weight / whole for weight in weights]
    parts = [int(part) for part in exact]
    by_remainder = sorted(range(len(parts)), key=lambda i: (parts[i] - exact[i], i))
    for i in by_remainder[: total - sum(parts)]:
        parts[i] += 1
    return tuple(parts)


def micro_batches(rows: np.ndarray, micro_batch_size: int, ranks: int, rank: int) -> list[list[int]]:
    """Return one rank's part of a global batch: step m of rank r starts at ``(m * ranks + r) * micro_batch_size``.

    All ranks get the same number of micro-batches; a micro-batch without items consists of one filler.
    """
    per_step = micro_batch_size * ranks
    starts = range(rank * micro_batch_size, -(-len(rows) // per_step) * per_step, per_step)
    return [rows[start : start + micro_batch_size].tolist() or [FILLER] for start in starts]


def num_micro_batches(order: GlobalOrder, micro_batch_size: int, ranks: int, items: int = 0) -> int:
    """Return the number of micro-batches per rank in an epoch, or in its rest after ``items`` consumed items."""
    size, per_step = order.global_batch_size, micro_batch_size * ranks
    first = min(size - items % size, order.num_rows - items)
    whole, last = divmod(order.num_rows - items - first, size)
    return -(-first // per_step) + whole * -(-size // per_step) + -(-last // per_step)
