"""Every fragment for a cluster goes with every recipe, and flags win over both."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from lit_fsdp.config.parser import load_recipe
from lit_fsdp.errors import ConfigError
from lit_fsdp.launch.slurm_job import plan_job, render

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("fragment", sorted((ROOT / "configs" / "slurm").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_fragment_goes_with_every_recipe(fragment: Path):
    own = yaml.safe_load(fragment.read_text())["slurm"]
    for recipe in RECIPES:
        run = load_recipe(["--config", str(recipe), "--config", str(fragment), "--slurm.qos", "night"], "fit").run
        assert run.slurm.qos == "night"
        for key, value in own.items():
            assert getattr(run.slurm, key) == value
        if run.trainer["devices"] != own.get("gpus_per_node", run.trainer["devices"]):
            with pytest.raises(ConfigError, match=r"slurm\.gpus_per_node: got 8 with trainer\.devices"):
                plan_job(run)  # the recipe is for another number of GPUs per node
            continue
        script = render(plan_job(run))
        for name, value in (own.get("env") or {}).items():
            assert f"export {name}=" in script
            assert value in script
        assert ("container-image" in script or "apptainer exec" in script) is ("container" in own)
