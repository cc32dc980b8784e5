"""``srun lit-fsdp doctor`` on two nodes of a real SLURM: all that were started take part, and one reports."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.conftest import Cluster

pytestmark = pytest.mark.timeout(600)
_DOCTOR = [sys.executable, "-m", "lit_fsdp", "doctor", "--json"]


def started(cluster: Cluster, recipe: Path, *words: str, tasks: int = 1) -> tuple[int, dict[str, Any], str]:
    """Exit code, report and standard error of a doctor on two nodes."""
    done = cluster.run("srun", "--nodes=2", f"--ntasks-per-node={tasks}", *words, "--config", str(recipe))
    assert done.stdout.startswith("{"), done.stderr
    return done.returncode, json.loads(done.stdout), done.stderr


def test_all_tasks_of_two_nodes_measure_and_save(cluster: Cluster):
    recipe = cluster.recipe("examined", trainer={"devices": 2})
    code, report, err = started(cluster, recipe, *_DOCTOR, tasks=2)
    rows = {row["name"]: row for row in report["rows"]}
    assert code == report["exit_code"], err
    assert rows["ranks"]["found"] == "4 on node1, node2"
    for name in ("shared run folder", "trial save"):
        assert rows[name]["grade"] == "ok", rows[name]
    assert "by 4 rank(s)" in rows["trial save"]["found"]
    assert {rate["ranks"] for rate in report["rates"]} == {4}
    assert not list(cluster.folder.glob(".lit-fsdp-doctor-*"))
    assert not (cluster.folder / "examined").exists()


def test_a_node_that_sees_another_folder_is_named(cluster: Cluster):
    hidden = cluster.folder / "hidden"
    hidden.mkdir()
    recipe = cluster.recipe("blind", trainer={"default_root_dir": str(hidden / "run")})
    mounted = f'[ "$SLURM_NODEID" = 0 ] || mount -t tmpfs lit_fsdp_test {hidden}; exec "$@"'
    words = ["unshare", "--mount", "--propagation", "private", "bash", "-c", mounted, "_"]
    code, report, _ = started(cluster, recipe, *words, *_DOCTOR)
    rows = {row["name"]: row for row in report["rows"]}
    assert code == 1
    assert rows["shared run folder"]["grade"] == "fail"
    assert rows["shared run folder"]["found"].endswith("is not the same on node2")
    assert report["rates"] == []  # nothing was started that would have waited
    assert os.listdir(hidden) == []
