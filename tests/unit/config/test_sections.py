"""Dataclasses of a recipe by themselves: what they hold, what follows from it, what they refuse."""

from __future__ import annotations

import pytest

from lit_fsdp.config.data import DataConfig, accumulation_steps
from lit_fsdp.config.model import LossConfig, OptimConfig, schedule_factor
from lit_fsdp.config.strategy import StrategyConfig, mesh_shape
from lit_fsdp.errors import ConfigError


def test_degrees_that_do_not_fit():
    hybrid = {"sharding": "hybrid_shard"}
    for options, ranks, field, given in (
        ({"shard_degree": 4}, 8, "shard_degree", "4 with sharding full_shard on 8 ranks"),
        ({**hybrid, "shard_degree": 4, "replicate_degree": 4}, 8, "shard_degree", "4 with replicate_degree 4 on 8"),
        ({**hybrid, "replicate_degree": 3}, 8, "shard_degree", "2 with replicate_degree 3 on 8 ranks"),
        ({"sharding": "no_shard", "replicate_degree": 4}, 8, "replicate_degree", "4 with"),
        ({"engine": "single"}, 2, "engine", "single on 2 ranks"),
    ):
        with pytest.raises(ConfigError) as caught:
            mesh_shape(StrategyConfig(**options), 1, ranks, "s")
        assert caught.value.field == f"s.{field}"
        assert str(caught.value.given).startswith(given)
    with pytest.raises(ConfigError, match="replicate_degree 3 on 8 ranks"):  # one copy per node
        mesh_shape(StrategyConfig(**hybrid), 3, 8)


def test_accumulation_follows_from_the_batches():
    for batch, micro, ranks, steps in ((16, 4, 2, 2), (8, 1, 8, 1), (6, 3, 1, 2)):
        config = DataConfig(global_batch_size=batch, micro_batch_size=micro)
        assert accumulation_steps(config, ranks) == steps == accumulation_steps(config, ranks, steps)
    for batch, nearest in ((1, 6), (7, 6), (10, 12), (20, 18)):
        with pytest.raises(ConfigError, match=f"set global_batch_size: {nearest},"):
            accumulation_steps(DataConfig(global_batch_size=batch, micro_batch_size=3), 2)


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
    for options in ({"decay_ratio": -0.1}, {"decay_ratio": 2.5}, {"decay_ratio": 0.5, "schedule": "cosine"}):
        with pytest.raises(ConfigError) as caught:
            OptimConfig(**{"schedule": "wsd", **options})
        assert caught.value.field == "decay_ratio"


# -- loss


def test_chunks_are_of_the_chunked_loss_only():
    with pytest.raises(ConfigError) as caught:
        LossConfig(backend="plain", chunk_tokens=64)
    assert caught.value.field == "chunk_tokens"
