"""Ranks that divide experts train as they do without, whatever the degree and the layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.forks import on_ranks, on_ranks_each
from tests.dist.test_experts import ALL, _saved

FAMILIES = ("qwen3_moe", "gpt_oss", "deepseek_v3", "granitemoe")


def _weights(run: Path) -> torch.Tensor:
    return torch.cat([tensor.flatten() for _, tensor in sorted(torch.load(run / "live.pt").items())])


def _compare(
    folder: str, place: Path, ranks: int, cases: dict[str, dict[str, Any]], **job: Any
) -> list[dict[str, Any]]:
    """Run all cases, the first of which is without it, and compare losses, norms and weights."""
    given = [{"run": str(place / f"{ranks}-{name}"), **case} for name, case in cases.items()]
    wanted, *found = (of_ranks[0] for of_ranks in on_ranks_each("divided", ranks, given, folder=folder, **job))
    first, *others = cases
    before = _weights(place / f"{ranks}-{first}")
    for name, one in zip(others, found, strict=True):
        after = _weights(place / f"{ranks}-{name}")
        assert one["losses"] == pytest.approx(wanted["losses"], rel=1e-6), name
        assert one["norms"] == pytest.approx(wanted["norms"], rel=1e-6), name
        assert (after - before).norm() <= 1e-6 * before.norm(), name
        assert one["losses"][-1] < one["losses"][0]
        assert one["own"] is not None
        assert len(one["meshes"]) == 1  # of experts, too
    return [wanted, *found]


def _over(degree: int, **strategy: Any) -> dict[str, Any]:
    return {"strategy": {"expert_parallel": degree, **strategy}}


@pytest.mark.parametrize("family", FAMILIES)
def test_ten_steps_are_as_without_it(family: str, tmp_path: Path) -> None:
    """Tolerance: 1e-6 relative in fp32; only the order of summation differs."""
    folder = _saved(family, tmp_path)
    for ranks, degrees in ((2, (2,)), (4, (2, 4))):
        cases = {"without": {}, **{f"over-{degree}": _over(degree) for degree in degrees}}
        _compare(folder, tmp_path, ranks, cases, gradient_clip_val=0.5)


def test_layouts_are_as_without_it(tmp_path: Path) -> None:
    folder = _saved("qwen3_moe", tmp_path)
    hybrid: dict[str, Any] = {"sharding": "hybrid_shard", "replicate_degree": 2}
    cases = {
        "without": {},
        "hybrid": _over(2, **hybrid),
        "zero2": _over(2, sharding="shard_grad_op"),
        "offload": _over(2, cpu_offload=True),
        "recomputed": _over(4, activation_checkpointing="full"),
        "selective": _over(2, activation_checkpointing="selective"),
    }
    _compare(folder, tmp_path, 4, cases, steps=6)
    cases = {
        "whole": {},
        "held": _over(2, sync_each_micro_batch=False),
        "held-hybrid": _over(2, **hybrid, sync_each_micro_batch=False),
    }
    _compare(folder, tmp_path, 4, cases, steps=6, accumulate_grad_batches=2)
    for ranks in (2, 4):
        cases = {"without": {}, "with": _over(2), "recomputed": _over(ranks, activation_checkpointing="full")}
        _compare(folder, tmp_path / "lora", ranks, cases, steps=6, model={"lora": ALL})


@pytest.mark.parametrize("route", ["none", "tail"])
def test_ranks_without_tokens_and_with_a_tail_of_one(route: str, tmp_path: Path) -> None:
    """Two experts get all tokens; others, on another rank, get none, or one token of one rank."""
    folder = _saved("qwen3_moe", tmp_path)
    for ranks in (2, 4):
        found = _compare(folder, tmp_path, ranks, {"without": {}, "over-2": _over(2)}, steps=4, route=route)
        assert all(one["routed"] == 2 * 4 for one in found)  # layers and steps


def test_a_run_goes_on_with_another_degree_and_with_none(tmp_path: Path) -> None:
    """The same checkpoint files; bit-equal with the same degree, within rounding with others."""
    folder = _saved("gpt_oss", tmp_path)
    job: dict[str, Any] = {"folder": folder, "steps": 6}
    whole = on_ranks("divided", 4, run=str(tmp_path / "whole"), **_over(2), **job)[0]
    cut = str(tmp_path / "whole/checkpoints/step-00000003")
    again = on_ranks("divided", 4, run=str(tmp_path / "again"), ckpt_path=cut, **_over(2), **job)[0]
    assert (again["losses"], again["digest"]) == (whole["losses"][3:], whole["digest"])
    wanted = _weights(tmp_path / "whole")
    averages = torch.load(tmp_path / "whole/averages.pt")
    for ranks, degree in ((4, 4), (2, 2), (4, 1), (1, 1), (3, 1)):
        run = tmp_path / f"{ranks}-{degree}"
        found = on_ranks("divided", ranks, run=str(run), ckpt_path=cut, **_over(degree), **job)[0]
        assert found["losses"] == pytest.approx(whole["losses"][3:], rel=1e-5)
        assert (_weights(run) - wanted).norm() <= 1e-5 * wanted.norm()
        for name, tensor in torch.load(run / "averages.pt").items():
            assert (tensor - averages[name]).norm() <= 1e-5 * averages[name].norm(), name
