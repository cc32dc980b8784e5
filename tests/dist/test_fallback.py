"""Damage to the newest checkpoint is an error on all ranks, or, if that is allowed, the way back to the one before."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lit_fsdp.checkpoint.run_folder import checkpoints
from lit_fsdp.checkpoint.verify import verify
from tests.dist.forks import Outcome, command
from tests.runs import content, losses
from tests.unit.checkpoint.conftest import flip

RECIPE = """
seed_everything: 5
trainer: {accelerator: cpu, devices: 2, max_steps: 3, log_every_n_steps: 1, enable_progress_bar: false}
data: {train: "generated:32", val: "generated:4", max_seq_length: 64, global_batch_size: 4, micro_batch_size: 2}
checkpoint: {every_steps: 1, keep_last: -1}
"""
NEWEST = "step-00000003"


@pytest.fixture(scope="module")
def runs(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """``runs(folder, *flags)``: ``fit`` on two ranks in the working folder, and what each rank said."""
    cwd = tmp_path_factory.mktemp("fallback")
    (cwd / "small.yaml").write_text(RECIPE)

    def run(folder: Path, *flags: str, verb: str = "fit") -> list[Outcome]:
        words = [verb, "--config", "small.yaml", "--model.name", str(tiny_model)]
        return command(2, [*words, "--trainer.default_root_dir", str(folder), *flags], cwd)

    return run


@pytest.fixture(scope="module")
def three_steps(runs: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """``three_steps(folder)``: a copy of a run of three steps at ``folder``."""
    made = tmp_path_factory.mktemp("three") / "run"
    done = runs(made)
    assert [rank.code for rank in done] == [0, 0], done
    return lambda folder: Path(shutil.copytree(made, folder))


def test_a_flipped_bit(runs: Callable[..., Any], three_steps: Callable[..., Path], tmp_path: Path) -> None:
    run, by_path = three_steps(tmp_path / "run"), three_steps(tmp_path / "by_path")
    newest = run / "checkpoints" / NEWEST
    file = "tensors/rank-00001.safetensors"
    flip(newest / file)
    before, recipe = content(run / "checkpoints"), (run / "recipe.yaml").read_text()
    refused = runs(run, "--ckpt_path", "last", "--trainer.max_steps", "5")
    for rank in refused:
        assert rank.code == 1
        assert f"{newest} is damaged:\n  {file}: xxh3 differs from the manifest\n" in rank.err
        assert "--resume.fallback true" in rank.err
    assert content(run / "checkpoints") == before
    assert (run / "recipe.yaml").read_text() == recipe  # not that of the run that was refused

    flags = ["--ckpt_path", "last", "--trainer.max_steps", "5", "--resume.fallback", "true"]
    done = runs(run, *flags)
    assert [rank.code for rank in done] == [0, 0], done
    older = run / "checkpoints" / "step-00000002"
    assert f"{newest} is damaged:\n  {file}: xxh3 differs from the manifest\n" in done[0].err
    assert f"resuming from {older} instead of {newest} (resume.fallback)" in done[0].err
    assert "damaged" not in done[1].err  # said once
    (aside,) = (run / "checkpoints").glob("damaged-*")
    assert aside.name.startswith(f"damaged-{NEWEST}-")
    assert f"moved aside: {newest} is now {aside.name}" in done[0].err
    assert content(aside) == {k.removeprefix(f"{NEWEST}/"): v for k, v in before.items() if k.startswith(NEWEST)}

    same = runs(by_path, "--ckpt_path", str(by_path / "checkpoints/step-00000002"), "--trainer.max_steps", "5")
    assert [rank.code for rank in same] == [0, 0], same
    assert len(losses(run)) == 5
    assert losses(run) == losses(by_path)
    (aside,) = (by_path / "checkpoints").glob("superseded-*")
    assert aside.name.startswith(f"superseded-{NEWEST}-")
    for folder in (run, by_path):
        assert [entry.step for entry in checkpoints(folder)] == [1, 2, 3, 4, 5]
        assert [verify(entry.path) for entry in checkpoints(folder)] == [{}] * 5


def test_all_are_damaged(runs: Callable[..., Any], three_steps: Callable[..., Path], tmp_path: Path) -> None:
    run = three_steps(tmp_path / "run")
    flip(run / "checkpoints/step-00000001/state.json")
    flip(run / "checkpoints/step-00000002/tensors/rank-00000.safetensors")
    flip(run / f"checkpoints/{NEWEST}/hf/config.json")
    before = content(run / "checkpoints")
    for rank in runs(run, "--ckpt_path", "last", "--trainer.max_steps", "4", "--resume.fallback", "true"):
        assert rank.code == 1
        for file in ("state.json", "tensors/rank-00000.safetensors", "hf/config.json"):
            assert f"  {file}: xxh3 differs from the manifest" in rank.err
    assert content(run / "checkpoints") == before


def test_a_path_is_never_replaced_and_hashes_can_be_left_out(
    runs: Callable[..., Any], three_steps: Callable[..., Path], tmp_path: Path
) -> None:
    run = three_steps(tmp_path / "run")
    newest = run / "checkpoints" / NEWEST
    flip(newest / "tensors/rank-00001.safetensors")
    for rank in runs(run, "--ckpt_path", str(newest), "--resume.fallback", "true", verb="validate"):
        assert rank.code == 1
        assert "rank-00001.safetensors: xxh3 differs" in rank.err
    done = runs(run, "--ckpt_path", str(newest), "--resume.verify", "false", verb="validate")
    assert [rank.code for rank in done] == [0, 0], done
