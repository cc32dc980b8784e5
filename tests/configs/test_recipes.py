"""Every recipe: its name, its first line, the machine that it names, and the job it would be."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from lit_fsdp.config.model import PreferenceModelConfig
from lit_fsdp.launch.slurm_checks import check_job
from lit_fsdp.launch.slurm_job import plan_job
from lit_fsdp.plan.memory import HOST_USABLE, host_memory, least_bytes
from lit_fsdp.plan.search import largest_rows
from tests.configs.recipe_table import GIB, README, RECIPES, checked, planned, with_table

FEW = [
    README.parent / f"{name}.yaml"
    for name in (
        "llama3.1-8b_full_fsdp2_1x80gb",  # offloaded
        "llama3.2-3b_lora_fsdp2_1x24gb",
        "llama3.1-8b_qlora_fsdp2_1x24gb",
        "smollm2-1.7b_full_fsdp2_2x24gb",
    )
]
ALL = pytest.param(RECIPES, id="all", marks=pytest.mark.long("half a second for each of 61 recipes"))


def test_a_recipe_is_short_and_named_for_what_it_does():
    for recipe in RECIPES:
        run, lines = checked(recipe), recipe.read_text(encoding="utf-8").splitlines()
        assert len(lines) <= 40, recipe.name
        title = re.fullmatch(
            r"# ([\w.-]+)(?:, its text part)? \([\d.]+[MB] parameters\), ([\w-]+) fine-tune, (.+)\.", lines[0]
        )
        assert title, recipe.name
        pairs, lora = isinstance(run.model, PreferenceModelConfig), run.model.lora
        kind = "preference" if pairs else "full" if lora is None else "QLoRA" if lora.quantize else "LoRA"
        assert (title[1], title[2]) == (str(run.model.name).rpartition("/")[2], kind), recipe.name
        model, method, engine, hardware = recipe.stem.split("_")
        assert model.replace("-", "") in re.sub(r"[^a-z0-9.]", "", str(run.model.name).lower())
        assert method == (run.model.preference.loss if pairs else kind.lower())
        sharding = "hybrid_shard" if engine.endswith("-hybrid") else "full_shard"
        assert engine.endswith("-long") == (run.strategy.context_config.degree > 1)
        plain = engine.removesuffix("-hybrid").removesuffix("-long")
        assert (plain, sharding) == (run.strategy.engine, run.strategy.sharding)
        assert run.trainer["default_root_dir"] == f"runs/{recipe.stem}"
        assert hardware.startswith(f"{run.world_size}x")
        assert ("cpu" in hardware) == (run.trainer["accelerator"] == "cpu")

        assert ("GB host" in title[3]) == run.strategy.cpu_offload


@pytest.mark.parametrize("recipes", [pytest.param(FEW, id="few"), ALL])
def test_its_state_fits_into_the_machine_that_it_names(recipes: list[Path]):
    for recipe in recipes:
        run, title = checked(recipe), recipe.read_text(encoding="utf-8").splitlines()[0]
        assert least_bytes(run) < 0.85 * memory(title) * GIB, recipe.name
        host = re.search(r"([\d,]+) GB host", title)
        assert bool(host) == run.strategy.cpu_offload
        if host:  # as it is sold, of 10**9 bytes
            assert host_memory(run)["total"] <= HOST_USABLE * float(host[1].replace(",", "")) * 1e9, recipe.name


def memory(hardware: str) -> float:
    """GiB of one device, endless for a CPU."""
    found = re.search(r"× (\d+) GB", hardware)
    return float(found[1]) if found else math.inf


@pytest.mark.long("half a second of simulation for each recipe")
def test_the_table_has_the_numbers_of_the_planner_by_which_every_step_fits():
    text = README.read_text(encoding="utf-8")
    assert text == with_table(text), "write it anew: python -m tests.configs.recipe_table"
    for recipe in RECIPES:
        found, title = planned(recipe), recipe.read_text(encoding="utf-8").splitlines()[0]
        assert found.room(memory(title)) >= 0, recipe.name
        if found.offloads:  # every micro-batch copies all weights
            rows = checked(recipe).data.micro_batch_size
            assert rows == largest_rows(checked(recipe), memory(title)), recipe.name


def test_as_a_job_it_passes_lint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for recipe in RECIPES:
        run = checked(recipe)
        assert check_job(plan_job(run), run, 2**20, None)[0] == [], recipe.name
