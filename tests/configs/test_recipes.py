"""Every recipe: its arithmetic, the machine it names, its model on meta, and the job it would be."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from lit_fsdp.commands import run as run_command
from lit_fsdp.config.model import PreferenceModelConfig
from lit_fsdp.launch import slurm_checks
from lit_fsdp.models.build import num_parameters
from tests.configs.arithmetic import (
    QUICKSTART_MODEL,
    README,
    RECIPES,
    checked,
    gib_per_rank,
    meta_model,
    total_gib,
    with_table,
)
from tests.configs.communication_table import lines

FULL = [path for path in RECIPES if path.stem != "quickstart"]
GB = 1e9


def test_the_table_of_recipes_has_its_numbers():
    text = README.read_text(encoding="utf-8")
    assert text == with_table(text), "write it anew: python -m tests.configs.arithmetic"


def test_a_recipe_is_short_passes_every_rule_and_is_named_for_what_it_does():
    for recipe in RECIPES:
        run, lines = checked(recipe), recipe.read_text(encoding="utf-8").splitlines()
        assert len(lines) <= 40, recipe.name
        title = re.fullmatch(
            r"# ([\w.-]+)(?:, its text part)? \(([\d.]+)([MB]) parameters\), ([\w-]+) fine-tune, .+\.", lines[0]
        )
        assert title, recipe.name
        name = QUICKSTART_MODEL if recipe.stem == "quickstart" else str(run.model.name)
        assert title[1] == name.rpartition("/")[2]
        assert float(title[2]) == round(num_parameters(meta_model(name)) / {"M": 1e6, "B": 1e9}[title[3]], 1)
        lora = run.model.lora
        pairs = run.model if isinstance(run.model, PreferenceModelConfig) else None
        kind = "preference" if pairs else "full" if lora is None else "QLoRA" if lora.quantize else "LoRA"
        assert title[4] == kind, recipe.name
        assert run.world_size is not None
        assert run.strategy.sharding == ("hybrid_shard" if "-hybrid_" in recipe.stem else "full_shard")
        assert run.trainer["default_root_dir"] == f"runs/{recipe.stem}"
        if recipe.stem == "quickstart":
            continue
        model, method, engine, hardware = recipe.stem.split("_")
        assert model.replace("-", "") in re.sub(r"[^a-z0-9.]", "", name.lower())
        method_of = pairs.preference.loss if pairs else kind.lower()
        assert (method, engine.removesuffix("-hybrid")) == (method_of, run.strategy.engine)
        assert hardware.startswith(f"{run.world_size}x")
        assert ("cpu" in hardware) == (run.trainer["accelerator"] == "cpu")


def test_it_fits_into_the_machine_that_it_names():
    """With 15 % left for what one block computes again, for fragments and for NCCL."""
    for recipe in FULL:
        run = checked(recipe)
        terms = gib_per_rank(run, meta_model(str(run.model.name)))
        first = recipe.read_text(encoding="utf-8").splitlines()[0]
        if run.trainer["accelerator"] == "gpu":
            device = int(re.search(r"× (\d+) GB", first)[1])  # type: ignore[index]
            assert total_gib(terms) < 0.85 * device * GB / 2**30, recipe
        host = re.search(r"([\d,]+) GB host", first)
        assert (host is not None) == run.strategy.cpu_offload
        assert host is None or terms["host"] < 0.75 * int(host[1].replace(",", "")) * GB / 2**30


def test_as_a_job_it_passes_lint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Everything but what depends on this host: its disk, its cluster, its rows, and whether other nodes see it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(slurm_checks, "node_local", lambda path: None)
    for name in ("SLURM_JOB_ID", "SLURM_CONF", "LIT_FSDP_CACHE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    for recipe in (
        path for path in FULL if path.stem.endswith(("_2xcpu", "-8b_full_fsdp2_1x80gb", "70b_full_fsdp2_64x80gb"))
    ):
        for source in (yaml.safe_load(recipe.read_text())["data"].get(split) for split in ("train", "val")):
            if source and not source.startswith("generated:"):
                Path(source).parent.mkdir(parents=True, exist_ok=True)
                Path(source).touch()
        code = run_command(["slurm", "render", "--config", str(recipe)])
        out, err = capsys.readouterr()
        assert (code, "error:" in err) == (0, False), err
        run = checked(recipe)
        assert f"#SBATCH --nodes={run.num_nodes}\n" in out
        assert f"#SBATCH --ntasks-per-node={run.trainer['devices']}\n" in out


SMALL, LARGE = "llama3.1-8b_full_fsdp2_8x80gb", "llama3.1-70b_full_fsdp2-hybrid_64x80gb"


def test_the_tables_of_communication_are_what_the_functions_give():
    text = README.read_text(encoding="utf-8")
    for recipe, shard_ranks in ((SMALL, 8), (LARGE, 32)):
        assert "\n".join(lines(recipe, shard_ranks)) in text
