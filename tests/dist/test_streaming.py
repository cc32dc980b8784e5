"""A run that streams goes on where it was, inside a window, on any number of ranks; a bad row is told by all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lit_fsdp.checkpoint.manifest import read_manifest
from lit_fsdp.checkpoint.run_folder import checkpoints
from lit_fsdp.data.readers import generated_rows
from tests.dist.forks import RankError, on_ranks
from tests.unit.data.conftest import write_rows

STEPS, CUT = 10, 4


def _talks(count: int, seed: int = 0) -> list[dict[str, Any]]:
    return [{"messages": row["messages"]} for row in generated_rows(count, seed)]


@pytest.mark.parametrize("data", [{"packing": True, "global_batch_size": 4}, {"num_workers": 2}], ids=["packs", "rows"])
def test_resumed_inside_a_window(tiny_model: Path, tmp_path: Path, data: dict[str, Any]) -> None:
    """Two files with weights; eight rows to a global batch, so that windows of 21 rows end inside one."""
    sources = []
    for name, count, weight in (("a", 31, 2.0), ("b", 22, 1.0)):
        path = write_rows(tmp_path / f"{name}.jsonl", _talks(count, 1))
        sources.append({"source": path, "weight": weight})
    data = {"train": sources, "streaming": True, "shuffle_window": 21, "max_seq_length": 64, **data}
    job = {"folder": tiny_model, "steps": STEPS, "micro": 2, "strategy": {"engine": "fsdp2"}, "kind": "ours"}
    job["data"] = data
    (whole, _) = on_ranks("elastic_run", 2, run=tmp_path / "whole", save_at=[CUT], **job)
    assert len(whole["losses"]) == STEPS
    saved = checkpoints(tmp_path / "whole")[0].path
    assert read_manifest(saved).extra["data"]["position"]["item"] > 0
    (two, _) = on_ranks("elastic_run", 2, run=tmp_path / "two", ckpt_path=saved, **job)
    assert two["losses"] == whole["losses"][CUT:]
    assert two["rows"] == [seen for seen in whole["rows"] if seen[0] >= CUT]
    (one,) = on_ranks("elastic_run", 1, run=tmp_path / "one", ckpt_path=saved, **job)
    assert one["losses"] == pytest.approx(whole["losses"][CUT:], rel=1e-5)
    assert one["accumulate"] == 2 * two["accumulate"]


def test_every_rank_raises_what_the_first_one_met(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([*(json.dumps(row) for row in _talks(20)), "no JSON"]))
    job = {"folder": tiny_model, "strategy": {"engine": "fsdp2"}, "kind": "ours", "data": {"train": str(path)}}
    with pytest.raises(RankError) as told:
        on_ranks("elastic_run", 2, run=tmp_path / "run", steps=2, micro=2, **job)
    first, second = str(told.value).split("\nrank 1 ended with ")
    for said in (first, second):
        assert f"DataError: {path}:21: not JSON" in said
