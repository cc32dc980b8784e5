"""Jobs on a real SLURM of two nodes, as the manual's chapter on the first of them goes: rendered, submitted, used."""

from __future__ import annotations

import json

import pytest
from safetensors import safe_open

from tests.runs import losses
from tests.slurm.conftest import Cluster

pytestmark = pytest.mark.timeout(600)
SLEEP = {"command": ["bash", "-c", "touch started; exec sleep 600"]}


def test_from_a_recipe_to_an_exported_model_over_two_nodes(cluster: Cluster):
    recipe = str(cluster.recipe("wide", trainer={"max_steps": 4}, checkpoint={"every_steps": 4}))
    folder = cluster.folder / "wide"
    shown = cluster.run("lit-fsdp", "slurm", "render", "--config", recipe, "--nodes", "2")
    assert (shown.returncode, shown.stdout[:11]) == (0, "#!/bin/bash")
    done = cluster.run("lit-fsdp", "slurm", "submit", "--config", recipe, "--nodes", "2", "--time", "10:00")
    assert done.returncode == 0, done.stderr
    number = done.stdout.strip()
    for line in (f"squeue -j {number}", f"scancel {number}", f"tail -F {folder}/slurm/{number}.rank-0.log"):
        assert line in done.stderr
    (state,) = cluster.wait_until(number, "COMPLETED")
    assert state["NodeList"] == "node[1-2]"
    assert json.loads((folder / "audit.json").read_text())["shard_degree"] == 2
    ranks = {path.name: path.read_text() for path in (folder / "slurm" / f"{number}.0").iterdir()}
    assert ranks == {**{f"exit.{rank}": "0\n" for rank in range(2)}, "saved": "\n"}
    log = (folder / "slurm" / f"{number}.log").read_text()
    assert ("warning" in log, "ended with exit code 0" in log) == (False, True)
    words = ("--ckpt", str(folder / "checkpoints" / "step-00000004"), "--out", str(folder / "export"), "--verify")
    exported = cluster.run("lit-fsdp", "export", *words)
    assert exported.returncode == 0, exported.stderr
    with safe_open(folder / "export" / "model.safetensors", "pt") as weights:
        num_params = sum(weights.get_tensor(name).numel() for name in weights.keys())  # noqa: SIM118 (no mapping)
    assert num_params == json.loads((folder / "audit.json").read_text())["num_params"]


long = pytest.mark.long("what a broken job does is tested in the script and the checks by themselves")


@long
def test_a_job_that_fails_is_not_tried_again_and_a_cancelled_one_stays_so(cluster: Cluster):
    (cluster.folder / "broken.jsonl").write_text('{"messages": \n')
    number = cluster.submit(cluster.recipe("failing", trainer={"num_nodes": 1}, data={"train": "broken.jsonl"}))
    (state,) = cluster.wait_until(number, "FAILED")
    assert (state["ExitCode"], state["Restarts"]) == ("1:0", "0")
    assert "broken.jsonl" in (cluster.folder / "failing" / "slurm" / f"{number}.rank-0.log").read_text()
    recipe = cluster.recipe("cancelled", slurm=SLEEP)
    number = cluster.submit(recipe)
    cluster.wait_for(cluster.folder / "started")
    again = cluster.run("lit-fsdp", "slurm", "submit", "--config", str(recipe))
    assert (again.returncode, f"whose job {number} waits or runs" in again.stderr) == (1, True), again.stderr
    assert cluster.run("scancel", number).returncode == 0
    assert cluster.wait_until(number, "CANCELLED")[0]["Restarts"] == "0"


@long
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


@long
def test_what_this_cluster_does_not_have(cluster: Cluster):
    recipe = cluster.recipe("lacking", slurm=SLEEP)
    for flags, code, says in (
        (["--partition", "nowhere"], 1, "set slurm.partition: test"),
        (["--nodes", "4"], 1, "at most 2"),
        (["--slurm.mem", "999G"], 1, "2 with 0 GPUs, 4 cores and 16000 MiB"),
        (["--slurm.extra", "[--reservation=none]"], 2, "Requested reservation is invalid"),
    ):
        done = cluster.run("lit-fsdp", "slurm", "submit", "--config", str(recipe), *flags)
        assert (done.returncode, done.stdout) == (code, ""), done.stderr
        assert says in done.stderr
