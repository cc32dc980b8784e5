"""Saves that are written while training goes on: the same bytes, the same losses, and no failure that stays unheard."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_fsdp.checkpoint.manifest import read_manifest
from lit_fsdp.checkpoint.run_folder import checkpoints
from tests.dist.forks import on_ranks
from tests.runs import MORE, content, whole_steps


def contents(run: Path) -> dict[str, Any]:
    """Every file of a run's checkpoints; of the manifests, which say when they were written, the metrics."""
    files = {name: data for name, data in content(run / "checkpoints").items() if not name.endswith("manifest.json")}
    return files | {entry.path.name: entry.metrics for entry in checkpoints(run)}


@pytest.mark.parametrize(
    ("strategy", "ranks", "options"),
    [
        ({"engine": "fsdp1"}, 2, {"accumulate_grad_batches": 2}),
        pytest.param(
            {"engine": "fsdp2", "sharding": "hybrid_shard", "replicate_degree": 2, "shard_degree": 2},
            4,
            {},
            marks=MORE,
        ),
        ({"engine": "fsdp2", "state_dict": "full", "precision": "low_precision"}, 2, {}),
        ({"engine": "ddp"}, 2, {"more_steps": 12}),
        ({"engine": "fsdp2"}, 2, {"foreign": True}),
        ({"engine": "single", "state_dict": "full"}, 1, {"val_check_interval": 3}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else str(value),
)
def test_the_same_bytes_as_a_save_that_training_waits_for(
    tiny_model: Path, tmp_path: Path, strategy: dict[str, Any], ranks: int, options: dict[str, Any]
) -> None:
    job = {"folder": tiny_model, "strategy": strategy, **options}
    (waited, *_) = on_ranks("train_async", ranks, run=tmp_path / "sync", async_save=False, **job)
    (went_on, *others) = on_ranks("train_async", ranks, run=tmp_path / "async", async_save=True, **job)
    assert went_on["losses"] == waited["losses"]
    assert went_on["digest"] == waited["digest"]
    assert went_on["error"] == waited["error"] == ""
    saved, expected = (contents(tmp_path / name) for name in ("async", "sync"))
    assert saved == expected
    name = "tensors.safetensors" if strategy.get("state_dict") == "full" else "tensors/rank-00000.safetensors"
    assert len({expected[f"step-0000000{step}/{name}"] for step in (3, 6, 9)}) == 3  # training had changed them
    last = options.get("more_steps", 9)
    assert whole_steps(tmp_path / "async") == list(range(3, last + 1, 3))
    for seen in (went_on, *others):
        assert seen["last_model_path"] == f"step-{last:08d}"
    if strategy.get("state_dict") != "full":  # each rank has copied what it writes: together one copy
        staged = [seen["staged"] for seen in (went_on, *others)]
        specs = read_manifest(tmp_path / f"async/checkpoints/step-{last:08d}").tensors.values()
        one = sum(math.prod(spec.shape) * getattr(torch, spec.dtype).itemsize for spec in specs)
        assert sum(staged) == pytest.approx(one, rel=0.02)  # with the padding of uneven shards
        assert max(staged) < 1.2 * one / ranks
    if "val_check_interval" in options:
        assert went_on["best_model_path"] == waited["best_model_path"] != ""


@pytest.mark.parametrize("engine", ["fsdp2", "ddp"])
def test_where_hosts_do_not_meet_training_waits_for_saves(tiny_model: Path, tmp_path: Path, engine: str) -> None:
    """One rank fails at once, the other one waits for it; both go on, in a second fit too."""
    job = {"folder": tiny_model, "strategy": {"engine": engine}, "fault": "apart", "more_steps": 12}
    first, second = on_ranks("train_async", 2, run=tmp_path, async_save=True, **job)
    for seen in (first, second):
        assert (seen["error"], len(seen["losses"]), set(seen["pending"].values())) == ("", 12, {False})
        assert seen["visible"]["4"] == [3]
    (said,) = [text for text in first["said"] + second["said"] if "gloo" in text]
    assert said.startswith("the hosts cannot connect by gloo, so training waits for saves")
    assert whole_steps(tmp_path) == [3, 6, 9, 12]


def test_training_goes_on_and_the_next_save_waits(tiny_model: Path, tmp_path: Path) -> None:
    """The end of each save comes after the next step; the old one goes once the new one stands."""
    job = {"folder": tiny_model, "strategy": {"engine": "fsdp2"}, "fault": "slow", "keep_last": 1}
    for seen in on_ranks("train_async", 2, run=tmp_path, async_save=True, **job):
        assert seen["pending"]["4"]
        assert seen["visible"]["4"] == []
        assert seen["visible"]["7"] == [3]  # 6 was not begun before 3 stood
        assert seen["last_model_path"] == "step-00000009"
    assert whole_steps(tmp_path) == [9]


def test_a_failing_writer_is_heard_on_all_ranks_at_the_same_step(tiny_model: Path, tmp_path: Path) -> None:
    job = {"folder": tiny_model, "strategy": {"engine": "fsdp2"}, "fault": "full disk", "steps": 1000}
    seen = on_ranks("train_async", 2, run=tmp_path, async_save=True, **job)
    for rank in seen:
        assert rank["error"].startswith("CheckpointError: ")
        assert "rank 1: " in rank["error"]
        assert "rank-00001.safetensors: No space left on device" in rank["error"]
    assert seen[0]["step"] == seen[1]["step"] <= 9  # at the latest when the next save would begin
    assert seen[0]["last_model_path"] == "step-00000003"
    assert whole_steps(tmp_path) == [3]


@pytest.mark.parametrize(
    ("fault", "error", "steps"), [("raise", "ValueError", [3]), ("signal", "StopRequested", [3, 5])]
)
def test_a_save_under_way_is_completed(
    tiny_model: Path, tmp_path: Path, fault: str, error: str, steps: list[int]
) -> None:
    """An exception on one rank, and a signal to one rank, at step 4 while step 3 is being written."""
    seconds = 12.0 if fault == "raise" else 60.0  # the other rank waits so long for the one that raised
    job = {"folder": tiny_model, "strategy": {"engine": "fsdp2", "timeout_seconds": seconds}, "fault": fault}
    seen = on_ranks("train_async", 2, run=tmp_path, async_save=True, **job)
    assert seen[1]["error"].startswith(error)
    assert all(rank["pending"]["4"] for rank in seen)
    assert whole_steps(tmp_path) == steps
    assert read_manifest(checkpoints(tmp_path)[0].path).global_step == 3
    if fault == "signal":
        stopped = "StopRequested: stopped by a signal after step 5; the checkpoint is complete"
        assert all(rank["error"].startswith(stopped) for rank in seen)
        again = {"folder": tiny_model, "strategy": {"engine": "fsdp1"}, "run": tmp_path, "steps": 7}
        resumed = on_ranks("train", 1, ckpt_path="last", **again)
        assert len(resumed[0]["losses"]) == 2
