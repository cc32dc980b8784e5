"""Preemption and time limits on a real SLURM: whatever comes whenever, nothing is lost and nothing piles up."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lit_fsdp.checkpoint.run_folder import checkpoints
from tests.runs import losses, records, whole_steps
from tests.slurm.conftest import ROOT, Cluster

pytestmark = [
    pytest.mark.timeout(1500),
    pytest.mark.long("minutes each; the promise itself is in tests/spec, and signals by phase in tests/dist"),
]
ONE = {"num_nodes": 1, "devices": 1}
"""Where two nodes would show no more than one process does."""


def steps_logged(run_folder: Path) -> list[int]:
    """Every step of which a training loss was logged, as often as it was."""
    return [int(row["step"]) for row in records(run_folder / "metrics.csv") if row.get("train_loss")]


def slow(phase: str) -> dict[str, Any]:
    """A ``slurm`` section whose command waits for 1.5 s in one phase and leaves a file when it begins."""
    return {"command": [sys.executable, str(ROOT / "tests/dist/slow_phases.py")], "env": {"SLOW_PHASE": phase}}


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
    found = whole_steps(cluster.folder / "soak", may_hide=True)
    assert len(found) == 2
    assert found[-1] == 45


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


def test_a_signal_while_the_job_starts_costs_a_start(cluster: Cluster):
    """Before Python runs, before it listens, while it imports and loads, before the first batch."""
    jobs = {}
    for seconds in (0.0, 1.0, 4.0, 8.0):
        name = f"early-{seconds}"
        number = jobs[name] = cluster.submit(cluster.recipe(name, trainer={**ONE, "max_steps": 3}))
        cluster.wait_for(cluster.folder / name / "slurm" / f"{number}.rank-0.log")
        time.sleep(seconds)
        cluster.signal(number)
    for name, number in jobs.items():
        state = cluster.wait_until(number, "COMPLETED")[0]
        assert (state["ExitCode"], int(state["Restarts"]) <= 1) == ("0:0", True), cluster.logs()
        assert steps_logged(cluster.folder / name) == [0, 1, 2]


def test_in_the_middle_of_a_save(cluster: Cluster):
    """What was saved before is whole; scancel is for good."""
    for how, ended, restarts in ((["scancel"], "CANCELLED", "0"), (["scontrol", "requeue"], "COMPLETED", "1")):
        name = f"middle-{how[-1]}"
        save = {"slurm": slow("save"), "checkpoint": {"every_steps": 4}}
        number = cluster.submit(cluster.recipe(name, trainer={**ONE, "max_steps": 12}, **save))
        cluster.wait_for(cluster.folder / name / "checkpoints" / "step-00000004")
        mark = cluster.folder / "save-0"
        mark.unlink(missing_ok=True)
        cluster.wait_for(mark)
        assert cluster.run(*how, number).returncode == 0
        assert cluster.wait_until(number, ended)[0]["Restarts"] == restarts
        assert whole_steps(cluster.folder / name, may_hide=True)[-1] >= 4
        if ended == "COMPLETED":
            assert steps_logged(cluster.folder / name) == list(range(12))
