"""srun and torchrun by hand, without a script of ours: the same losses, and ``doctor``."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import pytest

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
        ("torchrun-in-srun", 2, [*SALLOC, *one_each, *TORCHRUN, *meet, "-m", "lit_fsdp"]),
        ("second-node-alone", 1, [*SALLOC, "srun", "--nodelist=node2", "--nodes=1", "--ntasks=2", *LIT_FSDP]),
        ("shell", 1, ["srun", "--job-name=bash", "--nodes=1", "--ntasks=1", *LIT_FSDP]),
        ("torchrun", 1, ["srun", "--nodes=1", "--ntasks=1", *TORCHRUN, "--standalone", "-m", "lit_fsdp"]),
    ):
        done = cluster.run(*words, *fit(cluster, name, num_nodes=nodes))
        assert done.returncode == 0, done.stdout + done.stderr
        assert losses(cluster.folder / name) == pytest.approx(wanted, rel=1e-5), name


def test_a_node_that_sees_another_folder_is_named_by_doctor(cluster: Cluster):
    hidden = cluster.folder / "hidden"
    hidden.mkdir()
    recipe = cluster.recipe("blind", trainer={"default_root_dir": str(hidden / "run")})
    mounted = f'[ "$SLURM_NODEID" = 0 ] || mount -t tmpfs lit_fsdp_test {hidden}; exec "$@"'
    words = ["unshare", "--mount", "--propagation", "private", "bash", "-c", mounted, "_", *LIT_FSDP]
    doctor = ("doctor", "--json", "--config", str(recipe))
    report = json.loads(cluster.run("srun", "--nodes=2", "--ntasks-per-node=1", *words, *doctor).stdout)
    (row,) = (row for row in report["rows"] if row["name"] == "shared run folder")
    assert (row["grade"], row["found"].endswith("is not shared with node2")) == ("fail", True)
    assert report["rates"] == []  # nothing was started that would have waited
    assert os.listdir(hidden) == []
