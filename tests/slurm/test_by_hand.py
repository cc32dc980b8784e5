"""srun and torchrun by hand, without a script of ours: the same losses, wrong mixtures refused, and ``doctor``."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import pytest

from lit_fsdp.checkpoint.run_folder import checkpoints
from tests.runs import losses
from tests.slurm.conftest import Cluster

pytestmark = [pytest.mark.timeout(600), pytest.mark.long("the same launch as that of a submitted job, typed by hand")]
LIT_FSDP = [sys.executable, "-m", "lit_fsdp"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
SALLOC = ["salloc", "--nodes=2", "--ntasks-per-node=2"]
STEPS = 4


def fit(cluster: Cluster, name: str, **trainer: Any) -> list[str]:
    """The words after ``lit-fsdp``."""
    strategy = {"class_path": "lit_fsdp.fsdp_strategy", "init_args": {"precision": "fp32"}}
    changes = {"max_steps": STEPS, "devices": 2, "strategy": strategy, **trainer}
    return ["fit", "--config", str(cluster.recipe(name, trainer=changes, checkpoint={"every_steps": None}))]


def test_every_launch_gives_the_same_losses(cluster: Cluster) -> None:
    """salloc names its jobs ``interactive``, by which Lightning would start two processes in each of the four tasks."""
    done = cluster.run("lit-fsdp", *fit(cluster, "plain", num_nodes=1))
    assert done.returncode == 0, done.stderr
    wanted = losses(cluster.folder / "plain")
    assert len(wanted) == STEPS
    meet = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "node1:29455", "--rdzv-id", "x"]
    one_each = ["srun", "--ntasks=2", "--ntasks-per-node=1"]
    for name, nodes, words in (
        ("srun", 2, [*SALLOC, "srun", *LIT_FSDP]),
        ("torchrun in srun", 2, [*SALLOC, *one_each, *TORCHRUN, *meet, "-m", "lit_fsdp"]),
        ("second node alone", 1, [*SALLOC, "srun", "--nodelist=node2", "--nodes=1", "--ntasks=2", *LIT_FSDP]),
        ("shell", 1, ["srun", "--job-name=bash", "--nodes=1", "--ntasks=1", *LIT_FSDP]),
        ("torchrun", 1, ["srun", "--nodes=1", "--ntasks=1", *TORCHRUN, "--standalone", "-m", "lit_fsdp"]),
    ):
        done = cluster.run(*words, *fit(cluster, name.replace(" ", "_"), num_nodes=nodes))
        assert done.returncode == 0, done.stdout + done.stderr
        assert losses(cluster.folder / name.replace(" ", "_")) == pytest.approx(wanted, rel=1e-5), name


def test_a_wrong_mixture_is_refused_by_every_rank(cluster: Cluster) -> None:
    """None waits for one that has ended already."""
    for flags, tasks, field, fix in (
        (["--ntasks=2", "--nodes=2"], 2, "trainer.devices", "--ntasks-per-node=2"),
        (["--distribution=cyclic"], 4, "SLURM_DISTRIBUTION", "--distribution=block"),
    ):
        done = cluster.run(*SALLOC, "-J", "train", "srun", *flags, *LIT_FSDP, *fit(cluster, "wrong"), timeout=400)
        assert done.returncode == 2, done.stderr
        assert len([line for line in done.stderr.splitlines() if f"error: {field}: " in line]) == tasks, done.stderr
        assert fix in done.stderr
    done = cluster.run(*SALLOC, *LIT_FSDP, *fit(cluster, "shell-of-two"), timeout=400)
    assert done.returncode == 2, done.stderr
    assert "MASTER_ADDR, MASTER_PORT, NODE_RANK not set" in done.stderr


ONE_TASK = """#!/bin/bash
#SBATCH --nodes=1 --ntasks=1 --output={log} --time=10 --signal=B:USR1@60
export PYTHONPATH={path}
exec {words}
"""


def test_one_task_starts_two_ranks_and_both_hear_a_signal(cluster: Cluster) -> None:
    """The second one inherits SLURM_PROCID=0; the checkpoint is committed while both are on their way out."""
    trainer = {"num_nodes": 1, "devices": 2, "max_steps": 4000}
    recipe = cluster.recipe("one", trainer=trainer, checkpoint={"async_save": True})
    script, log = cluster.folder / "one.sh", cluster.folder / "one.out"
    words = " ".join([*LIT_FSDP, "fit", "--config", str(recipe)])
    script.write_text(ONE_TASK.format(log=log, path=cluster.env["PYTHONPATH"], words=words))
    number = cluster.run("sbatch", "--parsable", str(script)).stdout.strip()
    cluster.wait_for_step("one", 3)
    assert cluster.run("scancel", "--batch", "--signal=USR1", number).returncode == 0
    (state,) = cluster.wait_until(number, "FAILED")
    assert state["ExitCode"] == "75:0", log.read_text()
    assert log.read_text().count("stopped by a signal after step") == 1
    assert checkpoints(cluster.folder / "one")[-1].step == max(losses(cluster.folder / "one")) + 1


DOCTOR = [sys.executable, "-m", "lit_fsdp", "doctor", "--json"]


def test_all_tasks_of_two_nodes_measure_and_save(cluster: Cluster):
    recipe = cluster.recipe("examined", trainer={"devices": 2})
    done = cluster.run("srun", "--nodes=2", "--ntasks-per-node=2", *DOCTOR, "--config", str(recipe))
    report = json.loads(done.stdout)
    rows = {row["name"]: row for row in report["rows"]}
    assert done.returncode == report["exit_code"], done.stderr
    assert rows["ranks"]["found"] == "4 on node1, node2"
    assert rows["shared run folder"]["grade"] == rows["trial save"]["grade"] == "ok"
    assert {rate["ranks"] for rate in report["rates"]} == {4}
    assert not list(cluster.folder.glob(".lit-fsdp-doctor-*"))
    assert not (cluster.folder / "examined").exists()


def test_a_node_that_sees_another_folder_is_named(cluster: Cluster):
    hidden = cluster.folder / "hidden"
    hidden.mkdir()
    recipe = cluster.recipe("blind", trainer={"default_root_dir": str(hidden / "run")})
    mounted = f'[ "$SLURM_NODEID" = 0 ] || mount -t tmpfs lit_fsdp_test {hidden}; exec "$@"'
    words = ["unshare", "--mount", "--propagation", "private", "bash", "-c", mounted, "_"]
    done = cluster.run("srun", "--nodes=2", "--ntasks-per-node=1", *words, *DOCTOR, "--config", str(recipe))
    report = json.loads(done.stdout)
    (row,) = (row for row in report["rows"] if row["name"] == "shared run folder")
    assert (done.returncode, row["grade"]) == (1, "fail")
    assert row["found"].endswith("is not the same on node2")
    assert report["rates"] == []  # nothing was started that would have waited
    assert os.listdir(hidden) == []
