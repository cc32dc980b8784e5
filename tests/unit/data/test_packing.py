"""Best-fit-decreasing: the same packs as placing sample by sample, every sample once, and full on real lengths."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from lit_fsdp.data.packing import plan_packs
from lit_fsdp.errors import DataError

LENGTHS = Path(__file__).parent / "lengths"


def _rooms(lengths: np.ndarray, capacity: int) -> list[int]:
    """Room left in each pack, by trying every pack for every sample."""
    rooms: list[int] = []
    for length in sorted(lengths.tolist(), reverse=True):
        best = min((room for room in rooms if room >= length), default=None)
        if best is not None:
            rooms.remove(best)
        rooms.append((capacity if best is None else best) - length)
    return sorted(rooms)


def _fills(lengths: np.ndarray, members: np.ndarray, offsets: np.ndarray) -> list[int]:
    return [int(lengths[members[a:b]].sum()) for a, b in pairwise(offsets.tolist())]


@pytest.mark.parametrize("seed", range(4))
def test_best_fit_decreasing_as_done_by_hand(seed: int):
    draw = np.random.default_rng(seed)
    for _ in range(100):
        capacity = int(draw.integers(1, 50))
        lengths = draw.integers(1, capacity + 1, int(draw.integers(1, 60)))
        members, offsets = plan_packs(lengths, capacity)
        fills = _fills(lengths, members, offsets)
        assert sorted(capacity - fill for fill in fills) == _rooms(lengths, capacity)
        assert sorted(members.tolist()) == list(range(len(lengths)))
        firsts = [int(members[start]) for start in offsets[:-1]]
        assert firsts == sorted(firsts)
        assert all((np.diff(members[a:b]) > 0).all() for a, b in pairwise(offsets.tolist()))


@pytest.mark.parametrize(
    ("lengths", "packs"),
    [
        ([], []),
        ([7], [[0]]),
        ([10, 10], [[0], [1]]),
        ([3, 3, 3, 3], [[0, 1, 2], [3]]),
        ([6, 2, 5, 4, 4, 3], [[0, 3], [1, 5], [2, 4]]),
    ],
)
def test_small_plans(lengths: list[int], packs: list[list[int]]):
    members, offsets = plan_packs(np.array(lengths, dtype=np.int64), 10)
    assert [members[a:b].tolist() for a, b in pairwise(offsets.tolist())] == packs
    assert (members.dtype, offsets.dtype) == (np.int64, np.int64)


@pytest.mark.parametrize("wrong", [0, -1, 11])
def test_a_length_that_no_pack_can_take(wrong: int):
    with pytest.raises(DataError, match=f"a sample of {wrong} tokens cannot be packed\n  allowed: 1 to 10 tokens"):
        plan_packs(np.array([3, wrong]), 10)


@pytest.mark.parametrize("name", ["jargon", "dates", "prose"])
def test_real_samples_fill_their_packs(name: str):
    """Lengths of real rows under the SmolLM2 tokenizer; a file of numbers, as the rows are other people's."""
    lengths = np.array((LENGTHS / f"{name}.txt").read_text().partition("\n")[2].split(), dtype=np.int64)
    members, offsets = plan_packs(lengths, 512)
    assert len(members) == len(lengths)
    assert lengths.sum() / (512 * (len(offsets) - 1)) >= 0.98


def test_a_hundred_thousand_samples_take_no_time():
    lengths = np.random.default_rng(0).integers(1, 8193, 100_000)
    start = time.process_time()
    plan_packs(lengths, 8192)
    assert time.process_time() - start < 2.0  # 0.05 s alone
