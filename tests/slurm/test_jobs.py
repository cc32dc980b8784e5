"""Jobs on a real SLURM of two nodes: submitted, refused, failed, ended."""

from __future__ import annotations

import json

import pytest

from tests.slurm.conftest import Cluster, losses

pytestmark = pytest.mark.timeout(600)
SLEEP = {"command": ["bash", "-c", "touch started; exec sleep 600"]}


def test_two_nodes_with_two_processes_each(cluster: Cluster):
    recipe = cluster.recipe("wide", trainer={"devices": 2, "max_steps": 4})
    done = cluster.run("lit-fsdp", "slurm", "submit", "--config", str(recipe))
    assert done.returncode == 0, done.stderr
    number, folder = done.stdout.strip(), cluster.folder / "wide"
    for line in (f"squeue -j {number}", f"scancel {number}", f"tail -F {folder}/slurm/{number}.rank-0.log"):
        assert line in done.stderr
    (state,) = cluster.wait_until(number, "COMPLETED")
    assert state["NodeList"] == "node[1-2]"
    assert json.loads((folder / "audit.json").read_text())["shard_degree"] == 4
    ranks = {path.name: path.read_text() for path in (folder / "slurm" / f"{number}.0").iterdir()}
    assert ranks == {**{f"exit.{rank}": "0\n" for rank in range(4)}, "saved": "\n"}
    job_log = (folder / "slurm" / f"{number}.log").read_text()
    assert ("warning" in job_log, "ended with exit code 0" in job_log) == (False, True)


def test_a_job_that_fails_is_not_tried_again(cluster: Cluster):
    (cluster.folder / "broken.jsonl").write_text('{"messages": \n')
    number = cluster.submit(cluster.recipe("failing", trainer={"num_nodes": 1}, data={"train": "broken.jsonl"}))
    (state,) = cluster.wait_until(number, "FAILED")
    assert (state["ExitCode"], state["Restarts"]) == ("1:0", "0")
    assert "broken.jsonl" in (cluster.folder / "failing" / "slurm" / f"{number}.rank-0.log").read_text()


def test_a_cancelled_job_stays_cancelled_and_a_second_one_is_refused_until_then(cluster: Cluster):
    recipe = cluster.recipe("cancelled", slurm=SLEEP)
    number = cluster.submit(recipe)
    cluster.wait_for(cluster.folder / "started")
    again = cluster.run("lit-fsdp", "slurm", "submit", "--config", str(recipe))
    assert (again.returncode, f"whose job {number} waits or runs" in again.stderr) == (1, True), again.stderr
    assert cluster.run("scancel", number).returncode == 0
    assert cluster.wait_until(number, "CANCELLED")[0]["Restarts"] == "0"
    assert cluster.run("scancel", cluster.submit(recipe)).returncode == 0


def test_the_script_of_a_job_that_still_runs_is_no_second_start_of_it(cluster: Cluster):
    """Its rank 0 is refused, srun ends the others, and what the first job saves meanwhile is not its progress."""
    recipe = cluster.recipe("twice", trainer={"devices": 1, "max_steps": 4000, "num_nodes": 1})
    number = cluster.submit(recipe)
    cluster.wait_for_step("twice", 3)  # before the first checkpoint, after which every rank refuses by itself
    second = cluster.run("sbatch", "--parsable", str(cluster.folder / "twice" / "slurm" / f"{number}.sbatch"))
    (state,) = cluster.wait_until(second.stdout.strip(), "FAILED")
    assert (state["ExitCode"], state["Restarts"]) in (("1:0", "0"), ("2:0", "0")), cluster.logs()
    assert cluster.states(number)[0]["JobState"] == "RUNNING"
    assert cluster.run("scancel", number).returncode == 0
    assert max(losses(cluster.folder / "twice")) > 3


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (["--partition", "nowhere"], 1, "set slurm.partition: test"),
        (["--nodes", "4"], 1, "at most 2"),
        (["--slurm.mem", "999G"], 1, "2 with 0 GPUs, 4 cores and 16000 MiB"),
        (["--slurm.extra", "[--reservation=none]"], 2, "Requested reservation is invalid"),
    ],
)
def test_what_this_cluster_does_not_have(cluster: Cluster, flags: list[str], code: int, says: str):
    recipe = cluster.recipe("lacking", slurm=SLEEP)
    done = cluster.run("lit-fsdp", "slurm", "submit", "--config", str(recipe), *flags)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert says in done.stderr
    shown = cluster.run("lit-fsdp", "slurm", "render", "--config", str(recipe), *flags)
    assert (shown.returncode, shown.stdout[:11]) == (0, "#!/bin/bash")
