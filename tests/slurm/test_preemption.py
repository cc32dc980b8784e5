"""Preemption and time limits on a real SLURM: whatever comes whenever, nothing is lost and nothing piles up."""

from __future__ import annotations

import csv
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lit_fsdp.checkpoint.run_folder import checkpoints, damaged
from lit_fsdp.checkpoint.store import verify_files
from tests.slurm.conftest import ROOT, Cluster, losses

pytestmark = pytest.mark.timeout(1500)
only_long = pytest.mark.skipif(not os.environ.get("LIT_FSDP_LONG"), reason="in make test-long")
ONE = {"num_nodes": 1, "devices": 1}
"""Where two nodes would show no more than one process does."""


def steps_logged(run_folder: Path) -> list[int]:
    """Every step of which a training loss was logged, as often as it was."""
    with (run_folder / "metrics.csv").open() as file:
        return [int(row["step"]) for row in csv.DictReader(file) if row.get("train_loss")]


def check_whole(run_folder: Path) -> list[int]:
    """Steps of the checkpoints, each of which is whole."""
    assert damaged(run_folder) == []
    found = checkpoints(run_folder)
    for entry in found:
        verify_files(entry.path)
    return [entry.step for entry in found]


def slow(phase: str) -> dict[str, Any]:
    """A ``slurm`` section whose command waits for 1.5 s in one phase and leaves a file when it begins."""
    return {"command": [sys.executable, str(ROOT / "tests/dist/slow_phases.py")], "env": {"SLOW_PHASE": phase}}


@only_long
def test_ten_preemptions_in_a_row_lose_nothing(cluster: Cluster):
    """Of a run with slow steps, so that it cannot be done before."""
    steps: dict[str, Any] = {"trainer": {"max_steps": 45}, "checkpoint": {"every_steps": 10, "keep_best": 0}}
    whole = cluster.submit(cluster.recipe("not_preempted", **steps))
    number = cluster.submit(cluster.recipe("soak", **steps, slurm={**slow("step"), "max_requeues": 10}))
    rolling = []
    for restart in range(10):
        cluster.wait_for_step("soak", max(losses(cluster.folder / "soak"), default=0) + 1)
        cluster.signal(number)
        cluster.restarted(number, restart + 1)
        rolling.append([entry.step for entry in checkpoints(cluster.folder / "soak") if entry.on_signal])
    state = cluster.wait_until(number, "COMPLETED")[0]
    cluster.wait_until(whole, "COMPLETED")
    assert state["Restarts"] == "10"
    assert losses(cluster.folder / "soak") == losses(cluster.folder / "not_preempted")
    assert steps_logged(cluster.folder / "soak") == list(range(45))
    assert all(len(found) <= 1 for found in rolling), rolling
    assert sum(len(found) for found in rolling) >= 7, rolling
    found = check_whole(cluster.folder / "soak")
    assert len(found) == 2
    assert found[-1] == 45


@only_long
def test_a_job_longer_than_its_time_limit_goes_on_by_itself_until_it_is_done(cluster: Cluster):
    """Of two minutes each time, as in a rehearsal in a debug queue."""
    slurm = {**slow("step"), "max_requeues": 30, "signal_lead_seconds": 31, "time": "2:00"}  # 3 s a step
    number = cluster.submit(cluster.recipe("limited", trainer={"max_steps": 45}, slurm=slurm))
    whole = cluster.submit(cluster.recipe("unlimited", trainer={"max_steps": 45}))
    cluster.wait_until(whole, "COMPLETED")
    state = cluster.wait_until(number, "COMPLETED", seconds=1200)[0]
    assert state["TimeLimit"] == "00:02:00"
    assert int(state["Restarts"]) >= 1
    assert losses(cluster.folder / "limited") == losses(cluster.folder / "unlimited")
    assert steps_logged(cluster.folder / "limited") == list(range(45))


@only_long
@pytest.mark.parametrize("end", [{"max_time": "00:00:00:03", "max_steps": 10**5}, {"max_epochs": 1, "max_steps": -1}])
def test_the_end_of_time_or_data_ends_the_job_for_good(cluster: Cluster, end: dict[str, Any]):
    name = f"ended-{next(iter(end))}"
    number = cluster.submit(cluster.recipe(name, trainer={**ONE, **end}))
    state = cluster.wait_until(number, "COMPLETED")[0]
    assert (state["Restarts"], state["ExitCode"]) == ("0", "0:0")
    assert check_whole(cluster.folder / name)[-1] == max(losses(cluster.folder / name)) + 1


@only_long
@pytest.mark.parametrize("seconds", [0.0, 1.0, 4.0, 8.0])
def test_a_signal_while_the_job_starts_costs_a_start(cluster: Cluster, seconds: float):
    """Before Python runs, before it listens, while it imports and loads, before the first batch."""
    name = f"early-{seconds}"
    few = ONE if seconds == 4.0 else {}
    number = cluster.submit(cluster.recipe(name, trainer={**few, "max_steps": 3}))
    log = cluster.folder / name / "slurm" / f"{number}.log"
    cluster.wait_for(cluster.folder / name / "slurm" / f"{number}.rank-0.log")
    time.sleep(seconds)
    cluster.signal(number)
    state = cluster.wait_until(number, "COMPLETED")[0]
    assert state["ExitCode"] == "0:0"
    assert int(state["Restarts"]) <= 1
    assert seconds > 3 or state["Restarts"] == "1", log.read_text()
    assert steps_logged(cluster.folder / name) == [0, 1, 2]


@only_long
@pytest.mark.parametrize("phase", ["save", "exit"])
def test_a_signal_in_the_last_save_or_later_changes_nothing(cluster: Cluster, phase: str):
    name = f"late-{phase}"
    trainer = {**ONE, "max_steps": 3}
    recipe = cluster.recipe(name, trainer=trainer, slurm=slow(phase), checkpoint={"every_steps": 1000})
    mark = cluster.folder / f"{phase}-0"
    mark.unlink(missing_ok=True)
    number = cluster.submit(recipe)
    cluster.wait_for(mark)
    cluster.signal(number)
    state = cluster.wait_until(number, "COMPLETED")[0]
    assert (state["ExitCode"], state["Restarts"]) == ("0:0", "0")
    assert check_whole(cluster.folder / name) == [3]
    assert steps_logged(cluster.folder / name) == [0, 1, 2]


@only_long
@pytest.mark.parametrize("how", ["scancel", "requeue"])
def test_in_the_middle_of_a_save(cluster: Cluster, how: str):
    """What was saved before is whole; scancel is for good."""
    name = f"middle-{how}"
    trainer = {**ONE, "max_steps": 12}
    recipe = cluster.recipe(name, trainer=trainer, slurm=slow("save"), checkpoint={"every_steps": 4})
    number = cluster.submit(recipe)
    cluster.wait_for(cluster.folder / name / "checkpoints" / "step-00000004")
    mark = cluster.folder / "save-0"
    mark.unlink(missing_ok=True)
    cluster.wait_for(mark)
    commands = {"scancel": ["scancel"], "requeue": ["scontrol", "requeue"]}
    assert cluster.run(*commands[how], number).returncode == 0
    (state,) = cluster.wait_until(number, "CANCELLED" if how == "scancel" else "COMPLETED")
    assert state["Restarts"] == ("0" if how == "scancel" else "1")
    assert check_whole(cluster.folder / name)[-1] >= 4
    if how == "scancel":
        time.sleep(14)  # cred_expire is 10: it would be in the queue again by now
        assert cluster.states(number)[0]["JobState"] == "CANCELLED"
    else:
        assert steps_logged(cluster.folder / name) == list(range(12))
