"""A resumed run is the run that was interrupted: the next losses, learning rates and states are bit-equal."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from lit_fsdp.checkpoint.manifest import read_manifest
from lit_fsdp.checkpoint.run_folder import checkpoints, choose
from lit_fsdp.config.model import OptimConfig, schedule_factor
from tests.dist.workers import RankError, Workers


@pytest.mark.parametrize(
    ("strategy", "accumulate"),
    [
        # every other one by default, and in those every value once
        ({"engine": "fsdp2"}, 1),
        ({"engine": "fsdp1"}, 3),
        ({"engine": "fsdp1", "state_dict": "full", "sharding": "shard_grad_op"}, 2),
        ({"engine": "fsdp2", "state_dict": "full"}, 3),
        ({"engine": "fsdp2", "precision": "low_precision", "sharding": "no_shard"}, 1),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else f"accumulate{value}",
)
def test_the_next_twenty_losses_are_bit_equal(
    workers: Workers, dropout_model: Path, tmp_path: Path, strategy: dict, accumulate: int
) -> None:
    job = {"folder": str(dropout_model), "strategy": strategy, "accumulate_grad_batches": accumulate}
    whole = workers.run("train_with_checkpoints", 2, run=str(tmp_path / "whole"), steps=25, **job)
    workers.run("train_with_checkpoints", 2, run=str(tmp_path / "cut"), steps=5, **job)  # the middle of an epoch of ten
    resumed = workers.run("train_with_checkpoints", 2, run=str(tmp_path / "cut"), steps=25, ckpt_path="last", **job)
    for before, after in zip(whole, resumed, strict=True):
        assert len(after["losses"]) == 20
        assert after["losses"] == before["losses"][5:]
        assert after["lr"] == before["lr"]
        assert after["digest"] == before["digest"]
        stored = {"low_precision": "bf16"}.get(strategy.get("precision", "mixed"), "fp32")
        assert set(after["realized"]["parameters after resume"]) == {stored}
        assert set(after["realized"]["optimizer state after resume"]) == {stored}
    steps = sorted(folder.name for folder in (tmp_path / "cut" / "checkpoints").iterdir())
    assert steps == [f"step-{step:08d}" for step in (5, 10, 15, 20, 25)]


def test_at_the_end_of_an_epoch(workers: Workers, dropout_model: Path, tmp_path: Path) -> None:
    job = {"folder": str(dropout_model), "strategy": {"engine": "fsdp2"}}
    (whole, _) = workers.run("train_with_checkpoints", 2, run=str(tmp_path / "whole"), steps=15, **job)
    workers.run("train_with_checkpoints", 2, run=str(tmp_path / "cut"), steps=10, **job)
    (after, _) = workers.run("train_with_checkpoints", 2, run=str(tmp_path / "cut"), steps=15, ckpt_path="last", **job)
    assert after["losses"] == whole["losses"][10:]
    assert after["digest"] == whole["digest"]


@pytest.mark.parametrize(("accumulate", "first_step"), [(1, 4), (3, 1)])  # (3, 1): inside the second accumulation
def test_from_the_best_validation(
    workers: Workers, dropout_model: Path, tmp_path: Path, accumulate: int, first_step: int
) -> None:
    """A validation that beats all before is saved with its metrics, and a run goes on from there bit-equal."""
    job = {"folder": str(dropout_model), "strategy": {"engine": "fsdp2"}, "steps": 10, "every": None}
    job |= {"val_check_interval": 4, "accumulate_grad_batches": accumulate}
    (whole, _) = workers.run("train_with_checkpoints", 2, run=str(tmp_path / "whole"), **job)
    found = checkpoints(tmp_path / "whole")
    assert next(entry.step for entry in found if "val_loss" in entry.metrics) == first_step
    losses = [entry.metrics["val_loss"] for entry in found if "val_loss" in entry.metrics]
    assert losses == sorted(losses, reverse=True)  # only what was better is saved
    top = choose("best", tmp_path / "whole", "val_loss", "min").path
    assert read_manifest(top).metrics["val_loss"] == losses[-1]
    first = found[0].path
    (after, _) = workers.run("train_with_checkpoints", 2, run=str(tmp_path / "cut"), ckpt_path=str(first), **job)
    assert after["losses"] == whole["losses"][first_step:]
    assert after["digest"] == whole["digest"]


@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1", "ddp", "single"])
def test_what_the_recipe_says_holds_from_the_first_step(
    workers: Workers, tiny_model: Path, tmp_path: Path, engine: str
) -> None:
    before = {"lr": 1e-3, "weight_decay": 0.1}
    after = {"lr": 2e-3, "weight_decay": 0.3, "beta1": 0.8, "beta2": 0.7, "eps": 1e-6, "schedule": "linear"}
    job = {"folder": str(tiny_model), "run": str(tmp_path), "strategy": {"engine": engine, "precision": "fp32"}}
    ranks = 1 if engine == "single" else 2
    workers.run("train_and_tell", ranks, optim=before, steps=2, **job)  # at its end the learning rate is 0
    steps = workers.run("train_and_tell", ranks, optim=after, steps=4, ckpt_path="last", **job)[0]
    optim = OptimConfig(**after)
    assert [{group["lr"] for group in step} for step in steps] == [
        {optim.lr * schedule_factor(optim, step, 4)} for step in (2, 3)
    ]
    for step in steps:
        assert [group["weight_decay"] for group in step] == [0.3, 0.0]
        assert {(*group["betas"], group["eps"], group["fused"]) for group in step} == {(0.8, 0.7, 1e-6, True)}


@pytest.fixture(scope="module")
def on_two_ranks(workers: Workers, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """What a whole run gave, and the run folder of one that was cut after five steps."""
    folder = tmp_path_factory.mktemp("two")
    job: dict[str, Any] = {"folder": str(tiny_model), "strategy": {"engine": "fsdp2", "precision": "fp32"}}
    job["accumulate_grad_batches"] = 2
    (whole, _) = workers.run("train_with_checkpoints", 2, run=str(folder / "whole"), steps=25, **job)
    workers.run("train_with_checkpoints", 2, run=str(folder / "cut"), steps=5, **job)
    return whole, folder / "cut"


@pytest.mark.parametrize(("ranks", "accumulate"), [(1, 3), (4, 1)])
def test_on_another_number_of_ranks(
    workers: Workers, tiny_model: Path, tmp_path: Path, on_two_ranks: tuple[Any, Path], ranks: int, accumulate: int
) -> None:
    """The same global batches: losses differ only by the order of summation, and epochs stay where they were."""
    whole, cut = on_two_ranks
    shutil.copytree(cut, tmp_path / "cut")
    job = {"folder": str(tiny_model), "strategy": {"engine": "fsdp1", "precision": "fp32"}}
    after = workers.run(
        "train_with_checkpoints",
        ranks,
        run=str(tmp_path / "cut"),
        steps=25,
        ckpt_path="last",
        accumulate_grad_batches=accumulate,
        **job,
    )[0]
    assert after["losses"] == pytest.approx(whole["losses"][5:], rel=1e-5)
    assert after["losses"][0] == pytest.approx(whole["losses"][5], rel=1e-6)
    assert after["epoch"] == whole["epoch"] == 3  # begun: the steps up to 10, 20 and 25


def test_a_used_run_folder_is_refused(workers: Workers, tiny_model: Path, tmp_path: Path) -> None:
    job = {"folder": str(tiny_model), "strategy": {}, "run": str(tmp_path), "steps": 5}
    workers.run("train_with_checkpoints", 1, **job)
    kept = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != "run.lock"}
    with pytest.raises(RankError, match="already holds 1 checkpoint"):
        workers.run("train_with_checkpoints", 1, **job)
    assert {path: path.read_bytes() for path in kept} == kept
    assert {path for path in tmp_path.rglob("*") if path.is_file()} <= {*kept, tmp_path / "run.lock"}


def test_a_folder_that_is_no_checkpoint_is_named(workers: Workers, tiny_model: Path, tmp_path: Path) -> None:
    job = {"folder": str(tiny_model), "strategy": {}, "run": str(tmp_path), "steps": 5}
    with pytest.raises(RankError, match=r"Hugging Face|not a checkpoint"):
        workers.run("train_with_checkpoints", 1, ckpt_path=str(tiny_model), **job)
