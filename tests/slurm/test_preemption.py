"""Preemption, time limits, a node that goes and a rank that dies on a real SLURM: nothing is lost or piles up."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from lit_fsdp.checkpoint.run_folder import checkpoints
from lit_fsdp.launch.slurm_job import render
from tests.runs import losses, records, whole_steps
from tests.slurm.conftest import ROOT, Cluster
from tests.unit.launch.conftest import planned

pytestmark = pytest.mark.timeout(1500)
LONG = pytest.mark.long("minutes each; the promise itself is in tests/spec, and signals by phase in tests/dist")
TIMEOUT = 60  # of a collective, in seconds
STEPS: dict[str, Any] = {"trainer": {"max_steps": 45}, "checkpoint": {"every_steps": 10, "keep_best": 0}}
SLOW = {"command": [sys.executable, str(ROOT / "tests/dist/slow_phases.py")], "env": {"SLOW_PHASE": "step"}}
"""A ``slurm`` section whose steps take three seconds."""


def check_same(cluster: Cluster, stopped: str) -> None:
    """A run that was stopped has logged each step once, with the loss of one that was not."""
    cluster.wait_until(cluster.submit(cluster.recipe(f"{stopped}-whole", **STEPS)), "COMPLETED")
    assert losses(cluster.folder / stopped) == losses(cluster.folder / f"{stopped}-whole")
    logged = [int(row["step"]) for row in records(cluster.folder / stopped / "metrics.csv") if row.get("train_loss")]
    assert logged == list(range(1, 46))


@LONG
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


@LONG
def test_a_job_longer_than_its_time_limit_goes_on_by_itself_until_it_is_done(cluster: Cluster):
    """Of two minutes each time, as in a rehearsal in a debug queue."""
    slurm = {**SLOW, "max_requeues": 30, "signal_lead_seconds": 31, "time": "2:00"}
    number = cluster.submit(cluster.recipe("limited", **STEPS, slurm=slurm))
    assert cluster.wait_until(number, "COMPLETED", restarts=1, seconds=1200)["TimeLimit"] == "00:02:00"
    check_same(cluster, "limited")


@LONG
def test_a_node_that_goes_down_costs_one_interval(cluster: Cluster):
    number = cluster.submit(cluster.recipe("node", trainer={"max_steps": 60}, slurm=cluster.forked()))
    cluster.wait_for_step("node", 12)
    for state in ("DOWN", "DRAIN"):  # a node that is only down comes back by itself, as its slurmd lives
        cluster.run("scontrol", "update", "NodeName=node2", f"State={state}", "Reason=test")
    try:
        cluster.wait_until(number, "PENDING", "CONFIGURING", seconds=450)
    finally:
        cluster.run("scontrol", "update", "NodeName=node2", "State=RESUME")
    cluster.wait_until(number, "COMPLETED", restarts=1, seconds=450)
    assert sorted(losses(cluster.folder / "node")) == list(range(1, 61))


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


@pytest.mark.long("a minute or more; ranks that die or hang are in tests/faults")
def test_a_killed_rank_is_named_and_the_job_goes_on_and_fails_when_that_happens_at_once(cluster: Cluster):
    strategy = {"class_path": "lit_fsdp.fsdp_strategy", "init_args": {"timeout_seconds": TIMEOUT, "precision": "fp32"}}
    values = {"devices": 2, "max_steps": 4000, "strategy": strategy}
    number = cluster.submit(cluster.recipe("killed", trainer=values, slurm={"max_requeues": 1}))
    cluster.wait_for_step("killed", 12)
    os.kill(process_of(number, 3), signal.SIGKILL)
    cluster.wait_until(number, "RUNNING", restarts=1, seconds=TIMEOUT + 120)  # it waits for srun's KillWait alone
    logs = cluster.folder / "killed" / "slurm"
    said = (logs / f"{number}.rank-0.log").read_text(errors="replace")
    assert "rank 0 (node1) lost contact: another rank failed, was killed" in said, said
    job = (logs / f"{number}.log").read_text()
    for line in ("task 3: Killed", "a rank was killed, stopped, hung or disconnected", "requeue 1 of 1"):
        assert line in job
    cluster.wait_for_step("killed", max(losses(cluster.folder / "killed")) + 1)
    os.kill(process_of(number, 3), signal.SIGKILL)  # nothing newer was saved since this start
    assert cluster.wait_until(number, "FAILED", seconds=60)["Restarts"] == "1"
    assert "no checkpoint was saved since this start" in (logs / f"{number}.log").read_text()
    found = losses(cluster.folder / "killed")
    assert sorted(found) == list(range(1, max(found) + 1))


def after_other(act: str) -> str:
    """Of two ranks the first one acts, as soon as the other one runs and would die of SIGTERM."""
    other = "exec env --default-signal=TERM sh -c 'touch beside-$SLURM_JOB_ID; exec sleep 60'"
    return f"[ $SLURM_PROCID = 0 ] || {{ {other}; }}; until [ -e beside-$SLURM_JOB_ID ]; do sleep 0.1; done; {act}"


@pytest.mark.long("the script is run with stand-ins for SLURM in tests/unit/launch")
def test_who_is_started_again(cluster: Cluster):
    """Around processes that end at once, side by side, since SLURM lets a requeued job wait."""
    first, leave = "[ $n = 1 ] || ", "$LIT_FSDP_EXIT_DIR/exit.$SLURM_PROCID"
    again, saved = ("COMPLETED", "0:0", "1"), "touch $LIT_FSDP_EXIT_DIR/saved"
    cases: dict[str, tuple[str, int, tuple[str, str, str]]] = {
        "died": (f"{first}kill -USR1 $$", 1, again),
        # srun sends SIGTERM to the other one, which does not listen yet, or has not even come as far as to ignore it
        "beside": (f"{first}{{ [ $SLURM_PROCID = 1 ] || kill -USR1 $$; sleep 60; }}", 2, again),
        "stopped": (first + "{ " + after_other(f"echo 75 >{leave}; exit 75") + "; }", 2, again),
        "lost": (f"{first}{{ {saved}; echo 76 >{leave}; exit 76; }}", 1, again),
        "killed": (f"{first}{{ {saved}; kill -KILL $$; }}", 1, again),
        "killed-at-once": ("kill -KILL $$", 1, ("FAILED", "137:0", "0")),
        "refused": (f"{saved}; " + after_other(f"echo 2 >{leave}; exit 2"), 2, ("FAILED", "2:0", "0")),
        "failed": ("exit 3", 1, ("FAILED", "3:0", "0")),
        "capped": ("exit 75", 1, ("FAILED", "75:0", "1")),
    }
    numbers = {}
    for name, (text, nodes, _) in cases.items():
        folder = cluster.folder / name
        words = ["bash", "-c", f"n=${{SLURM_RESTART_COUNT:-0}}; {text}", "_"]
        trainer = {"accelerator": "cpu", "devices": 1, "num_nodes": nodes, "default_root_dir": str(folder)}
        (folder / "slurm").mkdir(parents=True)
        script = folder / "slurm" / "job.sbatch"
        script.write_text(render(planned({"command": words, "max_requeues": 1}, trainer=trainer)[0]))
        done = cluster.run("sbatch", "--parsable", str(script))
        assert done.returncode == 0, done.stderr
        numbers[name] = done.stdout.strip()
    states = {name: cluster.wait_until(number, "COMPLETED", "FAILED") for name, number in numbers.items()}
    found = {name: (state["JobState"], state["ExitCode"], state["Restarts"]) for name, state in states.items()}
    assert found == {name: wanted for name, (_, _, wanted) in cases.items()}, cluster.logs()
