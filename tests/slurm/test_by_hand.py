"""srun by hand, without a script of ours: the same recipe, the same losses, wrong mixtures refused by all ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lit_fsdp.checkpoint.run_folder import checkpoints
from tests.slurm.conftest import Cluster, losses

pytestmark = pytest.mark.timeout(600)
only_long = pytest.mark.skipif(not os.environ.get("LIT_FSDP_LONG"), reason="in make test-long")
LIT_FSDP = [sys.executable, "-m", "lit_fsdp"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
STEPS = 4


def fit(cluster: Cluster, name: str, engine: str = "fsdp2", **trainer: Any) -> list[str]:
    """The words after ``lit-fsdp``."""
    strategy = {"class_path": "lit_fsdp.fsdp_strategy", "init_args": {"engine": engine, "precision": "fp32"}}
    changes = {"max_steps": STEPS, "devices": 2, "strategy": strategy, **trainer}
    return ["fit", "--config", str(cluster.recipe(name, trainer=changes, checkpoint={"every_steps": None}))]


def plain(cluster: Cluster, name: str, engine: str = "fsdp2") -> dict[int, float]:
    """Losses on two processes that Lightning starts on one node."""
    done = cluster.run("lit-fsdp", *fit(cluster, name, engine, num_nodes=1))
    assert done.returncode == 0, done.stderr
    return losses(cluster.folder / name)


def test_srun_in_an_interactive_allocation_trains_as_one_node_does(cluster: Cluster) -> None:
    """salloc names its jobs ``interactive``, by which Lightning would start two processes in each of the four tasks."""
    words = ["salloc", "--nodes=2", "--ntasks-per-node=2", "srun", *LIT_FSDP, *fit(cluster, "hand")]
    done = cluster.run(*words)
    assert done.returncode == 0, done.stderr
    found = losses(cluster.folder / "hand")
    assert len(found) == STEPS
    assert found == pytest.approx(plain(cluster, "plain"), rel=1e-5)


BATCH = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=2 --output={log} --time=10
export PYTHONPATH={path}
{lines}
"""


def batch(cluster: Cluster, name: str, lines: str) -> subprocess.CompletedProcess[str]:
    """A job whose script somebody wrote by hand, to its end."""
    script = cluster.folder / f"{name}.sh"
    log = cluster.folder / f"{name}.out"
    script.write_text(BATCH.format(log=log, path=cluster.env["PYTHONPATH"], lines=lines))
    done = cluster.run("sbatch", "--wait", str(script))
    assert log.is_file(), done.stderr
    return subprocess.CompletedProcess(done.args, done.returncode, log.read_text(), done.stderr)


@only_long
@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1"])
@pytest.mark.parametrize(
    "how",
    ["srun", "srun --ntasks=4 --nodes=2", "torchrun in srun", "second node alone", "shell", "torchrun"],
)
def test_every_launch_gives_the_same_losses(cluster: Cluster, engine: str, how: str) -> None:
    name = f"{how.replace(' ', '_')}-{engine}"
    nodes = 1 if how in ("second node alone", "shell", "torchrun") else 2
    words = fit(cluster, name, engine, num_nodes=nodes)
    ours = " ".join([*LIT_FSDP, *words])
    lines = f"srun {ours}"
    if how.startswith("srun --ntasks"):
        lines = f"{how} {ours}"
    elif how == "torchrun in srun":
        meet = '--rdzv-backend c10d --rdzv-endpoint "$(scontrol show hostnames | head -n 1):29455" --rdzv-id x'
        lines = (
            f"srun --ntasks-per-node=1 --ntasks=2 {' '.join(TORCHRUN)} --nnodes 2 {meet} -m lit_fsdp {' '.join(words)}"
        )
    elif how == "second node alone":
        lines = f"srun --nodelist=node2 --nodes=1 --ntasks=2 {ours}"
    if nodes == 1 and how != "second node alone":
        line = [*TORCHRUN, "--standalone", "-m", "lit_fsdp"] if how == "torchrun" else LIT_FSDP
        shell = ["srun", "--job-name=bash", "--nodes=1", "--ntasks=1", "bash", "-c", " ".join([*line, *words])]
        done = cluster.run(*shell)
    else:
        done = batch(cluster, name, lines)
    assert done.returncode == 0, done.stdout + done.stderr
    found = losses(cluster.folder / name)
    assert len(found) == STEPS
    reference = cluster.folder / f"reference-{engine}"
    wanted = losses(reference) if reference.is_dir() else plain(cluster, reference.name, engine)
    assert found == pytest.approx(wanted, rel=1e-5)


