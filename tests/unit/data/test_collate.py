"""Padding, packing, labels, positions and counts, written out."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from lit_fsdp.data.cache import TokenisedRows
from lit_fsdp.data.collate import collate, collate_packs


def _rows(*rows: tuple[list[int], list[int]]) -> TokenisedRows:
    ids = np.concatenate([row[0] for row in rows]).astype(np.int32)
    mask = np.concatenate([row[1] for row in rows]).astype(np.uint8)
    return TokenisedRows(Path(), {}, ids, mask, np.cumsum([0, *(len(row[0]) for row in rows)]))


ROWS = _rows(([5, 9, 9], [0, 0, 1]), ([7, 9], [0, 1]), ([4], [1]))


def test_batch_written_out():
    """The pad id 9 is a token that is learnt, too: labels come from the mask alone."""
    batch = collate(ROWS, [0, 1, -1], pad_id=9)
    assert batch["input_ids"].tolist() == [[5, 9, 9], [7, 9, 9], [9, 9, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0], [1, 0, 0]]
    assert batch["labels"].tolist() == [[-100, -100, 9], [-100, 9, -100], [-100, -100, -100]]
    assert batch["row"].tolist() == [0, 1, -1]
    assert batch.pop("counts").tolist() == [3 + 2, 2, 9, 3 * 3 + 2 * 2]  # the filler is no sample
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


def test_as_long_as_the_longest_of_the_batch():
    assert collate(ROWS, [1], pad_id=0)["input_ids"].tolist() == [[7, 9]]
    assert collate(ROWS, [-1], pad_id=0)["input_ids"].tolist() == [[0]]


def test_packs_written_out():
    """Row 2 supervises its only token, which nothing predicts; the second pack is full, the third a filler."""
    batch = collate_packs(ROWS, [[1, 2], [0, 1, 2], []], length=6, pad_id=9)
    assert batch["input_ids"].tolist() == [[7, 9, 4, 9, 9, 9], [5, 9, 9, 7, 9, 4], [9] * 6]
    assert batch["labels"].tolist() == [[-100, 9] + [-100] * 4, [-100, -100, 9, -100, 9, -100], [-100] * 6]
    assert batch["position_ids"].tolist() == [[0, 1, 0, 0, 1, 2], [0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]]
    assert batch["cu_seq_lens"].tolist() == [0, 2, 3, 6, 9, 11, 12, 18]
    assert batch["longest"] == 6  # the filler; a power of two, but no more than a pack holds
    assert batch["counts"].tolist() == [3 + 6, 5, 18, (4 + 1) + (9 + 4 + 1)]
    assert "attention_mask" not in batch  # transformers would not look at the positions
    assert batch["cu_seq_lens"].dtype == torch.int32
    assert {batch[name].dtype for name in ("input_ids", "labels", "position_ids")} == {torch.int64}


def test_bounds_of_the_longest_sequence_are_few():
    rows = _rows(*(([1] * n, [1] * n) for n in range(1, 17)))
    bounds = {n: collate_packs(rows, [[n - 1, n - 1]], length=2 * n, pad_id=0)["longest"] for n in range(1, 17)}
    assert bounds == {1: 1, 2: 2, 3: 4, 4: 4, **dict.fromkeys(range(5, 9), 8), **dict.fromkeys(range(9, 17), 16)}


@pytest.mark.parametrize("seed", range(100))
def test_every_token_and_label_is_there_once(seed: int):
    draw = random.Random(seed)
    lengths = [draw.randint(1, 20) for _ in range(draw.randint(1, 12))]
    rows = _rows(*(([draw.randint(1, 99) for _ in range(n)], [draw.randint(0, 1) for _ in range(n)]) for n in lengths))
    packs: list[list[int]] = [[]]
    for row, length in enumerate(lengths):
        if sum(lengths[member] for member in packs[-1]) + length > 24:
            packs.append([])
        packs[-1].append(row)
    batch = collate_packs(rows, packs, length=24, pad_id=0)
    borders = batch["cu_seq_lens"].tolist()
    flat = {name: batch[name].flatten().tolist() for name in ("input_ids", "labels", "position_ids")}
    sequences = [(flat["input_ids"][a:b], flat["labels"][a:b]) for a, b in pairwise(borders)]
    samples = iter([sequence for sequence in sequences if set(sequence[0]) != {0}])
    for row in range(len(lengths)):
        ids, supervised = rows.row(row)
        found, labels = next(samples)
        assert found == ids.tolist()
        wanted = [i if s else -100 for i, s in zip(found, supervised.tolist(), strict=True)]
        assert labels == [-100, *wanted[1:]]
    assert next(samples, None) is None
    assert flat["position_ids"] == [i for a, b in pairwise(borders) for i in range(b - a)]
    assert batch["counts"].tolist() == [sum(lengths), len(lengths), 24 * len(packs), sum(n * n for n in lengths)]
