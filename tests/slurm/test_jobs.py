"""Jobs on a real SLURM of two nodes, as the manual's chapter goes: rendered, submitted and used."""

from __future__ import annotations

import json

import pytest
from safetensors import safe_open

from tests.slurm.conftest import Cluster

pytestmark = pytest.mark.timeout(600)


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
    assert cluster.wait_until(number, "COMPLETED")["NodeList"] == "node[1-2]"
    assert json.loads((folder / "audit.json").read_text())["shard_degree"] == 2
    ranks = {path.name: path.read_text() for path in (folder / "slurm" / f"{number}.0").iterdir()}
    assert ranks == {**{f"exit.{rank}": "0\n" for rank in range(2)}, "saved": "\n"}
    words = ("--ckpt", str(folder / "checkpoints" / "step-00000004"), "--out", str(folder / "export"), "--verify")
    exported = cluster.run("lit-fsdp", "export", *words)
    assert exported.returncode == 0, exported.stderr
    with safe_open(folder / "export" / "model.safetensors", "pt") as weights:
        num_params = sum(weights.get_tensor(name).numel() for name in weights.keys())  # noqa: SIM118 (no mapping)
    assert num_params == json.loads((folder / "audit.json").read_text())["num_params"]
