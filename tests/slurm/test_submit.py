"""``submit --wait`` and ``cancel`` on a real SLURM, where the steps are nothing but shells."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.conftest import Cluster

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not os.environ.get("LIT_FSDP_LONG"), reason="in make test-long"),
]


def shell(cluster: Cluster, name: str, line: str, **slurm: Any) -> Path:
    """A recipe whose processes are a line of shell."""
    return cluster.recipe(name, trainer={"num_nodes": 1}, slurm={"command": ["bash", "-c", line], **slurm})


def test_of_an_array_the_worst_exit_code_is_ours(cluster: Cluster):
    recipe = shell(
        cluster, "array", 'echo "task $SLURM_ARRAY_TASK_ID"; exit $((SLURM_ARRAY_TASK_ID * 3))', seeds=[5, 6]
    )
    done = cluster.run("lit-fsdp", "slurm", "submit", "--config", str(recipe), "--wait")
    assert done.returncode == 3, done.stderr
    assert all(f"task {task}\n" in done.stderr for task in range(2))
    number = done.stdout.strip()
    status = cluster.run("lit-fsdp", "slurm", "status", f"{number}_1")
    assert f"job {number}_1  FAILED" in status.stdout


def test_a_job_that_is_cancelled_from_outside(cluster: Cluster):
    recipe = shell(cluster, "outside", "touch begun; exec sleep 600")
    words = [sys.executable, "-m", "lit_fsdp", "slurm", "submit", "--config", str(recipe), "--wait"]
    with subprocess.Popen(words, env=cluster.env, cwd=cluster.folder, stdout=subprocess.PIPE, text=True) as waiting:
        assert waiting.stdout is not None
        number = waiting.stdout.readline().strip()
        cluster.wait_until(number, "RUNNING")
        assert cluster.run("scancel", number).returncode == 0
        assert waiting.wait(120) not in (0, 75)
    again = cluster.run("lit-fsdp", "slurm", "cancel", number)
    assert (again.returncode, "has ended already" in again.stderr) == (0, True)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--partition", "nowhere"], "set slurm.partition: test"),
        (["--nodes", "4"], "at most 2"),
        (["--slurm.extra", "[--reservation=none]"], "Requested reservation is invalid"),
        (["--slurm.extra", "[--exclusive --ntasks=8]"], "drop --ntasks"),
    ],
)
def test_what_this_cluster_does_not_have(cluster: Cluster, flags: list[str], says: str):
    recipe = shell(cluster, "refused", "true")
    done = cluster.run("lit-fsdp", "slurm", "submit", "--config", str(recipe), *flags)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert "Traceback" not in done.stderr
