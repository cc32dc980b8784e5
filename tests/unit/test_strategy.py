"""The factory: one vocabulary, two of Lightning's strategies, and no precision beside it."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy

import lit_fsdp
from lit_fsdp.config.strategy import StrategyConfig
from lit_fsdp.errors import ConfigError
from lit_fsdp.parallel.base import EngineStrategy
from lit_fsdp.strategy import fsdp_strategy


def test_a_strategy_of_lightnings():
    for engine, base in (("fsdp2", ModelParallelStrategy), ("fsdp1", FSDPStrategy), ("ddp", DDPStrategy)):
        strategy: Any = lit_fsdp.fsdp_strategy(engine=engine)
        assert isinstance(strategy, base)
        assert isinstance(strategy, EngineStrategy)
        assert strategy.config == StrategyConfig(engine=engine)


def test_wrong_values_are_refused():
    cases: dict[str, Any] = {"engine": "ddp2", "backward_prefetch": "post", "precision": "bf16"}
    for field, value in cases.items():
        with pytest.raises(ConfigError) as caught:
            fsdp_strategy(**{field: value})
        assert caught.value.field == f"fsdp_strategy.{field}"


@pytest.mark.filterwarnings("ignore:.*GPU available but not used", "ignore:.*bf16.*")
def test_precision_is_the_strategys_alone():
    options: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "logger": False}
    cases: list[tuple[Any, Any]] = [("fsdp2", "bf16-mixed"), ("fsdp1", "16-true")]
    for engine, precision in cases:
        with pytest.raises(ConfigError, match=r"Trainer\(precision=...\): got " + precision):
            Trainer(strategy=fsdp_strategy(engine=engine), precision=precision, **options)
        trainer = Trainer(strategy=fsdp_strategy(engine=engine), precision=32, **options)
        assert trainer.precision == "32-true"  # Lightning's default
