"""Jobs on a real SLURM: two nodes, preemption, requeue, failures."""

from __future__ import annotations

import json
import os

import pytest

from tests.slurm.conftest import Cluster, losses

pytestmark = pytest.mark.timeout(600)
only_long = pytest.mark.skipif(not os.environ.get("LIT_FSDP_LONG"), reason="in make test-long")


def test_two_nodes_with_two_processes_each_finish_and_export(cluster: Cluster):
    recipe = cluster.recipe("wide", trainer={"devices": 2, "max_steps": 4})
    done = cluster.run("lit-fsdp", "slurm", "submit", "--config", str(recipe), "--wait")
    assert done.returncode == 0, done.stderr + cluster.logs()
    assert "step 4/4" in done.stderr  # rank 0 was followed
    number = done.stdout.strip()
    audit = json.loads((cluster.folder / "wide" / "audit.json").read_text())
    assert audit["shard_degree"] == 4
    ranks = sorted(path.name for path in (cluster.folder / "wide" / "slurm").glob("*.rank-*.log"))
    assert ranks == [f"{number}.rank-{rank}.log" for rank in range(4)]
    nodes = cluster.states(number)[0]["NodeList"]
    assert nodes == "node[1-2]"
    checkpoint = cluster.folder / "wide" / "checkpoints" / "step-00000004"
    exported = cluster.run("lit-fsdp", "export", "--ckpt", str(checkpoint), "--out", str(cluster.folder / "model"))
    assert exported.returncode == 0, exported.stderr
    assert (cluster.folder / "model" / "config.json").is_file()


def test_a_signal_saves_requeues_and_the_losses_are_those_of_a_run_without_one(cluster: Cluster):
    whole, stopped = cluster.recipe("whole"), cluster.recipe("stopped")
    first = cluster.submit(whole)
    cluster.wait_until(first, "COMPLETED")
    second = cluster.submit(stopped)
    cluster.wait_for_step("stopped", 5)
    assert cluster.run("scancel", "--signal=USR1", second).returncode == 0
    state = cluster.wait_until(second, "COMPLETED")[0]
    assert (state["Restarts"], state["ExitCode"]) == ("1", "0:0")
    assert losses(cluster.folder / "stopped") == losses(cluster.folder / "whole")
    assert len(losses(cluster.folder / "whole")) == 40
    status = cluster.run("lit-fsdp", "slurm", "status", str(cluster.folder / "stopped"))
    assert "COMPLETED" in status.stdout
    assert "restarts 1" in status.stdout


def test_a_job_that_fails_is_not_tried_again(cluster: Cluster):
    recipe = cluster.recipe("failing", data={"train": "no_such_file.jsonl"})
    done = cluster.run("lit-fsdp", "slurm", "submit", "--config", str(recipe), "--wait")
    assert done.returncode not in (0, 75), done.stderr
    state = cluster.states(done.stdout.strip())[0]
    assert (state["JobState"], state["Restarts"]) == ("FAILED", "0")
    assert "no_such_file.jsonl" in done.stderr


def test_a_cancelled_job_stays_cancelled_and_a_second_one_is_refused_until_then(cluster: Cluster):
    recipe = cluster.recipe("cancelled", trainer={"max_steps": 2000})
    number = cluster.submit(recipe)
    cluster.wait_for_step("cancelled", 2)
    again = cluster.run("lit-fsdp", "slurm", "submit", "--config", str(recipe))
    assert again.returncode == 2
    assert number in again.stderr
    assert cluster.run("lit-fsdp", "slurm", "cancel", str(cluster.folder / "cancelled")).returncode == 0
    state = cluster.wait_until(number, "CANCELLED", "FAILED", "COMPLETED")[0]
    assert (state["JobState"], state["Restarts"]) == ("CANCELLED", "0")


@only_long
def test_an_array_of_two_seeds(cluster: Cluster):
    recipe = cluster.recipe("seeds", trainer={"num_nodes": 1, "max_steps": 3}, slurm={"seeds": [3, 9]})
    cluster.wait_until(cluster.submit(recipe), "COMPLETED")
    found = {seed: losses(cluster.folder / "seeds" / f"seed-{seed}") for seed in (3, 9)}
    assert len(found[3]) == len(found[9]) == 3
    assert found[3] != found[9]


@only_long
def test_a_requeue_by_the_operator_goes_on_from_the_last_checkpoint(cluster: Cluster):
    recipe = cluster.recipe("operator", trainer={"max_steps": 60})
    number = cluster.submit(recipe)
    cluster.wait_for_step("operator", 12)
    assert cluster.run("scontrol", "requeue", number).returncode == 0
    state = cluster.wait_until(number, "COMPLETED")[0]
    assert state["Restarts"] == "1"
    assert len(losses(cluster.folder / "operator")) == 60


@only_long
def test_a_node_that_goes_down_costs_one_interval(cluster: Cluster):
    recipe = cluster.recipe("node", trainer={"max_steps": 60})
    number = cluster.submit(recipe)
    cluster.wait_for_step("node", 12)
    cluster.run("scontrol", "update", "NodeName=node2", "State=DOWN", "Reason=test")
    cluster.wait_until(number, "PENDING", "CONFIGURING")
    cluster.run("scontrol", "update", "NodeName=node2", "State=RESUME")
    assert int(cluster.wait_until(number, "COMPLETED")[0]["Restarts"]) >= 1
    assert len(losses(cluster.folder / "node")) == 60


@only_long
def test_ten_preemptions_in_a_row_lose_nothing(cluster: Cluster):
    recipe = cluster.recipe("soak", trainer={"max_steps": 80}, slurm={"max_requeues": 10})
    number = cluster.submit(recipe)
    for restart in range(10):
        cluster.wait_for_step("soak", 5 + 6 * restart)
        cluster.run("scancel", "--signal=USR1", number)
        cluster.wait_until(number, "PENDING")
        cluster.wait_until(number, "RUNNING")
    state = cluster.wait_until(number, "COMPLETED")[0]
    assert state["Restarts"] == "10"
    found = losses(cluster.folder / "soak")
    assert len(found) == 80
    assert len(list((cluster.folder / "soak" / "checkpoints").iterdir())) <= 3


def test_the_nodes_are_compared_before(cluster: Cluster):
    recipe = cluster.recipe("probed", trainer={"max_steps": 1})
    done = cluster.run("lit-fsdp", "slurm", "submit", "--config", str(recipe), "--probe")
    assert done.returncode == 0, done.stderr
    assert "2 nodes agree: Python" in done.stderr
    cluster.run("lit-fsdp", "slurm", "cancel", done.stdout.strip())
