"""Ranks that divide experts train as they do without, whatever the degree and the layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from tests.dist.forks import RankError, on_ranks, on_ranks_each
from tests.dist.reference import save_tiny
from tests.dist.test_experts import ALL, saved_mixture
from tests.runs import MORE


def _weights(run: Path) -> torch.Tensor:
    return torch.cat([tensor.flatten() for _, tensor in sorted(torch.load(run / "live.pt").items())])


def _compare(
    folder: str,
    place: Path,
    ranks: int,
    cases: dict[str, dict[str, Any]],
    model: dict[str, Any] | None = None,
    **job: Any,
) -> list[dict[str, Any]]:
    """Run all cases, the first of which is without it, and compare losses, norms and weights."""
    given = [{"run": str(place / f"{ranks}-{name}"), **case} for name, case in cases.items()]
    wanted, *found = (
        of_ranks[0] for of_ranks in on_ranks_each("divided", ranks, given, folder=folder, model=model, **job)
    )
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
        assert model is not None or one["gathered"] == [len(one["own"])]
    return [wanted, *found]


def _over(degree: int, **strategy: Any) -> dict[str, Any]:
    return {"strategy": {"expert_parallel": degree, **strategy}}


@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        ("qwen3_moe", 4),
        ("gpt_oss", 2),
        *(pytest.param(name, 2, marks=MORE) for name in ("qwen3_moe", "deepseek_v3", "granitemoe")),
        *(pytest.param(name, 4, marks=MORE) for name in ("gpt_oss", "deepseek_v3", "granitemoe")),
    ],
)
def test_ten_steps_are_as_without_it(family: str, ranks: int, tmp_path: Path) -> None:
    """Tolerance: 1e-6 relative in fp32; only the order of summation differs."""
    cases = {"without": {}, **{f"over-{degree}": _over(degree) for degree in (2, 4) if degree <= ranks}}
    assert _compare(saved_mixture(family, tmp_path), tmp_path, ranks, cases, gradient_clip_val=0.5)


_HYBRID: dict[str, Any] = {"sharding": "hybrid_shard", "replicate_degree": 2}
_LAYOUTS: dict[str, dict[str, Any]] = {
    "hybrid": _over(2, **_HYBRID),
    "offload": _over(2, cpu_offload=True),
    "zero2": _over(2, sharding="shard_grad_op"),
    "selective": _over(2, activation_checkpointing="selective"),
    "on-the-host": _over(2, activation_checkpointing={"mode": "full", "offload_activations": True}),
}


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("hybrid", "offload"), id="few"),
        pytest.param(("zero2", "selective", "on-the-host"), id="others", marks=MORE),
    ],
)
def test_layouts_are_as_without_it(names: tuple[str, ...], tmp_path: Path) -> None:
    cases = {"without": {}, **{name: _LAYOUTS[name] for name in names}}
    assert _compare(saved_mixture("qwen3_moe", tmp_path), tmp_path, 4, cases, steps=4)


@pytest.mark.parametrize("layout", [_HYBRID, pytest.param({}, marks=MORE)], ids=["hybrid", "sharded"])
def test_held_reductions_are_as_without_it(layout: dict[str, Any], tmp_path: Path) -> None:
    cases = {"whole": {}, "held": _over(2, **layout, sync_each_micro_batch=False)}
    folder = saved_mixture("qwen3_moe", tmp_path)
    assert _compare(folder, tmp_path, 4, cases, steps=4, accumulate_grad_batches=2)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=MORE)])
def test_adapters_are_as_without_it(ranks: int, tmp_path: Path) -> None:
    cases = {"without": {}, "with": _over(2), "recomputed": _over(ranks, activation_checkpointing="full")}
    assert _compare(saved_mixture("qwen3_moe", tmp_path), tmp_path, ranks, cases, steps=4, model={"lora": ALL})


def test_experts_that_the_ranks_do_not_divide_evenly(tmp_path: Path) -> None:
    folder = saved_mixture("qwen3_moe", tmp_path, num_experts=7)
    found = _compare(folder, tmp_path, 4, {"without": {}, "over-2": _over(2), "over-4": _over(4)}, steps=4)
    assert [one["own"] for one in found] == [None, [0, 1, 4, 5], [0, 1]]


@pytest.mark.parametrize(
    ("route", "ranks"),
    [("none", 2), ("tail", 4), pytest.param("none", 4, marks=MORE), pytest.param("tail", 2, marks=MORE)],
)
def test_ranks_without_tokens_and_with_a_tail_of_one(route: str, ranks: int, tmp_path: Path) -> None:
    """Two experts get all tokens; others, on another rank, get none, or one token of one rank."""
    folder = saved_mixture("qwen3_moe", tmp_path)
    found = _compare(folder, tmp_path, ranks, {"without": {}, "over-2": _over(2)}, steps=4, route=route)
    assert all(one["routed"] == 2 * 4 for one in found)  # layers and steps


def test_bf16_with_a_rank_without_tokens(tmp_path: Path) -> None:
    """There the tokens of an expert are padded to whole blocks; tolerance: the rounding of bf16."""
    folder = saved_mixture("gpt_oss", tmp_path)
    cases = [{"strategy": {"precision": "mixed", "expert_parallel": degree}} for degree in (1, 2)]
    job: dict[str, Any] = {"folder": folder, "steps": 4, "route": "none"}
    without, divided = (of_ranks[0] for of_ranks in on_ranks_each("divided", 2, cases, **job))
    assert divided["losses"] == pytest.approx(without["losses"], rel=5e-3)
    assert divided["norms"] == pytest.approx(without["norms"], rel=3e-2)
    assert (without["own"], divided["own"]) == (None, [0, 1])


def test_few_bytes_travel(tmp_path: Path) -> None:
    """64 experts, four active, 2,048 tokens per rank: at most 0.3 of the bytes that the same run sends without it."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 256, "num_experts": 64, "num_experts_per_tok": 4}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
    save_tiny(tmp_path / "model", AutoConfig.for_model("qwen3_moe", **sizes, head_dim=16))
    data = {"train": "generated:200", "packing": True, "max_seq_length": 2048, "cache_dir": str(tmp_path / "cache")}
    data |= {"global_batch_size": 2, "micro_batch_size": 1}
    cases = {"without": {}, "with": _over(2)}
    without, divided = _compare(str(tmp_path / "model"), tmp_path, 2, cases, steps=2, data=data)
    assert (without["gathered"], divided["gathered"]) == ([64], [32])
    weights = 2 * 64 * 3 * 64 * 256  # of both layers: gathered twice and reduced once, half of which travels
    others = without["sent"] - 4 * weights * 3 / 2
    assert others >= 0
    assert divided["sent"] <= 0.3 * without["sent"]
    # of 2,048 tokens the 94 % with experts on the other rank, once, there and back, in both passes of both layers
    tokens = 4 * 2048 * 64 * 2 * 4
    assert 0.85 * tokens <= divided["sent"] - others <= 1.1 * tokens


