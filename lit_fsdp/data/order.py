"""Which rows form global batch g: a pure function of (data, seed, epoch, g), never of the number of ranks.

A run's data position is therefore one integer, the number of global batches it has consumed.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

FILLER = -1
"""Row id of a row without supervision, for a rank that is short of rows."""


@dataclass(frozen=True)
class GlobalOrder:
    """The rows of every global batch of every epoch."""

    num_rows: int
    global_batch_size: int
    fingerprint: str
    """Of the tokenised data; other data, another order."""
    seed: int
    shuffle: bool = True

    @property
    def batches_per_epoch(self) -> int:
        """Global batches per epoch; the last one may be short."""
        return -(-self.num_rows // self.global_batch_size)

    def permutation(self, epoch: int) -> np.ndarray:
        """Row ids of an epoch in order, int64 of shape (num_rows,); file order without shuffling."""
        if not self.shuffle:
            return np.arange(self.num_rows)
        digest = hashlib.blake2b(f"{self.fingerprint}/{self.seed}/{epoch}".encode(), digest_size=16).digest()
        generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "big")))
        return generator.permutation(self.num_rows)

    def global_batch(self, permutation: np.ndarray, index: int) -> np.ndarray:
        """Row ids of one global batch of the epoch whose permutation is given; the last may be short."""
        return permutation[index * self.global_batch_size : (index + 1) * self.global_batch_size]


def micro_batches(rows: np.ndarray, micro_batch_size: int, ranks: int, rank: int) -> list[list[int]]:
    """One rank's micro-batches of a global batch, in the order of its accumulation steps.

    Step m of rank r takes ``micro_batch_size`` rows from ``(m * ranks + r) * micro_batch_size`` on. All ranks get the
    same number of micro-batches, ``ceil(len(rows) / (micro_batch_size * ranks))``; one without rows gets one filler.
    """
    per_step = micro_batch_size * ranks
    found = []
    for start in range(rank * micro_batch_size, -(-len(rows) // per_step) * per_step, per_step):
        part = rows[start : start + micro_batch_size].tolist()
        found.append(part or [FILLER])
    return found


def num_micro_batches(order: GlobalOrder, micro_batch_size: int, ranks: int) -> int:
    """Micro-batches per rank and epoch."""
    per_step = micro_batch_size * ranks
    whole, rest = divmod(order.num_rows, order.global_batch_size)
    return whole * -(-order.global_batch_size // per_step) + -(-rest // per_step)
