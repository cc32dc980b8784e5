"""Ranks that share rows train as one process does, whatever the degree, the method and the layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.forks import on_ranks

ROWS = {"global_batch_size": 12, "max_seq_length": 160}


def _run(folder: Path, run: Path, ranks: int, degree: Any = 1, micro: int = 4, **job: Any) -> dict[str, Any]:
    data = {**ROWS, "micro_batch_size": micro, **job.pop("data", {})}
    strategy = {"engine": "fsdp2", "context_parallel": degree, **job.pop("strategy", {})}
    options = {"steps": 3, "grads": f"{run}.pt", **job}
    return on_ranks("packed_run", ranks, folder=folder, run=run, data=data, strategy=strategy, **options)[0]


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_loss_and_gradients_are_those_of_one_process(tiny_model: Path, tmp_path: Path, packing: bool) -> None:
    """Tolerance: 1e-6 relative in fp32; only the order of summation differs."""
    data = {"packing": packing}
    wanted = _run(tiny_model, tmp_path / "one", 1, data=data)
    before = torch.load(tmp_path / "one.pt")
    for ranks, degree, micro in [
        (2, 2, 4),
        (2, {"degree": 2, "method": "all_gather"}, 12),
        (4, 4, 12),
        (4, {"degree": 4, "method": "all_gather"}, 4),
        (4, 2, 2),
        (3, 3, 4),
    ]:
        run = tmp_path / f"{ranks}-{degree}-{micro}".replace(" ", "")
        found = _run(tiny_model, run, ranks, degree, micro, data=data)
        assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-6)
        assert found["supervised"] == wanted["supervised"]
        assert json.loads((run / "isolation.json").read_text())["largest_change"] == 0
        gradients = torch.load(f"{run}.pt")
        assert (gradients - before).norm() / before.norm() <= 1e-6


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_pairs_are_compared_across_the_cut(tiny_model: Path, tmp_path: Path, lora: bool) -> None:
    found = []
    for ranks, degree in ((1, 1), (2, 2), (4, {"degree": 4, "method": "all_gather"})):
        strategy = {"engine": "fsdp2", "context_parallel": degree}
        job = {
            "folder": tiny_model,
            "strategy": strategy,
            "steps": 4,
            "micro": 4,
            "model": {"lora": {}} if lora else {},
        }
        (tmp_path / str(ranks)).mkdir()
        found.append(on_ranks("train_pairs", ranks, run=tmp_path / str(ranks) / "run", **job)[0])
    for one in found[1:]:
        assert one["rows"] == "whole"
        assert one["tokens"] > 0
        for step, wanted in zip(one["steps"], found[0]["steps"], strict=True):
            assert step == pytest.approx(wanted, rel=1e-5, abs=1e-6)
