"""Ranks that divide experts train as they do without, whatever the degree and the layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.forks import on_ranks
from tests.dist.test_experts import ALL, _saved

FAMILIES = ("qwen3_moe", "gpt_oss", "deepseek_v3", "granitemoe")


def _run(folder: str, run: Path, ranks: int, degree: int, **job: Any) -> dict[str, Any]:
    strategy = {"engine": "fsdp2", "precision": "fp32", "expert_parallel": degree, **job.pop("strategy", {})}
    return on_ranks("train", ranks, folder=folder, run=str(run), strategy=strategy, **job)[0]


def _weights(run: Path) -> torch.Tensor:
    return torch.cat([tensor.flatten() for _, tensor in sorted(torch.load(run / "live.pt").items())])


@pytest.mark.parametrize("family", FAMILIES)
def test_ten_steps_are_as_without_it(family: str, tmp_path: Path) -> None:
    """Tolerance: 1e-6 relative in fp32; only the order of summation differs."""
    folder = _saved(family, tmp_path)
    for ranks, degrees in ((2, (2,)), (4, (2, 4))):
        wanted = _run(folder, tmp_path / f"{ranks}", ranks, 1)
        before = _weights(tmp_path / f"{ranks}")
        for degree in degrees:
            found = _run(folder, tmp_path / f"{ranks}-{degree}", ranks, degree)
            print(family, ranks, degree, found["losses"], wanted["losses"])
            print(float((_weights(tmp_path / f"{ranks}-{degree}") - before).norm() / before.norm()))
            assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-6)
