"""The factory: what it refuses, and no precision beside it."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch import Trainer

from lit_fsdp.errors import ConfigError
from lit_fsdp.strategy import fsdp_strategy


def test_wrong_values_are_refused():
    cases: dict[str, Any] = {"engine": "ddp2", "backward_prefetch": "post", "precision": "bf16"}
    for field, value in cases.items():
        with pytest.raises(ConfigError) as caught:
            fsdp_strategy(**{field: value})
        assert caught.value.field == f"fsdp_strategy.{field}"


@pytest.mark.filterwarnings("ignore:.*GPU available but not used", "ignore:.*bf16.*")
def test_precision_is_the_strategys_alone():
    options: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "logger": False}
    for engine, precision in (("fsdp2", "bf16-mixed"), ("fsdp1", "16-true")):
        with pytest.raises(ConfigError, match=r"Trainer\(precision=...\): got " + precision):
            Trainer(strategy=fsdp_strategy(engine=engine), precision=precision, **options)
        trainer = Trainer(strategy=fsdp_strategy(engine=engine), precision=32, **options)
        assert trainer.precision == "32-true"  # Lightning's default
