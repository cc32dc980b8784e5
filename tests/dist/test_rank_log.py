"""``verbose``: what each rank says of itself, held against what is known of the run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.dist.workers import Workers

ENGINES = ("fsdp2", "fsdp1", "ddp")
NUM_STEPS = 6


def logged(
    workers: Workers, model: Path, run: Path, ranks: int, poison: dict[str, Any] | None = None, **strategy: Any
) -> list[list[dict[str, Any]]]:
    """The lines of each rank, after a run of six steps."""
    poison = poison or {"steps": [], "value": 0.0, "gradient_clip_val": 1.0}
    options = {**poison, "default_root_dir": str(run)}
    workers.run("poisoned", ranks, folder=str(model), strategy={"verbose": True, **strategy}, **options)
    files = [run / "debug" / f"rank-{rank}.jsonl" for rank in range(ranks)]
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_parts_of_all_ranks_are_the_model(workers: Workers, tiny_model: Path, tmp_path: Path, engine: str) -> None:
    ranks = logged(workers, tiny_model, tmp_path, 2, engine=engine)
    first = [lines[0] for lines in ranks]
    for place, lines in zip(first, ranks, strict=True):
        assert [line["event"] for line in lines] == ["set_up", *["step"] * NUM_STEPS]
        assert [line["step"] for line in lines[1:]] == list(range(1, NUM_STEPS + 1))
        assert place["elements"] == sum(state["elements"] for state in place["states"])
    shapes = {state["name"]: math.prod(state["shape"]) for state in first[0]["states"]}
    for name, whole in shapes.items():
        held = [state["elements"] for place in first for state in place["states"] if state["name"] == name]
        assert held == [whole, whole] if engine == "ddp" else sum(held) == whole
    units = {state["unit"] for state in first[0]["states"]}
    assert units == ({""} if engine == "ddp" else {"", *(f"model.model.layers.{i}" for i in range(3))})
    assert [(place["rank"], place["shard"], place["copy"]) for place in first] == (
        [(0, 0, 0), (1, 0, 1)] if engine == "ddp" else [(0, 0, 0), (1, 1, 0)]
    )
    norms = [math.hypot(*(lines[step]["gradients_norm"] for lines in ranks)) for step in range(1, NUM_STEPS + 1)]
    whole = math.sqrt(2) if engine == "ddp" else 1.0  # both have all of it
    assert all(norm <= whole * (1 + 1e-4) for norm in norms)
    assert max(norms) > 0.99 * whole  # clipped to 1


def test_copies_show_the_same_sums(workers: Workers, tiny_model: Path, tmp_path: Path) -> None:
    ranks = logged(workers, tiny_model, tmp_path, 4, sharding="hybrid_shard", shard_degree=2)
    assert [(lines[0]["copy"], lines[0]["shard"]) for lines in ranks] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    sums = [[line["weights_sum"] for line in lines[1:]] for lines in ranks]
    assert (sums[0], sums[1]) == (sums[2], sums[3])
    assert sums[0] != sums[1]
    assert len(set(sums[0])) == NUM_STEPS


@pytest.mark.parametrize("engine", ENGINES[:2])
def test_the_rank_with_the_bad_gradient_is_the_one_that_shows_it(
    workers: Workers, tiny_model: Path, tmp_path: Path, engine: str
) -> None:
    bad = {"steps": [2], "value": math.nan}
    ranks = logged(workers, tiny_model, tmp_path / "skip", 2, bad, engine=engine, nonfinite_gradients="skip")
    found = [[line["step"] for line in lines[1:] if line["not_finite"]] for lines in ranks]
    assert found == [[], [3]]
    assert [lines[3]["gradients_norm"] == "nan" for lines in ranks] == [False, True]
    ranks = logged(workers, tiny_model, tmp_path / "error", 2, bad, engine=engine)
    for lines in ranks:
        assert [line["event"] for line in lines] == ["set_up", "step", "step", "failed"]
        assert lines[-1]["error"].startswith("NonFiniteGradientError: the gradients hold inf or nan")


def test_a_rank_tells_where_it_is(workers: Workers, tiny_model: Path, tmp_path: Path) -> None:
    workers.run("asked_for_stacks", 2, folder=str(tiny_model), strategy={"verbose": True}, run=str(tmp_path))
    for rank in range(2):
        text = (tmp_path / "debug" / f"rank-{rank}.stacks.txt").read_text()
        assert text.count("(most recent call first)") > 0
        assert "in on_before_optimizer_step" in text
        assert "in fit" in text


def test_nothing_is_written_unasked(workers: Workers, tiny_model: Path, tmp_path: Path) -> None:
    options = {"steps": [], "value": 0.0, "default_root_dir": str(tmp_path)}
    workers.run("poisoned", 2, folder=str(tiny_model), strategy={}, **options)
    assert not (tmp_path / "debug").exists()


@pytest.mark.parametrize(("engine", "how"), [("fsdp2", "fully_shard"), ("fsdp1", "wrap")])
def test_a_module_that_wraps_itself(workers: Workers, tmp_path: Path, engine: str, how: str) -> None:
    """Of what FSDP1 had flattened before, nobody knows the shape here."""
    strategy = {"engine": engine, "wrap": "manual", "verbose": True}
    workers.run("train_wrapped_by_hand", 2, strategy=strategy, how=how, run=str(tmp_path))
    for rank in range(2):
        line = json.loads((tmp_path / "debug" / f"rank-{rank}.jsonl").read_text().splitlines()[0])
        layers = [state for state in line["states"] if ".layers." in f".{state['name']}"]
        assert layers
        assert {state["is_split"] for state in layers} == ({True} if engine == "fsdp2" else {None})
