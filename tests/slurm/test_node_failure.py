"""A rank that dies, a rank that stops, a node that goes: named, in time, and the job goes on."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.runs import losses
from tests.slurm.conftest import Cluster

pytestmark = pytest.mark.timeout(600)
TIMEOUT = 60  # of a collective, in seconds
STRATEGY = {"class_path": "lit_fsdp.fsdp_strategy", "init_args": {"timeout_seconds": TIMEOUT, "precision": "fp32"}}
long = pytest.mark.long("a minute or more each; ranks that die or hang are in tests/faults")


def without(cluster: Cluster, node: str, number: str, *states: str) -> dict[str, str]:
    """The state of a job that has come to one of these while a node was down."""
    for state in ("DOWN", "DRAIN"):  # a node that is only down comes back by itself, as its slurmd lives
        cluster.run("scontrol", "update", f"NodeName={node}", f"State={state}", "Reason=test")
    try:
        return cluster.wait_until(number, *states, seconds=450)[0]
    finally:
        cluster.run("scontrol", "update", f"NodeName={node}", "State=RESUME")


def test_a_node_that_goes_down_costs_one_interval(cluster: Cluster):
    number = cluster.submit(cluster.recipe("node", trainer={"max_steps": 60}, slurm=cluster.forked()))
    cluster.wait_for_step("node", 12)
    without(cluster, "node2", number, "PENDING", "CONFIGURING")
    assert int(cluster.wait_until(number, "COMPLETED", seconds=450)[0]["Restarts"]) >= 1
    assert sorted(losses(cluster.folder / "node")) == list(range(60))


@long
def test_a_job_that_may_have_fewer_nodes_goes_on_without_the_one_that_is_gone(cluster: Cluster):
    """Node 1 is where the script ran and the ranks met; its checkpoints lie on the shared file system."""
    steps = {"max_steps": 60, "strategy": STRATEGY, "devices": 2}
    cluster.wait_until(cluster.submit(cluster.recipe("whole-of-60", trainer=steps)), "COMPLETED")
    wanted = losses(cluster.folder / "whole-of-60")
    for lost, left in (("node2", "node1"), ("node1", "node2")):
        while cluster.run("sinfo", "-hN", "-o", "%T").stdout.split() != ["idle", "idle"]:
            time.sleep(0.3)  # else it starts at once with the one that is free
        number = cluster.submit(cluster.recipe(f"without-{lost}", trainer=steps, slurm={"min_nodes": 1}))
        cluster.wait_for_step(f"without-{lost}", 12)
        assert cluster.states(number)[0]["NumNodes"] == "2"
        state = without(cluster, lost, number, "COMPLETED")
        assert (state["NodeList"], state["NumNodes"]) == (left, "1")
        found = losses(cluster.folder / f"without-{lost}")
        assert sorted(found) == list(range(60))
        assert found == pytest.approx(wanted, rel=1e-5)


def process_of(number: str, rank: int) -> int:
    """The process of a rank: both nodes are on this host."""
    for folder in (folder for folder in Path("/proc").iterdir() if folder.name.isdigit()):
        try:
            words = dict(word.split("=", 1) for word in (folder / "environ").read_text().split("\0") if "=" in word)
            is_python = b"lit_fsdp\0fit" in (folder / "cmdline").read_bytes()
        except (OSError, UnicodeDecodeError):
            continue
        if is_python and (words.get("SLURM_JOB_ID"), words.get("SLURM_PROCID")) == (number, str(rank)):
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            if b"lit_fsdp\0fit" not in Path("/proc", parent, "cmdline").read_bytes():  # not a loader of a rank
                return int(folder.name)
    raise AssertionError(f"no rank {rank} of job {number}")


def hurt(cluster: Cluster, name: str, how: signal.Signals) -> tuple[str, int]:
    """A job of 2 × 2 ranks whose rank 3 gets a signal after a step; its number and that process."""
    values = {"devices": 2, "max_steps": 4000, "strategy": STRATEGY}
    number = cluster.submit(cluster.recipe(name, trainer=values, slurm={"max_requeues": 1}))
    cluster.wait_for_step(name, 12)
    process = process_of(number, 3)
    os.kill(process, how)
    return number, process


@long
def test_a_killed_rank_is_named_and_the_job_goes_on_and_fails_when_that_happens_at_once(cluster: Cluster):
    number, _ = hurt(cluster, "killed", signal.SIGKILL)
    cluster.restarted(number, 1, seconds=TIMEOUT + 60)  # it waits for no timeout, and srun for KillWait
    logs = cluster.folder / "killed" / "slurm"
    said = (logs / f"{number}.rank-0.log").read_text(errors="replace")
    assert "rank 0 (node1) lost contact: another rank failed, was killed" in said, said
    job = (logs / f"{number}.log").read_text()
    for line in ("task 3: Killed", "a rank was killed, stopped, hung or was cut off", "requeue 1 of 1"):
        assert line in job
    assert (logs / f"{number}.0" / "exit.0").read_text() == "76\n"
    assert not (logs / f"{number}.0" / "exit.3").exists()
    cluster.wait_for_step("killed", max(losses(cluster.folder / "killed")) + 1)
    os.kill(process_of(number, 3), signal.SIGKILL)  # nothing newer was saved since this start
    assert cluster.wait_until(number, "FAILED", seconds=60)[0]["Restarts"] == "1"
    assert "no checkpoint was made since this start" in (logs / f"{number}.log").read_text()
    found = losses(cluster.folder / "killed")
    assert sorted(found) == list(range(max(found) + 1))


@long
def test_a_stopped_rank_ends_the_job_within_the_timeout(cluster: Cluster):
    number, stopped = hurt(cluster, "stopped-rank", signal.SIGSTOP)
    try:
        cluster.wait_until(number, "PENDING", "FAILED", seconds=TIMEOUT + 30)
    finally:
        cluster.run("scancel", number)
    job = (cluster.folder / "stopped-rank" / "slurm" / f"{number}.log").read_text()
    assert "requeue 1 of 1" in job
    assert not Path("/proc", str(stopped)).exists()
