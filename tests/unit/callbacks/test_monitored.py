"""Monitored metrics that nothing logs are refused before the first step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from lit_fsdp import CausalLMModule, Checkpoint, PreferenceModule
from lit_fsdp.callbacks.monitored import check_monitors
from lit_fsdp.errors import ConfigError


@pytest.mark.parametrize(
    ("callback", "field"),
    [
        (Checkpoint(monitor="eval_loss"), "checkpoint.monitor"),
        (EarlyStopping("valid_loss"), "monitor of EarlyStopping in trainer.callbacks"),
        (EarlyStopping("val_rewards/margins"), "monitor of EarlyStopping in trainer.callbacks"),
        (EarlyStopping("val_loss/easy"), ""),
        (EarlyStopping("eval_loss", strict=False), ""),
        (Checkpoint(monitor="eval_loss", keep_best=0), ""),
        (Checkpoint(monitor="train_loss"), ""),
        (ModelCheckpoint(), ""),
    ],
)
def test_what_validation_does_not_log_is_refused(callback: Callback, field: str):
    trainer: Any = SimpleNamespace(callbacks=[callback])
    if not field:
        check_monitors(trainer, CausalLMModule(name="some/model"), True)
        return
    with pytest.raises(ConfigError, match="val_loss, val_perplexity, val_token_accuracy") as error:
        check_monitors(trainer, CausalLMModule(name="some/model"), True)
    assert error.value.field == field
    assert error.value.fix == "write val_loss"
    trainer.callbacks = [Checkpoint(monitor="val_bleu", mode="max")]
    with pytest.raises(ConfigError) as error:
        check_monitors(trainer, CausalLMModule(name="some/model"), True)
    assert error.value.fix == "write val_loss, and mode: min"


def test_early_stopping_needs_validation_rows():
    module = CausalLMModule(name="some/model")
    trainer: Any = SimpleNamespace(callbacks=[Checkpoint(), EarlyStopping("val_loss")])
    check_monitors(trainer, module, True)
    with pytest.raises(ConfigError, match=r"EarlyStopping in trainer\.callbacks: got val_loss without validation rows"):
        check_monitors(trainer, module, False)
    trainer.callbacks[1] = EarlyStopping("train_loss")
    check_monitors(trainer, module, False)


def test_modules_and_callbacks_of_others_may_log_more():
    class Theirs(Callback):
        monitor = "eval_mine"

    class Mine(CausalLMModule): ...

    for callbacks, module in (
        ([Theirs()], CausalLMModule(name="some/model")),
        ([Checkpoint(monitor="eval_mine")], Mine(name="some/model")),
        ([Checkpoint(monitor="val_rewards/margins", mode="max")], PreferenceModule(name="some/model")),
    ):
        trainer: Any = SimpleNamespace(callbacks=callbacks)
        check_monitors(trainer, module, True)  # raises nothing
        assert trainer.callbacks == callbacks
