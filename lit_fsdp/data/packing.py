"""Which samples share a sequence: best-fit-decreasing, exact, in time that grows with the samples alone.

Samples are placed from the longest to the shortest, each into the pack with the least room that still takes it. Packs
are kept by the room they have left, and samples of one length are placed together: as the fullest pack that takes one
is still the fullest after it has taken it, a pack takes as many of a length as fit before the next one is looked at.

Source: Johnson, Near-optimal bin packing algorithms, 1973; for packing of training samples arXiv:2404.10830.
"""

from __future__ import annotations

import numpy as np

from lit_fsdp.errors import DataError


def plan_packs(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Packs of samples, none longer than ``capacity`` tokens, by best-fit-decreasing.

    Args:
        lengths: Tokens per sample, each from 1 to ``capacity``; shape (N,).
        capacity: Tokens per pack.

    Returns:
        ``members`` (int64, shape (N,)): every sample once, pack after pack, ascending in each pack. ``offsets``
        (int64, shape (packs + 1,)): where each pack begins in it. Packs are in the order of their first samples.

    Raises:
        DataError: A length is below 1 or above ``capacity``.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if not len(lengths):
        return np.zeros(0, dtype=np.int64), np.zeros(1, dtype=np.int64)
    if lengths.min() < 1 or lengths.max() > capacity:
        wrong = lengths.min() if lengths.min() < 1 else lengths.max()
        raise DataError(f"a sample of {wrong} tokens cannot be packed\n  allowed: 1 to {capacity} tokens")
    found = np.empty(len(lengths), dtype=np.int64)
    found[np.argsort(-lengths, kind="stable")] = _best_fit(np.bincount(lengths), capacity)
    _, first, pack = np.unique(found, return_index=True, return_inverse=True)
    place = np.empty(len(first), dtype=np.int64)
    place[np.argsort(first)] = np.arange(len(first))
    pack = place[pack]
    return np.argsort(pack, kind="stable"), np.concatenate([[0], np.bincount(pack).cumsum()])


def _best_fit(counts: np.ndarray, capacity: int) -> np.ndarray:
    """The pack of each sample, the longest samples first; ``counts``: samples per length."""
    by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 1 << capacity  # bit r: some pack has room r; a new pack is always at hand
    placed: list[int] = []
    num_packs = 0
    for length in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[length])
        while left:
            fitting = rooms >> length
            room = length + (fitting & -fitting).bit_length() - 1
            packs, each = by_room[room], room // length
            if room == capacity and not packs:
                new = -(-left // each)
                packs.extend(range(num_packs + new - 1, num_packs - 1, -1))
                num_packs += new
            full = min(len(packs), left // each)
            each = each if full else left  # the last one takes fewer than it could
            full = full or 1
            taken = packs[-full:]
            del packs[-full:]
            placed += taken * each
            left -= full * each
            by_room[room - each * length] += taken
            rooms |= 1 << (room - each * length)
            if not packs and room != capacity:
                rooms ^= 1 << room
    return np.array(placed, dtype=np.int64)
