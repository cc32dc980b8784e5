"""The global order, the same on any number of ranks; padding, packing, labels and positions, written out."""

from __future__ import annotations

import random

import numpy as np

from lit_fsdp.data.batches import collate, collate_packs
from lit_fsdp.data.order import FILLER, GlobalOrder, apportion, micro_batches, num_micro_batches


def test_any_sizes():
    """Every row exactly once per epoch; all ranks take as many steps; the loader's length is that number."""
    for seed in range(40):
        draw = random.Random(seed)
        micro, ranks, accumulate = draw.randint(1, 5), draw.randint(1, 9), draw.randint(1, 4)
        order = GlobalOrder(draw.randint(1, 400), micro * ranks * accumulate, f"data {seed}", seed, bool(seed % 2))
        permutation = order.permutation(draw.randint(0, 5))
        batches = [order.global_batch(permutation, g) for g in range(0, order.num_rows, order.global_batch_size)]
        epoch = [[micro_batches(rows, micro, ranks, rank) for rank in range(ranks)] for rows in batches]
        taken = [row for batch in epoch for rank in batch for step in rank for row in step if row != FILLER]
        assert sorted(taken) == list(range(order.num_rows))
        for batch in epoch:
            assert len({len(steps) for steps in batch}) == 1
            assert all(1 <= len(step) <= micro for steps in batch for step in steps)
            assert all(step == [FILLER] for steps in batch for step in steps if FILLER in step)
        assert num_micro_batches(order, micro, ranks) == sum(len(batch[0]) for batch in epoch)
        whole = [batch for batch in epoch[:-1] if order.num_rows >= order.global_batch_size]
        assert all(len(steps) == accumulate for batch in whole for steps in batch)


def _mix(shuffle: bool = True, **options: object) -> GlobalOrder:
    given = {"num_rows": 20, "global_batch_size": 4, "fingerprint": "data", "seed": 1, "shuffle": shuffle}
    return GlobalOrder(**{**given, "groups": (4, 16), "weights": (1.0, 1.0), **options})


def test_depends_on_data_seed_and_epoch_alone():
    first = GlobalOrder(50, 8, "data", 1).permutation(0).tolist()
    assert GlobalOrder(50, 16, "data", 1).permutation(0).tolist() == first
    others = [GlobalOrder(50, 8, "data", 1).permutation(1), GlobalOrder(50, 8, "data", 2).permutation(0)]
    others += [GlobalOrder(50, 8, "other", 1).permutation(0)]
    assert all(other.tolist() != first for other in others)
    mixes = [_mix(), _mix(seed=2), _mix(fingerprint="other"), _mix(weights=(1.0, 3.0)), _mix(shuffle=False)]
    assert len({tuple(mix.permutation(3)) for mix in mixes}) == len(mixes)
    assert _mix(global_batch_size=8).permutation(3).tolist() == _mix().permutation(3).tolist()
    mixed = _mix(groups=(10, 10)).permutation(0)
    assert mixed[mixed < 10].tolist() != (mixed[mixed >= 10] - 10).tolist()  # each source has an order of its own
    assert GlobalOrder(50, 8, "data", 1, shuffle=False).permutation(7).tolist() == list(range(50))
    # four items of the first source come round and round, one after each of the second
    assert _mix(shuffle=False).permutation(0).tolist() == [x for i in range(10) for x in (i % 4, 4 + i)]
    # a run that was begun with an earlier version resumes in the same order
    assert GlobalOrder(12, 4, "data", 1234).permutation(2).tolist() == [11, 8, 9, 4, 3, 10, 7, 1, 2, 6, 0, 5]
    mixed = _mix(groups=(4, 5, 11), weights=(1.0, 2.0, 1.0)).permutation(3).tolist()
    assert mixed == [9, 7, 6, 8, 17, 0, 2, 1, 18, 13, 5, 4, 3, 8, 5, 19, 4, 7, 6, 0]


def test_a_mix_gives_every_source_its_share():
    """As many items per epoch as without weights; over epochs each source goes on where it stopped, pass by pass."""
    for seed in range(30):
        draw = random.Random(seed)
        groups = tuple(draw.randint(1, 40) for _ in range(draw.randint(2, 4)))
        weights = tuple(draw.choice([0.5, 1.0, 2.0, 3.5]) for _ in groups)
        total = sum(groups)
        if any(total * weight < sum(weights) for weight in weights):
            continue
        order = GlobalOrder(total, 8, "data", seed, bool(seed % 2), groups, weights)
        shares = apportion(total, weights)
        assert sum(shares) == total
        assert all(abs(s - total * w / sum(weights)) < 1 for s, w in zip(shares, weights, strict=True))
        epochs = [order.permutation(epoch) for epoch in range(5)]
        borders = np.cumsum([0, *groups])
        for group, size in enumerate(groups):
            first = borders[group]
            taken = [epoch[(epoch >= first) & (epoch < first + size)] for epoch in epochs]
            assert [len(part) for part in taken] == [shares[group]] * 5
            stream = np.concatenate(taken)
            for start in range(0, len(stream) - size + 1, size):  # every whole pass has each item once
                assert sorted(stream[start : start + size]) == list(range(first, first + size))


def test_batches_written_out():
    """The pad id 9 is a token that is supervised, too: labels come from the mask alone. Nothing predicts C's token."""
    samples = [([5, 9, 9], [0, 0, 1]), ([7, 9], [0, 1]), ([4], [1])]
    a, b, c = ((np.array(ids, np.int32), np.array(mask, np.uint8)) for ids, mask in samples)
    padded = collate([a, b, None], pad_id=9)
    assert padded["input_ids"].tolist() == [[5, 9, 9], [7, 9, 9], [9, 9, 9]]
    assert padded["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0], [1, 0, 0]]
    assert padded["labels"].tolist() == [[-100, -100, 9], [-100, 9, -100], [-100, -100, -100]]
    assert padded["counts"].tolist() == [3 + 2, 2, 9, 3 * 3 + 2 * 2]  # the filler is no sample
    packs = collate_packs([[b, c], [a, b, c], []], length=6, pad_id=9)
    assert packs["input_ids"].tolist() == [[7, 9, 4, 9, 9, 9], [5, 9, 9, 7, 9, 4], [9] * 6]
    assert packs["labels"].tolist() == [[-100, 9] + [-100] * 4, [-100, -100, 9, -100, 9, -100], [-100] * 6]
    assert packs["position_ids"].tolist() == [[0, 1, 0, 0, 1, 2], [0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]]
    assert packs["cu_seq_lens"].tolist() == [0, 2, 3, 6, 9, 11, 12, 18]
    assert packs["counts"].tolist() == [3 + 6, 5, 18, (4 + 1) + (9 + 4 + 1)]
