"""``srun lit-fsdp doctor`` on two nodes of a real SLURM: all that were started take part, and one reports."""

from __future__ import annotations

import json
import os
import sys

import pytest

from tests.slurm.conftest import Cluster

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.long("ranks that say they are on two nodes are in tests/dist, without SLURM"),
]
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
