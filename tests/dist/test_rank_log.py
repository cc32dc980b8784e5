"""``verbose``: what each rank says of itself, held against what is known of the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.dist.forks import on_ranks


@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1", "ddp"])
def test_the_parts_of_all_ranks_are_the_model_and_each_tells_where_it_is(
    tiny_model: Path, tmp_path: Path, engine: str
) -> None:
    strategy = {"engine": engine, "verbose": True}
    on_ranks("asked_for_stacks", 2, folder=tiny_model, strategy=strategy, run=tmp_path)
    ranks: list[dict[str, Any]] = [json.loads((tmp_path / "debug" / f"rank-{i}.json").read_text()) for i in range(2)]
    for number, rank in enumerate(ranks):
        assert rank["elements"] == sum(state["num_here"] for state in rank["states"])
        text = (tmp_path / "debug" / f"rank-{number}.stacks.txt").read_text()
        assert "in on_before_optimizer_step" in text
        assert "in fit" in text
    for first, second in zip(ranks[0]["states"], ranks[1]["states"], strict=True):
        assert first["name"] == second["name"]
        whole = 2 * first["num_whole"] if engine == "ddp" else first["num_whole"]
        assert first["num_here"] + second["num_here"] == whole
    places = [(rank["rank"], rank["shard"], rank["copy"]) for rank in ranks]
    assert places == ([(0, 0, 0), (1, 0, 1)] if engine == "ddp" else [(0, 0, 0), (1, 1, 0)])
