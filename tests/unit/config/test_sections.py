"""Dataclasses of a recipe by themselves: what they hold, what follows from it, what they refuse."""

from __future__ import annotations

import pytest

from lit_fsdp.config.data import DataConfig, accumulation_steps
from lit_fsdp.config.model import OptimConfig, schedule_factor


def test_accumulation_follows_from_the_batches():
    for batch, micro, ranks, steps in ((16, 4, 2, 2), (8, 1, 8, 1), (6, 3, 1, 2)):
        config = DataConfig(global_batch_size=batch, micro_batch_size=micro)
        assert accumulation_steps(config, ranks) == steps == accumulation_steps(config, ranks, steps)


def test_wsd_warms_up_stays_and_falls_at_the_end():
    steps = (1, 4, 79, 80, 90, 100, 120)
    for decay, factors in (
        (0.2, [0.5, 1.0, 1.0, 1.0, 0.55, 0.1, 0.1]),
        (0.1, [0.5, 1.0, 1.0, 1.0, 1.0, 0.1, 0.1]),  # the last tenth: step 95 is half-way
        (0.96, [0.5, 1.0, 1 - 0.9 * 75 / 96, 1 - 0.9 * 76 / 96, 1 - 0.9 * 86 / 96, 0.1, 0.1]),
    ):
        optim = OptimConfig(schedule="wsd", warmup_steps=4, min_lr_ratio=0.1, decay_ratio=decay)
        assert [schedule_factor(optim, step, 100) for step in steps] == pytest.approx(factors)
    assert schedule_factor(OptimConfig(schedule="wsd"), 95, 100) == pytest.approx(0.5)