@pytest.mark.parametrize(
    "others",
    [
        pytest.param(((2, 2), (1, 1)), id="few"),
        pytest.param(((4, 4), (4, 1), (3, 1)), id="others", marks=MORE),
    ],
)
def test_a_run_goes_on_with_another_degree_and_with_none(others: tuple[tuple[int, int], ...], tmp_path: Path) -> None:
    """The same checkpoint files; bit-equal with the same degree, within rounding with others."""
    folder = saved_mixture("gpt_oss", tmp_path)
    job: dict[str, Any] = {"folder": folder, "steps": 6}
    whole = on_ranks("divided", 4, run=str(tmp_path / "whole"), **_over(2), **job)[0]
    cut = str(tmp_path / "whole/checkpoints/step-00000003")
    again = on_ranks("divided", 4, run=str(tmp_path / "again"), ckpt_path=cut, **_over(2), **job)[0]
    assert (again["losses"], again["digest"]) == (whole["losses"][3:], whole["digest"])
    wanted = _weights(tmp_path / "whole")
    averages = torch.load(tmp_path / "whole/averages.pt")
    for ranks, degree in others:
        run = tmp_path / f"{ranks}-{degree}"
        found = on_ranks("divided", ranks, run=str(run), ckpt_path=cut, **_over(degree), **job)[0]
        assert found["losses"] == pytest.approx(whole["losses"][3:], rel=1e-5)
        assert (_weights(run) - wanted).norm() <= 1e-5 * wanted.norm()
        for name, tensor in torch.load(run / "averages.pt").items():
            assert (tensor - averages[name]).norm() <= 1e-5 * averages[name].norm(), name


@pytest.mark.parametrize("lora", [pytest.param(False, id="full", marks=MORE), pytest.param(True, id="lora")])
def test_pairs_and_ranks_that_share_rows(lora: bool, tmp_path: Path) -> None:
    folder, model = saved_mixture("qwen3_moe", tmp_path), {"lora": ALL} if lora else {}
    found = []
    for degree in (1, 2):
        strategy = {"engine": "fsdp2", "context_parallel": 2, "expert_parallel": degree}
        job = {"folder": folder, "strategy": strategy, "steps": 4, "micro": 2, "model": model}
        (tmp_path / str(degree)).mkdir()
        found.append(on_ranks("train_pairs", 4, run=str(tmp_path / str(degree) / "run"), **job)[0])
    assert found[0]["tokens"] == found[1]["tokens"]
    for step, wanted in zip(found[1]["steps"], found[0]["steps"], strict=True):
        assert step == pytest.approx(wanted, rel=1e-5, abs=1e-6)


def test_somebodys_own_module(tmp_path: Path) -> None:
    folder = saved_mixture("qwen3_moe", tmp_path)
    wanted, *found = (
        on_ranks("own_run", 2, folder=folder, degree=degree, expert_parallel=experts)[0]
        for degree, experts in ((1, 1), (1, 2), (2, 2))
    )
    assert found == [pytest.approx(wanted, rel=1e-6)] * 2
    with pytest.raises(RankError, match=r"fsdp_strategy\.expert_parallel: got 2 for llama, which has no such experts"):
        on_ranks("own_run", 2, folder=saved_mixture("llama", tmp_path), degree=1, expert_parallel=2)
