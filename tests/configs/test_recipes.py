"""Every recipe: its arithmetic, the machine it names, its model on meta, and the job it would be."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import yaml

from lit_fsdp.checkpoint.disk_space import checkpoint_bytes
from lit_fsdp.commands import run as run_command
from lit_fsdp.launch import slurm_checks
from lit_fsdp.models.build import num_parameters
from lit_fsdp.models.chunked_loss import chunk_rows
from lit_fsdp.parallel.units import audit, plan_units
from tests.configs.arithmetic import (
    CHECKPOINT_BYTES,
    Holder,
    checked,
    chunk_tokens,
    gib_per_rank,
    head_lines,
    meta_model,
    size_of_step,
    total_gib,
)

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
FULL = [path for path in RECIPES if path.stem != "quickstart"]
GB = 1e9


def test_the_head_of_a_recipe_shows_its_arithmetic():
    for recipe in FULL:
        run = checked(recipe)
        comment = [line[2:] for line in recipe.read_text(encoding="utf-8").splitlines() if line.startswith("# ")]
        expected = head_lines(run, meta_model(str(run.model.name)))
        assert comment[1 : 1 + len(expected)] == expected, recipe


def test_the_table_of_recipes_has_its_numbers():
    readme = (ROOT / "recipes" / "README.md").read_text(encoding="utf-8")
    for recipe in RECIPES:
        run = checked(recipe)
        model = meta_model(str(run.model.name))
        params, terms = num_parameters(model), gib_per_rank(run, model)
        row = next(line for line in readme.splitlines() if f"({recipe.name})" in line)
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        samples, tokens = size_of_step(run)
        assert cells[1] == f"{params:,}"
        assert cells[3:6] == [str(samples), str(run.data.max_seq_length), f"{tokens:,}"]
        state = f"{terms['host']:.0f} GiB of host memory per node" if "host" in terms else f"{terms['state']:.2f} GiB"
        assert cells[6].startswith(state), recipe
        assert cells[7:9] == [f"{total_gib(terms):.1f} GiB", f"{params * CHECKPOINT_BYTES / GB:.2f} GB"], recipe


def test_a_chunk_of_the_loss_is_as_large_as_the_arithmetic_says():
    for recipe in RECIPES:
        config = meta_model(str(checked(recipe).model.name)).config
        assert chunk_tokens(config.vocab_size, config.hidden_size) == chunk_rows(config.vocab_size, config.hidden_size)


def test_it_fits_into_the_machine_that_it_names():
    """With 15 % left for what one block computes again, for fragments and for NCCL."""
    for recipe in FULL:
        run = checked(recipe)
        terms = gib_per_rank(run, meta_model(str(run.model.name)))
        first = recipe.read_text(encoding="utf-8").splitlines()[0]
        if run.trainer["accelerator"] == "gpu":
            device = int(re.search(r"GPUs? of (\d+) GB", first)[1])  # type: ignore[index]
            assert total_gib(terms) < 0.85 * device * GB / 2**30, recipe
        host = re.search(r"and ([\d,]+) GB of host memory", first)
        assert (host is not None) == run.strategy.cpu_offload
        assert host is None or terms["host"] < 0.75 * int(host[1].replace(",", "")) * GB / 2**30


def test_the_model_of_a_recipe_passes_the_audit_and_its_checkpoint_is_as_large_as_it_says():
    for name in {str(checked(recipe).model.name): recipe for recipe in FULL}.values():
        run = checked(name)
        model = meta_model(str(run.model.name))
        plan = plan_units(Holder(model), run.strategy.wrap_config)
        table = audit(plan, run.world_size or 1, {})
        tied = model.config.tie_word_embeddings
        embedding = model.get_input_embeddings().weight.numel()
        assert sum(unit["num_params"] for unit in table["units"]) == num_parameters(model) == table["num_params"]
        assert sum(unit.is_block for unit in plan.units) == model.config.num_hidden_layers
        # untied, embedding and head are units of their own; tied, they stay together in the root
        assert table["num_units"] == model.config.num_hidden_layers + (1 if tied else 3)
        assert plan.units[-1].num_params == model.config.hidden_size + (embedding if tied else 0)
        params = dict(model.named_parameters())
        size = checkpoint_bytes(params, params.items(), [torch.optim.AdamW(params.values())])
        assert size == pytest.approx(num_parameters(model) * CHECKPOINT_BYTES, rel=0.021)


def test_as_a_job_it_passes_lint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Everything but what depends on this host: its disk, its cluster, its rows, and whether other nodes see it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(slurm_checks, "node_local", lambda path: None)
    for name in ("SLURM_JOB_ID", "SLURM_CONF", "LIT_FSDP_CACHE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    for recipe in (
        path for path in FULL if path.stem.endswith(("_2xcpu", "-8b_full_fsdp2_1x80gb", "70b_full_fsdp2_64xgpu"))
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
