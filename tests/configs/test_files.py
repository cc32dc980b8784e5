"""Every YAML file that ships: it parses, its keys exist, and it combines with what it is meant for."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer

from lit_fsdp.config.data import DataConfig, accumulation_steps
from lit_fsdp.config.model import ModelConfig
from lit_fsdp.config.parser import (
    LoadedRecipe,
    build,
    leaves,
    load_recipe,
    load_yaml,
    parse,
    read_yaml,
    recipe_parser,
    strategy_config,
)
from lit_fsdp.config.run import FACTORY, CheckpointConfig, ResumeConfig
from lit_fsdp.config.slurm import SlurmConfig

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
FRAGMENTS = sorted((ROOT / "configs").rglob("*.yaml"))
SMOKE = ROOT / "configs" / "debug" / "smoke.yaml"
TRAINER_KEYS = set(inspect.signature(Trainer.__init__).parameters) - {"self"}
SECTIONS = {"seed_everything", "trainer", "model", "data", "checkpoint", "resume", "slurm"}

recipes = pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
fragments = pytest.mark.parametrize("fragment", FRAGMENTS, ids=lambda path: f"{path.parent.name}/{path.stem}")


def _loaded(*files: Path, flags: tuple[str, ...] = ()) -> LoadedRecipe:
    return load_recipe([*(f"--config={file}" for file in files), *flags], "fit")


def read_values(words: list[str]) -> dict[str, Any]:
    """What the parser makes of them, before any rule."""
    values = parse(recipe_parser(), words).as_dict()
    return {name: section for name, section in values.items() if name != "config"}


def test_the_recipes_and_fragments_that_are_promised_are_there():
    names = {path.stem for path in RECIPES}
    assert names >= {
        "quickstart",
        "smollm2-135m_full_fsdp2_2xcpu",
        "llama3.1-70b_full_fsdp2_32x80gb",
        "llama3.1-70b_full_fsdp2-hybrid_32x80gb",
        "llama3.1-70b_full_fsdp2_64x80gb",
        "llama3.1-70b_full_fsdp2-hybrid_64x80gb",
    }
    on_one_node = {name.split("_")[0] for name in names if name.endswith(("_8x80gb", "_8x24gb"))}
    assert on_one_node == {name.split("_")[0] for name in names} - {"quickstart"}
    folders = {path.parent.name for path in FRAGMENTS}
    assert folders >= {"activation", "data", "debug", "engine", "hardware", "network", "precision", "sharding"}


@pytest.mark.parametrize("file", RECIPES + FRAGMENTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_key_exists_and_every_section_builds(file: Path):
    values = read_yaml(file)
    assert set(values) <= SECTIONS
    trainer = values.get("trainer", {})
    assert set(trainer) <= TRAINER_KEYS
    strategy = trainer.get("strategy", {})
    assert set(strategy) <= {"class_path", "init_args"}
    assert strategy.get("class_path", FACTORY) == FACTORY
    given = strategy.get("init_args", {})
    built = strategy_config(given, "trainer.strategy.init_args")
    words = {key: value for key, value in given.items() if not isinstance(value, (dict, list))}
    assert {key: getattr(built, key) for key in words} == words
    for name, config in (
        ("model", ModelConfig),
        ("data", DataConfig),
        ("checkpoint", CheckpointConfig),
        ("resume", ResumeConfig),
        ("slurm", SlurmConfig),
    ):
        section = build(config, values.get(name) or {}, name)
        plain = {key: value for key, value in values.get(name, {}).items() if not isinstance(value, dict)}
        assert {key: getattr(section, key) for key in plain} == plain


@recipes
def test_a_recipe_passes_every_rule(recipe: Path):
    run = _loaded(recipe).run
    assert run.strategy.sharding == ("hybrid_shard" if "-hybrid_" in recipe.stem else "full_shard")
    assert run.world_size is not None
    assert run.trainer["default_root_dir"] == f"runs/{recipe.stem}"


@recipes
def test_a_recipe_is_named_for_what_it_does(recipe: Path):
    run = _loaded(recipe).run
    if recipe.stem == "quickstart":
        assert (run.trainer["accelerator"], run.trainer["devices"]) == ("auto", 2)
        return
    model, method, engine, hardware = recipe.stem.split("_")
    plain = re.sub(r"[^a-z0-9.]", "", str(run.model.name).lower())
    assert model.replace("-", "") in plain
    assert method == "full"
    assert engine == run.strategy.engine + "-hybrid" * run.strategy.sharding.startswith("hybrid")
    assert hardware.startswith(f"{run.world_size}x")
    assert ("cpu" in hardware) == (run.trainer["accelerator"] == "cpu")


@recipes
def test_the_smoke_fragment_fits_every_recipe(recipe: Path):
    before, run = _loaded(recipe).run, _loaded(recipe, SMOKE).run
    assert run.model.miniature
    assert run.model.name == before.model.name
    assert (run.trainer["accelerator"], run.world_size, run.trainer["max_steps"]) == ("cpu", 2, 4)
    # a model that is there on disk keeps its vocabulary, and the root more of the parameters
    assert dataclasses.replace(run.strategy, wrap=before.strategy.wrap) == before.strategy
    assert run.model.optim.lr == before.model.optim.lr
    assert {run.data.train, run.data.val, run.data.test, run.data.predict} == {"generated:64", "generated:16"}
    # validation after every `val_check_interval` micro-batches, and there are that many in an epoch
    steps = accumulation_steps(run.data, 2)
    assert run.trainer["val_check_interval"] == 2 * steps <= 64 // 2


@fragments
def test_a_fragment_changes_only_its_own_keys(fragment: Path):
    base = RECIPES[0]
    before, after = (
        dict(leaves(read_values([f"--config={file}" for file in files]))) for files in ((base,), (base, fragment))
    )
    changed = {_option(key) for key, _ in leaves(load_yaml(fragment.read_text(encoding="utf-8")))}
    assert {_option(key) for key in after if before.get(key) != after[key]} <= changed
    assert after["trainer.strategy.class_path"] == FACTORY


@pytest.mark.parametrize("word", ["full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2"])
def test_sharding_fragments_replace_each_other(word: str):
    flags = ("--trainer.strategy.init_args.replicate_degree", "4")
    hybrid = ROOT / "configs" / "sharding" / "hybrid_shard.yaml"
    first = _loaded(RECIPES[0], hybrid, ROOT / "configs/hardware/8xgpu.yaml", flags=flags).run
    assert (first.strategy.sharding, first.strategy.replicate_degree) == ("hybrid_shard", 4)
    again = ROOT / "configs" / "sharding" / f"{word}.yaml"
    flags = ("--trainer.num_nodes", "2", "--data.global_batch_size", "64")
    run = _loaded(RECIPES[0], hybrid, again, flags=flags).run
    assert (run.strategy.sharding, run.strategy.replicate_degree) == (word, None)


@pytest.mark.parametrize("kind", ["precision", "activation", "engine"])
def test_each_word_has_its_fragment(kind: str):
    key = {"activation": "activation_checkpointing"}.get(kind, kind)
    words = {
        "precision": ["auto", "mixed", "low_precision", "fp32", "fp16_mixed", "fp8"],
        "activation": ["none", "full", "every_n", "selective"],
        "engine": ["fsdp2", "fsdp1", "ddp", "single"],
    }[kind]
    for word in words:
        run = _loaded(RECIPES[0], ROOT / "configs" / kind / f"{word}.yaml").run
        found = getattr(run.strategy, key)
        assert getattr(found, "mode", found) == word


def test_data_fragments_show_a_row_of_their_format():
    columns = {
        "messages": ["messages"],
        "sharegpt": ["conversations"],
        "instruction": ["instruction", "input", "output"],
        "prompt_completion": ["prompt", "completion"],
    }
    for name, expected in columns.items():
        file = ROOT / "configs" / "data" / f"{name}.yaml"
        rows = [line.lstrip("# ") for line in file.read_text(encoding="utf-8").splitlines() if line.startswith("#   {")]
        assert [list(json.loads(row)) for row in rows] == [expected]
        assert read_yaml(file) == {"data": {"format": name}}


def _option(key: str) -> str:
    """A key of a recipe, without those of a mapping that a word is short for."""
    return ".".join(key.split(".")[:4])
