"""Padding, packing, labels, positions and counts, written out; and loaders that keep the order."""

from __future__ import annotations

import numpy as np
import torch

from lit_fsdp.data.batches import Sample, collate, collate_packs


def _sample(ids: list[int], supervised: list[int]) -> Sample:
    return np.array(ids, np.int32), np.array(supervised, np.uint8)


A, B, C = _sample([5, 9, 9], [0, 0, 1]), _sample([7, 9], [0, 1]), _sample([4], [1])


def test_batch_written_out():
    """The pad id 9 is a token that is supervised, too: labels come from the mask alone."""
    batch = collate([A, B, None], pad_id=9)
    assert batch["input_ids"].tolist() == [[5, 9, 9], [7, 9, 9], [9, 9, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0], [1, 0, 0]]
    assert batch["labels"].tolist() == [[-100, -100, 9], [-100, 9, -100], [-100, -100, -100]]
    assert batch.pop("counts").tolist() == [3 + 2, 2, 9, 3 * 3 + 2 * 2]  # the filler is no sample
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
    assert [collate([one], pad_id=0)["input_ids"].tolist() for one in (B, None)] == [[[7, 9]], [[0]]]


def test_packs_written_out():
    """C supervises its only token, which nothing predicts; the second pack is full, the third a filler."""
    batch = collate_packs([[B, C], [A, B, C], []], length=6, pad_id=9)
    assert batch["input_ids"].tolist() == [[7, 9, 4, 9, 9, 9], [5, 9, 9, 7, 9, 4], [9] * 6]
    assert batch["labels"].tolist() == [[-100, 9] + [-100] * 4, [-100, -100, 9, -100, 9, -100], [-100] * 6]
    assert batch["position_ids"].tolist() == [[0, 1, 0, 0, 1, 2], [0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]]
    assert batch["cu_seq_lens"].tolist() == [0, 2, 3, 6, 9, 11, 12, 18]
    assert batch["longest"] == 6  # the filler; a power of two, but no more than a pack holds
    assert batch["counts"].tolist() == [3 + 6, 5, 18, (4 + 1) + (9 + 4 + 1)]
    assert "attention_mask" not in batch  # transformers would not look at the positions
    assert batch["cu_seq_lens"].dtype == torch.int32
    assert {batch[name].dtype for name in ("input_ids", "labels", "position_ids")} == {torch.int64}
