"""A bad row in a Trainer of one's own: one rank reads it, all of them say so, and none is left to wait."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lit_fsdp.data.generated import generated_rows
from tests.dist.forks import RankError, on_ranks


def test_every_rank_raises_what_the_first_one_met(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([*(json.dumps(row) for row in generated_rows(20)), "no JSON"]))
    job = {"folder": tiny_model, "strategy": {"engine": "fsdp2"}, "kind": "ours", "data": {"train": str(path)}}
    with pytest.raises(RankError) as told:
        on_ranks("elastic_run", 2, run=tmp_path / "run", steps=2, micro=2, **job)
    first, second = str(told.value).split("\nrank 1 ended with ")
    for said in (first, second):
        assert f"DataError: {path}:21: not JSON" in said
