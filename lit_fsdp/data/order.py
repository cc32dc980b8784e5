"""Which items form global batch g: a pure function of (data, seed, epoch, g), never of the number of ranks.

An item is a row, or a pack of rows. A run's data position is one integer, the number of global batches it has consumed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

FILLER = -1
"""Id of an item without supervision, for a rank that is short of items."""


@dataclass(frozen=True)
class GlobalOrder:
    """The items of every global batch of every epoch: each once, or with ``weights`` a share of each source.

    A share is whole passes over the source, each in an order of its own, then a part of one, which the next epoch goes
    on with.
    """

    num_rows: int
    """Items: rows or packs."""
    global_batch_size: int
    fingerprint: str
    seed: int
    shuffle: bool = True
    groups: tuple[int, ...] = ()
    """Items of each source, which follow each other; one number without weights."""
    weights: tuple[float, ...] = ()
    """One for each group, or none."""

    @property
    def batches_per_epoch(self) -> int:
        """Global batches per epoch; the last one may be short."""
        return -(-self.num_rows // self.global_batch_size)

    def record(self) -> dict[str, Any]:
        """What decides the order, as JSON can hold it."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    def permutation(self, epoch: int) -> np.ndarray:
        """Item ids of an epoch in order, int64 (num_rows,); without shuffling in file order, sources spread evenly."""
        if self.weights:
            return self._mix(epoch)
        return self._generator(epoch).permutation(self.num_rows) if self.shuffle else np.arange(self.num_rows)

    def global_batch(self, permutation: np.ndarray, index: int) -> np.ndarray:
        """Item ids of one global batch of the epoch whose permutation is given; the last may be short."""
        return permutation[index * self.global_batch_size : (index + 1) * self.global_batch_size]

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
        order[np.argsort(source_of, kind="stable")] = np.concatenate(taken)  # however many sources there are
        return order

    def _taken(self, group: int, size: int, start: int, count: int) -> np.ndarray:
        """``count`` items of one source from the ``start``-th on, counted over pass after pass through it."""
        first, last = start // size, (start + count - 1) // size
        orders = [
            self._generator(number, f"source {group}").permutation(size) if self.shuffle else np.arange(size)
            for number in range(first, last + 1)
        ]
        return np.concatenate(orders)[start - first * size :][:count]

    def _generator(self, *parts: Any) -> np.random.Generator:
        return generator_of(self.fingerprint, self.seed, *parts)


def generator_of(*parts: Any) -> np.random.Generator:
    """Random numbers that depend on these parts alone."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "big")))


def apportion(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """``total`` in whole parts in proportion to ``weights``, by largest remainder, the first of equal ones first."""
    whole = sum(weights)
    exact = [total * weight / whole for weight in weights]
    parts = [int(part) for part in exact]
    by_remainder = sorted(range(len(parts)), key=lambda i: (parts[i] - exact[i], i))
    for i in by_remainder[: total - sum(parts)]:
        parts[i] += 1
    return tuple(parts)


def micro_batches(rows: np.ndarray, micro_batch_size: int, ranks: int, rank: int) -> list[list[int]]:
    """One rank's part of a global batch: step m of rank r begins at ``(m * ranks + r) * micro_batch_size``.

    All ranks get the same number of micro-batches; one without any items is one filler.
    """
    per_step = micro_batch_size * ranks
    starts = range(rank * micro_batch_size, -(-len(rows) // per_step) * per_step, per_step)
    return [rows[start : start + micro_batch_size].tolist() or [FILLER] for start in starts]


def num_micro_batches(order: GlobalOrder, micro_batch_size: int, ranks: int) -> int:
    """Micro-batches per rank and epoch."""
    per_step = micro_batch_size * ranks
    whole, rest = divmod(order.num_rows, order.global_batch_size)
    return whole * -(-order.global_batch_size // per_step) + -(-rest // per_step)
