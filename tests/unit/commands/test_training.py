"""``fit`` before it has a recipe."""

from __future__ import annotations

from typing import Any

import pytest

from lit_fsdp.commands import training
from lit_fsdp.errors import ConfigError
from lit_fsdp.signals import SignalFlags


def test_under_srun_signals_are_heard_before_the_recipe_is_read(monkeypatch: pytest.MonkeyPatch):
    """A task that dies of one makes srun end the others; elsewhere the defaults hold until the recipe is fine."""
    heard: list[Any] = []
    monkeypatch.setattr(SignalFlags, "install", lambda flags: heard.append(flags))
    for under_srun in (False, True):
        monkeypatch.delenv("SLURM_PROCID", raising=False)
        if under_srun:
            monkeypatch.setenv("SLURM_PROCID", "1")
        with pytest.raises(ConfigError):
            training.run_training_verb("fit", ["--config", "/no/such/recipe.yaml"])
        assert len(heard) == under_srun
