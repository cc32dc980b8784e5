"""A rank that dies, a rank that stops, a node that goes: named, in time, and the job goes on."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.conftest import Cluster, losses

pytestmark = pytest.mark.timeout(600)
only_long = pytest.mark.skipif(not os.environ.get("LIT_FSDP_LONG"), reason="in make test-long")
TIMEOUT = 60  # of a collective, in seconds
STRATEGY = {"class_path": "lit_fsdp.fsdp_strategy", "init_args": {"timeout_seconds": TIMEOUT, "precision": "fp32"}}


def process_of(number: str, rank: int) -> int:
    """The process of a rank: both nodes are on this host."""
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
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


def log(cluster: Cluster, name: str, number: str, rank: int | None = None) -> str:
    """Of one rank, or of the job."""
    file = f"{number}.log" if rank is None else f"{number}.rank-{rank}.log"
    return (cluster.folder / name / "slurm" / file).read_text(errors="replace")


def hurt(cluster: Cluster, name: str, how: signal.Signals, step: int = 12) -> tuple[str, float]:
    """A job of 2 × 2 ranks whose rank 3 gets a signal after a step; its number and when that was."""
    values = {"devices": 2, "max_steps": 4000, "strategy": STRATEGY}
    recipe = cluster.recipe(name, trainer=values, slurm={"max_requeues": 1})
    number = cluster.submit(recipe)
    cluster.wait_for_step(name, step)
    os.kill(process_of(number, 3), how)
    return number, time.monotonic()


def test_a_killed_rank_is_noticed_and_the_job_is_put_back(cluster: Cluster):
    number, when = hurt(cluster, "killed", signal.SIGKILL)
    cluster.put_back(number)
    assert time.monotonic() - when < TIMEOUT + 60  # it waits for no timeout, and srun for KillWait
    assert cluster.run("scancel", number).returncode == 0
    said = log(cluster, "killed", number, 0)
    assert "rank 0 (node1) lost contact: another rank failed, was killed" in said, said
    job = log(cluster, "killed", number)
    assert "task 3: Killed" in job
    assert "a rank was killed, stopped, hung or was cut off" in job
    assert "back into the queue, 1 of 1" in job
    left = {path.name: path.read_text() for path in (cluster.folder / "killed" / "slurm" / f"{number}.0").iterdir()}
    assert left["exit.0"] == "76\n"
    assert "exit.3" not in left


@only_long
def test_a_job_whose_rank_is_killed_goes_on_and_fails_when_that_happens_at_once(cluster: Cluster):
    number, _ = hurt(cluster, "twice", signal.SIGKILL)
    cluster.restarted(number, 1)
    before = max(losses(cluster.folder / "twice"))
    cluster.wait_for_step("twice", before + 1)
    os.kill(process_of(number, 3), signal.SIGKILL)  # nothing newer was saved since this start
    state = cluster.wait_until(number, "FAILED", seconds=60)[0]
    assert state["Restarts"] == "1"
    assert "no checkpoint was made since this start" in log(cluster, "twice", number)
    found = losses(cluster.folder / "twice")
    assert sorted(found) == list(range(max(found) + 1))


@only_long
def test_a_stopped_rank_ends_the_job_within_the_timeout(cluster: Cluster):
    number, when = hurt(cluster, "stopped-rank", signal.SIGSTOP)
    stopped = process_of(number, 3)
    try:
        cluster.wait_until(number, "PENDING", "FAILED", seconds=TIMEOUT + 60)
        took = time.monotonic() - when
    finally:
        cluster.run("scancel", number)
    assert took < TIMEOUT + 30
    job = log(cluster, "stopped-rank", number)
    assert "back into the queue, 1 of 1" in job
    assert not Path("/proc", str(stopped)).exists()


def wait_for_idle_nodes(cluster: Cluster) -> None:
    """Until no earlier job is left on any node."""
    deadline = time.monotonic() + 60
    while cluster.run("sinfo", "-hN", "-o", "%T").stdout.split() != ["idle", "idle"]:
        assert time.monotonic() < deadline
        time.sleep(0.3)


@contextlib.contextmanager
def without(cluster: Cluster, node: str) -> Iterator[None]:
    """While a node is down."""
    for state in ("DOWN", "DRAIN"):  # a node that is only down comes back by itself, as its slurmd lives
        cluster.run("scontrol", "update", f"NodeName={node}", f"State={state}", "Reason=test")
    try:
        yield
    finally:
        cluster.run("scontrol", "update", f"NodeName={node}", "State=RESUME")


@only_long
def test_a_node_that_goes_down_costs_one_interval(cluster: Cluster):
    recipe = cluster.recipe("node", trainer={"max_steps": 60})
    number = cluster.submit(recipe)
    cluster.wait_for_step("node", 12)
    with without(cluster, "node2"):
        cluster.wait_until(number, "PENDING", "CONFIGURING")
    assert int(cluster.wait_until(number, "COMPLETED", seconds=450)[0]["Restarts"]) >= 1
    found = losses(cluster.folder / "node")
    assert sorted(found) == list(range(60))


@only_long
@pytest.mark.parametrize(("lost", "left"), [("node2", "node1"), ("node1", "node2")])
def test_a_job_that_may_have_fewer_nodes_goes_on_without_the_one_that_is_gone(cluster: Cluster, lost: str, left: str):
    """Node 1 is where the script ran and the ranks met; its checkpoints lie on the shared file system."""
    steps = {"max_steps": 60, "strategy": STRATEGY, "devices": 2}
    whole, name = cluster.folder / "whole-of-60", f"without-{lost}"
    if not whole.is_dir():
        cluster.wait_until(cluster.submit(cluster.recipe(whole.name, trainer=steps)), "COMPLETED")
    wait_for_idle_nodes(cluster)  # else it starts at once with the one that is free
    number = cluster.submit(cluster.recipe(name, trainer=steps, slurm={"min_nodes": 1}))
    cluster.wait_for_step(name, 12)
    assert cluster.states(number)[0]["NumNodes"] == "2"
    with without(cluster, lost):
        state = cluster.wait_until(number, "COMPLETED", seconds=450)[0]
    assert (state["NodeList"], state["NumNodes"]) == (left, "1")
    assert int(state["Restarts"]) >= 1
    found, wanted = losses(cluster.folder / name), losses(whole)
    assert sorted(found) == sorted(wanted) == list(range(60))
    assert found == pytest.approx(wanted, rel=1e-5)
