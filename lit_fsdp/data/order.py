"""Items of global batch g: a pure function of (data, seed, epoch, g), never of the number of ranks.

An item is a row, or a pack of rows. The data position of a run is one integer: the number of consumed global batches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

FILLER = -1
"""Id of an unsupervised item, for a rank that is short of items."""


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

    def global_batch(self, permutation: np.ndarray, index: int) -> np.ndarray:
        """Return the item ids of one global batch of the permuted epoch; the last may be short."""
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


def num_micro_batches(order: GlobalOrder, micro_batch_size: int, ranks: int) -> int:
    """Return the number of micro-batches per rank and epoch."""
    per_step = micro_batch_size * ranks
    whole, rest = divmod(order.num_rows, order.global_batch_size)
    return whole * -(-order.global_batch_size // per_step) + -(-rest // per_step)
