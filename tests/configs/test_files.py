"""Every YAML file that ships: its keys exist, it passes every rule, and it combines with what it is meant for."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_fsdp.config.data import accumulation_steps
from lit_fsdp.config.parser import LoadedRecipe, load_recipe, parse, recipe_parser
from lit_fsdp.config.run import FACTORY
from lit_fsdp.config.sections import leaves
from lit_fsdp.config.yaml_files import read_yaml
from lit_fsdp.errors import ConfigError
from lit_fsdp.launch.slurm_job import plan_job, render

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
FRAGMENTS = sorted((ROOT / "configs").rglob("*.yaml"))
SMOKE = ROOT / "configs" / "debug" / "smoke.yaml"


@functools.cache  # a tenth of a second each
def _loaded(*files: Path, flags: tuple[str, ...] = ()) -> LoadedRecipe:
    return load_recipe([*(f"--config={file}" for file in files), *flags], "fit")


def test_the_smoke_fragment_fits_a_recipe_for_any_hardware():
    for recipe in {path.stem.rpartition("_")[2]: path for path in RECIPES}.values():
        before, run = _loaded(recipe).run, _loaded(recipe, SMOKE).run
        assert run.model.miniature
        assert run.model.name == before.model.name
        assert (run.trainer["accelerator"], run.world_size, run.trainer["max_steps"]) == ("cpu", 2, 4)
        # a model that is there on disk keeps its vocabulary, and the root more of the parameters
        assert dataclasses.replace(run.strategy, wrap=before.strategy.wrap) == before.strategy
        assert run.model.optim.lr == before.model.optim.lr
        assert {run.data.train, run.data.val, run.data.test, run.data.predict} == {"generated:64", "generated:16"}
        # validation after every `val_check_interval` micro-batches, and there are that many in an epoch
        assert run.trainer["val_check_interval"] == 2 * accumulation_steps(run.data, 2) <= 64 // 2


def test_every_key_of_a_fragment_exists_and_it_changes_no_other():
    def read(*files: Path) -> dict[str, Any]:
        values = parse(recipe_parser(), [f"--config={file}" for file in files]).as_dict()
        return {key: value for key, value in leaves(values) if not key.startswith("config")}

    before = read(RECIPES[0])
    for fragment in FRAGMENTS:
        after = read(RECIPES[0], fragment)
        changed = {_option(key) for key in after if before.get(key) != after[key]}
        assert changed <= {_option(key) for key, _ in leaves(read_yaml(fragment))}, fragment
        assert after["trainer.strategy.class_path"] == FACTORY


def test_sharding_fragments_replace_each_other():
    hybrid = ROOT / "configs" / "sharding" / "hybrid_shard.yaml"
    flags = ("--trainer.strategy.init_args.replicate_degree", "4")
    first = _loaded(RECIPES[0], hybrid, ROOT / "configs/hardware/8xgpu.yaml", flags=flags).run
    assert (first.strategy.sharding, first.strategy.replicate_degree) == ("hybrid_shard", 4)
    flags = ("--trainer.num_nodes", "2", "--data.global_batch_size", "64")
    for again in (ROOT / "configs" / "sharding").glob("*.yaml"):
        run = _loaded(RECIPES[0], hybrid, again, flags=flags).run
        assert (run.strategy.sharding, run.strategy.replicate_degree) == (again.stem, None)


def test_a_fragment_says_the_word_it_is_named_for():
    for kind, key in (("precision", "precision"), ("activation", "activation_checkpointing"), ("engine", "engine")):
        for fragment in (ROOT / "configs" / kind).glob("*.yaml"):
            if fragment.stem not in ("memory_budget", "offload"):  # which need the compiler, and another key beside
                found = getattr(_loaded(RECIPES[0], fragment).run.strategy, key)
                assert getattr(found, "mode", found) == fragment.stem


def test_a_fragment_for_a_cluster_goes_with_recipes_for_one_gpu_and_for_many():
    for fragment in (ROOT / "configs" / "slurm").glob("*.yaml"):
        own = yaml.safe_load(fragment.read_text())["slurm"]
        for hardware in ("1x80gb", "8x80gb"):
            run = _loaded(ROOT / "recipes" / f"llama3.1-8b_full_fsdp2_{hardware}.yaml", fragment).run
            assert {key: getattr(run.slurm, key) for key in own} == own
            if run.trainer["devices"] != own.get("gpus_per_node", run.trainer["devices"]):
                with pytest.raises(ConfigError, match=r"slurm\.gpus_per_node: got 8 with trainer\.devices"):
                    plan_job(run)  # the recipe is for another number of GPUs per node
                continue
            script = render(plan_job(run))
            assert ("container-image" in script or "apptainer exec" in script) is ("container" in own)


def _option(key: str) -> str:
    """A key of a recipe, without those of a mapping that a word is short for."""
    return ".".join(key.split(".")[:4])
