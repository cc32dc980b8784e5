"""Padding and labels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from lit_fsdp.data.cache import TokenisedRows
from lit_fsdp.data.collate import collate


def _rows() -> TokenisedRows:
    ids, mask = np.array([5, 9, 9, 7, 9], dtype=np.int32), np.array([0, 0, 1, 0, 1], dtype=np.uint8)
    return TokenisedRows(Path(), {}, ids, mask, np.array([0, 3, 5]))


def test_batch_written_out():
    """The pad id 9 is a token that is learnt, too: labels come from the mask alone."""
    batch = collate(_rows(), [0, 1, -1], pad_id=9)
    assert batch["input_ids"].tolist() == [[5, 9, 9], [7, 9, 9], [9, 9, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0], [1, 0, 0]]
    assert batch["labels"].tolist() == [[-100, -100, 9], [-100, 9, -100], [-100, -100, -100]]
    assert batch["row"].tolist() == [0, 1, -1]
    assert batch.pop("counts").tolist() == [3 + 2, 2, 9, 3 * 3 + 2 * 2]  # the filler is no sample
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


def test_as_long_as_the_longest_of_the_batch():
    assert collate(_rows(), [1], pad_id=0)["input_ids"].tolist() == [[7, 9]]
    assert collate(_rows(), [-1], pad_id=0)["input_ids"].tolist() == [[0]]
