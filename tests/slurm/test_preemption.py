"""Preemption and time limits on a real SLURM, over and over: nothing is lost and nothing piles up."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from lit_fsdp.checkpoint.run_folder import checkpoints
from tests.runs import losses, records, whole_steps
from tests.slurm.conftest import ROOT, Cluster

pytestmark = [
    pytest.mark.timeout(1500),
    pytest.mark.long("minutes each; the promise itself is in tests/spec, and signals by phase in tests/dist"),
]
STEPS: dict[str, Any] = {"trainer": {"max_steps": 45}, "checkpoint": {"every_steps": 10, "keep_best": 0}}
SLOW = {"command": [sys.executable, str(ROOT / "tests/dist/slow_phases.py")], "env": {"SLOW_PHASE": "step"}}
"""A ``slurm`` section whose steps take three seconds."""


def check_same(cluster: Cluster, stopped: str) -> None:
    """A run that was stopped has logged each step once, with the loss of one that was not."""
    cluster.wait_until(cluster.submit(cluster.recipe(f"{stopped}-whole", **STEPS)), "COMPLETED")
    assert losses(cluster.folder / stopped) == losses(cluster.folder / f"{stopped}-whole")
    logged = [int(row["step"]) for row in records(cluster.folder / stopped / "metrics.csv") if row.get("train_loss")]
    assert logged == list(range(45))


def test_ten_preemptions_in_a_row_lose_nothing(cluster: Cluster):
    number = cluster.submit(cluster.recipe("soak", **STEPS, slurm={**SLOW, "max_requeues": 10}))
    rolling = []
    for restart in range(1, 11):
        cluster.wait_for_step("soak", max(losses(cluster.folder / "soak"), default=0) + 1)
        cluster.signal(number)
        cluster.wait_until(number, "PENDING", "CONFIGURING", "RUNNING", restarts=restart)
        rolling.append([entry.step for entry in checkpoints(cluster.folder / "soak") if entry.on_signal])
    assert cluster.wait_until(number, "COMPLETED")["Restarts"] == "10"
    check_same(cluster, "soak")
    assert all(len(found) <= 1 for found in rolling), rolling
    assert sum(len(found) for found in rolling) >= 7, rolling
    found = whole_steps(cluster.folder / "soak", may_hide=True)
    assert (len(found), found[-1]) == (2, 45)


def test_a_job_longer_than_its_time_limit_goes_on_by_itself_until_it_is_done(cluster: Cluster):
    """Of two minutes each time, as in a rehearsal in a debug queue."""
    slurm = {**SLOW, "max_requeues": 30, "signal_lead_seconds": 31, "time": "2:00"}
    number = cluster.submit(cluster.recipe("limited", **STEPS, slurm=slurm))
    assert cluster.wait_until(number, "COMPLETED", restarts=1, seconds=1200)["TimeLimit"] == "00:02:00"
    check_same(cluster, "limited")
