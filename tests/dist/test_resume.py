"""What a resumed run takes from its checkpoint, be it that of the best validation, and what from the recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from lit_fsdp.checkpoint.manifest import read_manifest
from lit_fsdp.checkpoint.run_folder import checkpoints, choose
from lit_fsdp.config.model import OptimConfig, schedule_factor
from tests.dist.forks import on_ranks


@pytest.mark.parametrize(
    ("engine", "accumulate", "first_step"), [("fsdp2", 1, 4), ("fsdp1", 3, 1)]
)  # (3, 1): inside the second accumulation
def test_from_the_best_validation(
    dropout_model: Path, tmp_path: Path, engine: str, accumulate: int, first_step: int
) -> None:
    """A validation that beats all before is saved with its metrics, and a run goes on from there bit-equal."""
    job = {"folder": dropout_model, "strategy": {"engine": engine}, "val_check_interval": 4}
    job |= {"accumulate_grad_batches": accumulate}
    (whole, _) = on_ranks("train", 2, run=tmp_path / "whole", **job)
    found = checkpoints(tmp_path / "whole")
    assert next(entry.step for entry in found if "val_loss" in entry.metrics) == first_step
    losses = [entry.metrics["val_loss"] for entry in found if "val_loss" in entry.metrics]
    assert losses == sorted(losses, reverse=True)  # only what was better is saved
    top = choose("best", tmp_path / "whole", "val_loss", "min").path
    assert read_manifest(top).metrics["val_loss"] == losses[-1]
    (after, _) = on_ranks("train", 2, run=tmp_path / "cut", ckpt_path=found[0].path, **job)
    assert after["losses"] == whole["losses"][first_step:]
    assert after["digest"] == whole["digest"]


@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1"])
def test_what_the_recipe_says_holds_from_the_first_step(tiny_model: Path, tmp_path: Path, engine: str) -> None:
    before = {"lr": 1e-3, "weight_decay": 0.1, "schedule": "cosine"}
    after = {"lr": 2e-3, "weight_decay": 0.3, "beta1": 0.8, "beta2": 0.7, "eps": 1e-6, "schedule": "linear"}
    job = {"folder": tiny_model, "run": tmp_path, "strategy": {"engine": engine, "precision": "fp32"}}
    on_ranks("train", 2, optim=before, steps=2, **job)  # at its end the learning rate is 0
    steps = on_ranks("train", 2, optim=after, steps=4, ckpt_path="last", **job)[0]["groups"]
    optim = OptimConfig(**after)
    assert [{group["lr"] for group in step} for step in steps] == [
        {optim.lr * schedule_factor(optim, step, 4)} for step in (2, 3)
    ]
    for step in steps:
        assert [group["weight_decay"] for group in step] == [0.3, 0.0]
        assert {(*group["betas"], group["eps"], group["fused"]) for group in step} == {(0.8, 0.7, 1e-6, True)}
