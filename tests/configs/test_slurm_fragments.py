"""Every fragment for a cluster goes with every recipe, and flags win over both."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from lit_fsdp.config.parser import check_recipe, read_recipe
from lit_fsdp.errors import ConfigError
from lit_fsdp.launch.slurm_job import plan_job, put_job_size
from lit_fsdp.launch.slurm_script import render

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
FRAGMENTS = sorted((ROOT / "configs" / "slurm").glob("*.yaml"))


@pytest.mark.parametrize("fragment", FRAGMENTS, ids=lambda path: path.stem)
def test_a_fragment_goes_with_every_recipe(fragment: Path):
    own = yaml.safe_load(fragment.read_text())["slurm"]
    for recipe in RECIPES:
        values = read_recipe(["--config", str(recipe), "--config", str(fragment), "--slurm.qos", "night"]).values
        values.setdefault("trainer", {}).setdefault("default_root_dir", "/shared/run")
        run = check_recipe(values, "fit")
        assert run.slurm.qos == "night"
        for key, value in own.items():
            assert getattr(run.slurm, key) == value
        devices = values["trainer"]["devices"]
        if devices != own.get("gpus_per_node", devices):  # the recipe is for another number of GPUs per node
            with pytest.raises(
                ConfigError, match=rf"slurm\.gpus_per_node: got 8 with trainer\.(devices {devices}|acc)"
            ):
                plan_job(values, run.slurm)
            continue
        script = render(plan_job(values, run.slurm))
        for name, value in (own.get("env") or {}).items():
            assert f"export {name}=" in script
            assert value in script
        assert ("container-image" in script or "apptainer exec" in script) is ("container" in own)


def test_flags_give_a_recipe_the_size_of_the_cluster():
    recipe = ROOT / "recipes" / "llama3.2-1b_full_fsdp2_2x24gb.yaml"
    values = read_recipe(["--config", str(recipe), "--config", str(ROOT / "configs/slurm/gpu_nodes.yaml")]).values
    with pytest.raises(ConfigError, match=r"slurm\.gpus_per_node"):
        plan_job(values, check_recipe(values, "fit").slurm)
    put_job_size(values, nodes=2, gpus_per_node=8)
    job = plan_job(values, check_recipe(values, "fit").slurm)
    assert (job.nodes, job.gpus_per_node, job.world_size) == (2, 8, 16)
