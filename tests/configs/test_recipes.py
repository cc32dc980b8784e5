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

recipes = pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
full = pytest.mark.parametrize("recipe", FULL, ids=lambda path: path.stem)


@full
def test_the_head_of_a_recipe_shows_its_arithmetic(recipe: Path):
    run = checked(recipe)
    comment = [line[2:] for line in recipe.read_text(encoding="utf-8").splitlines() if line.startswith("# ")]
    expected = head_lines(run, meta_model(str(run.model.name)))
    assert comment[1 : 1 + len(expected)] == expected
    state = re.search(r"AdamW state +([\d,]+) x (\d+) B(?: / (\d+) [a-z ]+)? = ([\d.]+)", "\n".join(comment))
    assert state
    params, num_bytes, parts, gib = (float((text or "1").replace(",", "")) for text in state.groups())
    assert params * num_bytes / parts / 2**30 == pytest.approx(gib, abs=0.005)


def test_the_quickstart_shows_its_arithmetic():
    recipe = ROOT / "recipes" / "quickstart.yaml"
    run, model = checked(recipe), meta_model("HuggingFaceTB/SmolLM2-135M-Instruct")
    params = num_parameters(model)
    text = recipe.read_text(encoding="utf-8")
    assert f"{params:,} parameters x 16 B / 2 ranks = {params * 16 / 2 / 2**30:.2f} GiB" in text
    assert f"at most {size_of_step(run)[1]:,} tokens" in text
    assert f"x 12 B = {params * 12 / GB:.2f} GB" in text


def test_a_chunk_of_the_loss_is_as_large_as_the_arithmetic_says():
    from lit_fsdp.models.chunked_loss import chunk_rows

    for recipe in RECIPES:
        config = meta_model(str(checked(recipe).model.name)).config
        assert chunk_tokens(config.vocab_size, config.hidden_size) == chunk_rows(config.vocab_size, config.hidden_size)


@recipes
def test_the_table_of_recipes_has_its_numbers(recipe: Path):
    run = checked(recipe)
    model = meta_model(str(run.model.name))
    params, terms = num_parameters(model), gib_per_rank(run, model)
    readme = (ROOT / "recipes" / "README.md").read_text(encoding="utf-8")
    row = next(line for line in readme.splitlines() if f"({recipe.name})" in line)
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    samples, tokens = size_of_step(run)
    assert cells[1] == f"{params:,}"
    assert cells[3:6] == [str(samples), str(run.data.max_seq_length), f"{tokens:,}"]
    state = f"{terms['host']:.0f} GiB of host memory per node" if "host" in terms else f"{terms['state']:.2f} GiB"
    assert cells[6].startswith(state)
    assert cells[7] == f"{total_gib(terms):.1f} GiB"
    assert cells[8] == f"{params * CHECKPOINT_BYTES / GB:.2f} GB"
    if recipe in FULL:
        first = recipe.read_text(encoding="utf-8").splitlines()[0]
        assert first == f"# {first[2:].split(', full')[0]}, full fine-tune, {cells[2]}."


@full
def test_it_fits_into_the_machine_that_it_names(recipe: Path):
    """With 15 % left for what one block computes again, for fragments and for NCCL."""
    run = checked(recipe)
    terms = gib_per_rank(run, meta_model(str(run.model.name)))
    first = recipe.read_text(encoding="utf-8").splitlines()[0]
    if run.trainer["accelerator"] == "gpu":
        device = int(re.search(r"GPUs? of (\d+) GB", first)[1])  # type: ignore[index]
        assert total_gib(terms) < 0.85 * device * GB / 2**30
    host = re.search(r"and ([\d,]+) GB of host memory", first)
    assert (host is not None) == run.strategy.cpu_offload
    if host:
        assert terms["host"] < 0.75 * int(host[1].replace(",", "")) * GB / 2**30


def test_why_70b_is_not_split_into_copies_on_four_nodes():
    """What the comments of its recipes say."""
    gib = 70_553_706_496 * 16 / 2**30
    text = (ROOT / "recipes/llama3.1-70b_full_fsdp2_32x80gb.yaml").read_text(encoding="utf-8")
    assert f"a copy of the state ({gib:,.0f} GiB)" in text
    assert f"take {gib / 16:.1f} GiB per GPU" in text
    assert f"one per node {gib / 8:.1f} GiB" in text


@full
def test_the_model_of_a_recipe_passes_the_audit(recipe: Path):
    run = checked(recipe)
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
    assert table["root_share"] < 0.5


@full
def test_a_checkpoint_is_as_large_as_the_recipe_says(recipe: Path):
    run = checked(recipe)
    model = meta_model(str(run.model.name))
    params = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(params.values())
    size = checkpoint_bytes(params, params.items(), [optimizer])
    assert size == pytest.approx(num_parameters(model) * CHECKPOINT_BYTES, rel=0.021)


@full
def test_as_a_job_it_passes_lint(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Everything but what depends on this host: its disk, its cluster, its rows, and whether other nodes see it."""
    monkeypatch.chdir(tmp_path)
    values = yaml.safe_load(recipe.read_text())
    for source in (values["data"].get(split) for split in ("train", "val")):
        if source and not source.startswith("generated:"):
            Path(source).parent.mkdir(parents=True, exist_ok=True)
            Path(source).touch()
    monkeypatch.setattr(slurm_checks, "local_place", lambda path: None)
    for name in ("SLURM_JOB_ID", "SLURM_CONF", "LIT_FSDP_CACHE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    code = run_command(["slurm", "render", "--config", str(recipe)])
    out, err = capsys.readouterr()
    assert (code, "error:" in err) == (0, False), err
    run = checked(recipe)
    assert f"#SBATCH --nodes={run.num_nodes}\n" in out
    assert f"#SBATCH --ntasks-per-node={run.trainer['devices']}\n" in out