WRONG = {
    # words of srun, changes of the recipe, field, part of the fix; in an allocation of 2 × 2
    "fewer tasks": (["--ntasks=2", "--nodes=2"], {}, "trainer.devices", "--ntasks-per-node=2"),
    "uneven": (["--ntasks=3", "--nodes=2"], {"devices": "auto"}, "SLURM_STEP_TASKS_PER_NODE", "--ntasks-per-node=1"),
    "cyclic": (["--distribution=cyclic"], {}, "SLURM_DISTRIBUTION", "--distribution=block"),
}


@pytest.mark.parametrize(
    "case", ["fewer tasks", *(pytest.param(c, marks=only_long) for c in WRONG if c != "fewer tasks")]
)
def test_a_wrong_mixture_is_refused_by_every_rank(cluster: Cluster, case: str) -> None:
    flags, changes, field, fix = WRONG[case]
    words = [*LIT_FSDP, *fit(cluster, f"wrong-{case.replace(' ', '_')}", **changes)]
    done = cluster.run("salloc", "--nodes=2", "--ntasks-per-node=2", "-J", "train", "srun", *flags, *words, timeout=400)
    assert done.returncode == 2, done.stderr
    said = [line for line in done.stderr.splitlines() if f"error: {field}: " in line]
    tasks = next((int(flag.partition("=")[2]) for flag in flags if flag.startswith("--ntasks=")), 4)
    assert len(said) == tasks, done.stderr  # every rank refuses by itself
    assert fix in done.stderr
    assert "Exited with exit code 2" in done.stderr


def test_every_rank_refuses_a_used_run_folder_by_itself(cluster: Cluster) -> None:
    """None waits for one that has ended already."""
    name = "used"
    done = cluster.run("lit-fsdp", *fit(cluster, name, num_nodes=1, devices=1, max_steps=1))
    assert done.returncode == 0, done.stderr
    line = ["salloc", "--nodes=2", "--ntasks-per-node=2", "srun", "--kill-on-bad-exit=0"]
    again = cluster.run(*line, *LIT_FSDP, *fit(cluster, name), timeout=200)
    assert again.returncode == 2, again.stderr
    assert again.stderr.count("which holds 1 checkpoint(s)") == 4


ONE_TASK = """#!/bin/bash
#SBATCH --nodes=1 --output={log} --time=10 --signal=B:USR1@60 {more}
export PYTHONPATH={path}
exec {words}
"""


@pytest.mark.parametrize("more", ["--cpus-per-task=2", pytest.param("--ntasks=1", marks=only_long)])
def test_one_task_starts_two_ranks_and_both_hear_a_signal(cluster: Cluster, more: str) -> None:
    """The second one inherits SLURM_PROCID=0; the checkpoint is committed while both are on their way out."""
    name = f"one{more.partition('=')[0]}"
    recipe = cluster.recipe(
        name, trainer={"num_nodes": 1, "devices": 2, "max_steps": 4000}, checkpoint={"async_save": True}
    )
    script, log = cluster.folder / f"{name}.sh", cluster.folder / f"{name}.out"
    words = " ".join([*LIT_FSDP, "fit", "--config", str(recipe)])
    script.write_text(ONE_TASK.format(log=log, path=cluster.env["PYTHONPATH"], words=words, more=more))
    number = cluster.run("sbatch", "--parsable", str(script)).stdout.strip()
    cluster.wait_for_step(name, 3)
    assert cluster.run("scancel", "--batch", "--signal=USR1", number).returncode == 0
    (state,) = cluster.wait_until(number, "FAILED")
    assert state["ExitCode"] == "75:0", log.read_text()
    assert log.read_text().count("stopped by a signal after step") == 1
    newest = checkpoints(cluster.folder / name)[-1].step
    assert newest == max(losses(cluster.folder / name)) + 1


def test_the_shell_of_an_allocation_is_no_place_for_two_nodes(cluster: Cluster) -> None:
    line = ["salloc", "--nodes=2", "--ntasks-per-node=2", *LIT_FSDP, *fit(cluster, "shell-of-two")]
    done = cluster.run(*line, timeout=400)
    assert done.returncode == 2, done.stderr
    assert "MASTER_ADDR, MASTER_PORT, NODE_RANK not set" in done.stderr
    assert not Path(cluster.folder, "shell-of-two").exists()
