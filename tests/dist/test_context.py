"""Ranks that share rows train as one process does, whatever the degree, the method and the layout."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, LlamaConfig, MixtralConfig

from lit_fsdp import load_weights
from lit_fsdp.config.strategy import ContextConfig, StrategyConfig, mesh_shape
from lit_fsdp.errors import ConfigError
from lit_fsdp.models.build import build_on_meta
from lit_fsdp.models.miniature import shrink
from lit_fsdp.models.parts import context_method
from lit_fsdp.models.tokenizers import miniature_tokenizer
from tests.dist.forks import RankError, on_ranks
from tests.dist.jobs import module_for
from tests.dist.matrix import TOLERANCE, worst_difference
from tests.dist.reference import TINY, save_tiny
from tests.runs import MORE

ROWS = {"global_batch_size": 12, "max_seq_length": 160}


def _run(folder: Path, run: Path, ranks: int, degree: Any = 1, micro: int = 4, **job: Any) -> dict[str, Any]:
    data = {**ROWS, "micro_batch_size": micro, **job.pop("data", {})}
    strategy = {"engine": "fsdp2", "context_parallel": degree, **job.pop("strategy", {})}
    options = {"steps": 3, "grads": f"{run}.pt", **job}
    return on_ranks("packed_run", ranks, folder=folder, run=run, data=data, strategy=strategy, **options)[0]


# ranks, degree and method, rows of a micro-batch
_SOME = [(2, 2, 4), (4, {"degree": 4, "method": "all_gather"}, 4), (3, 3, 4)]
_OTHERS = [(2, {"degree": 2, "method": "all_gather"}, 12), (4, 4, 12), (4, 2, 2)]


@pytest.mark.parametrize(
    ("packing", "layouts"),
    [
        pytest.param(False, _SOME, id="padded"),
        pytest.param(True, _OTHERS, id="packed"),
        pytest.param(False, _OTHERS, id="padded-others", marks=MORE),
        pytest.param(True, _SOME, id="packed-others", marks=MORE),
    ],
)
def test_loss_and_gradients_are_those_of_one_process(
    tiny_model: Path, tmp_path: Path, packing: bool, layouts: list[tuple[int, Any, int]]
) -> None:
    """Tolerance: 1e-6 relative in fp32; only the order of summation differs."""
    data = {"packing": packing}
    wanted = _run(tiny_model, tmp_path / "one", 1, data=data)
    before = torch.load(tmp_path / "one.pt")
    for ranks, degree, micro in layouts:
        run = tmp_path / f"{ranks}-{degree}-{micro}".replace(" ", "")
        found = _run(tiny_model, run, ranks, degree, micro, data=data)
        assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-6)
        assert found["supervised"] == wanted["supervised"]
        assert json.loads((run / "isolation.json").read_text())["largest_change"] == 0
        gradients = torch.load(f"{run}.pt")
        assert (gradients - before).norm() / before.norm() <= 1e-6


@pytest.mark.parametrize("precision", ["fp32", pytest.param("mixed", marks=MORE)])
def test_ten_steps_are_those_of_one_process(tiny_model: Path, tmp_path: Path, precision: str) -> None:
    """Losses and weights: 1e-6 relative in fp32, else the tolerance of the matrix against fp32."""
    tolerance = 1e-6 if precision == "fp32" else TOLERANCE[precision]
    layouts: list[Any] = [(2, 2, 4), (4, {"degree": 2, "method": "all_gather"}, 2)]
    assert _ten_steps(tiny_model, tmp_path, layouts, True, precision) <= tolerance


@pytest.mark.parametrize("packing", [pytest.param(False, marks=MORE), pytest.param(True, marks=MORE)])
def test_ten_steps_of_every_layout(tiny_model: Path, tmp_path: Path, packing: bool) -> None:
    """Degrees, methods, one and two data ranks beside them, accumulation of 1 and 3."""
    choices = itertools.product((2, 4), ("ulysses", "all_gather"), (1, 2), (1, 3))
    layouts = [(n * data, {"degree": n, "method": how}, 12 // data // steps) for n, how, data, steps in choices]
    assert _ten_steps(tiny_model, tmp_path, layouts, packing, "fp32") <= 1e-6


def _ten_steps(model: Path, folder: Path, layouts: list[Any], packing: bool, precision: str) -> float:
    """The largest difference of losses, weights and last gradients from one process in fp32, relative."""

    def run(name: str, *layout: Any, **strategy: Any) -> tuple[list[float], torch.Tensor, float]:
        found = _run(model, folder / name, *layout, steps=10, strategy=strategy, data={"packing": packing})
        module = load_weights(module_for(str(model)), folder / name / "checkpoints" / "step-00000010")
        weights = torch.cat([param.detach().flatten() for param in module.parameters()])
        return found["losses"], weights, float(torch.load(folder / f"{name}.pt").norm())

    (wanted, before, norm), differences = run("one", 1), list[float]()
    for number, layout in enumerate(layouts):
        losses, weights, found = run(str(number), *layout, precision=precision)
        differences += [worst_difference(losses, wanted), abs(found / norm - 1)]
        differences.append(float((weights - before).norm() / before.norm()))
    return max(differences)


@pytest.mark.parametrize("packing", [pytest.param(False, marks=MORE), True], ids=["padded", "packed"])
def test_noise_on_embeddings_is_that_of_whole_samples(tiny_model: Path, tmp_path: Path, packing: bool) -> None:
    """At most alpha / sqrt(L * D) by the length of the sample, wherever it is cut; ranks draw their own."""
    job: dict[str, Any] = {"data": {"packing": packing}, "model": {"neftune_alpha": 1e-3}}
    plain = _run(tiny_model, tmp_path / "plain", 1, data=job["data"])
    for degree in (2, {"degree": 2, "method": "all_gather"}):
        found = _run(tiny_model, tmp_path / str(degree).replace(" ", ""), 2, degree, **job)
        assert found["losses"] != plain["losses"]
        assert found["losses"] == pytest.approx(plain["losses"], rel=1e-3)


@pytest.mark.parametrize("lora", [False, pytest.param(True, marks=MORE)], ids=["full", "lora"])
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
        assert one["rows"] == "padded"  # and then cut as one
        assert one["tokens"] > 0
        for step, wanted in zip(one["steps"], found[0]["steps"], strict=True):
            assert step == pytest.approx(wanted, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    "others",
    [
        pytest.param(((2, 2), (4, 4)), id="few"),
        pytest.param(((2, 1), (4, 2)), id="others", marks=MORE),
    ],
)
def test_a_run_goes_on_with_another_degree(
    tiny_model: Path, tmp_path: Path, others: tuple[tuple[int, int], ...]
) -> None:
    """Bit-equal with the same one, and within rounding with others; each row once."""
    job: dict[str, Any] = {"folder": tiny_model, "data": {"packing": True}, "steps": 6, "micro": 2}
    whole = _run(run=tmp_path / "whole", ranks=2, degree=2, every=3, **job)
    cut = tmp_path / "whole" / "checkpoints" / "step-00000003"
    for ranks, degree in others:
        found = _run(run=tmp_path / f"{ranks}-{degree}", ranks=ranks, degree=degree, ckpt_path=cut, **job)
        if (ranks, degree) == (2, 2):
            assert found["digest"] == whole["digest"]
        assert found["losses"] == pytest.approx(whole["losses"][3:], rel=1e-5)


def test_faults_are_found(tiny_model: Path, tmp_path: Path) -> None:
    job: dict[str, Any] = {"folder": tiny_model, "steps": 2, "data": {**ROWS, "micro_batch_size": 4, "packing": True}}
    job["strategy"] = {"engine": "fsdp2", "context_parallel": 2}
    (wanted, _) = on_ranks("faulty_run", 2, fault="none", run=tmp_path / "none", **job)
    for fault, words in (
        ("positions", "with which llama gives other results: the hidden states of a row change"),
        ("leak", "a sample changes by"),
    ):
        with pytest.raises(RankError, match=words):
            on_ranks("faulty_run", 2, fault=fault, run=tmp_path / fault / "run", **job)
    lost = on_ranks("faulty_run", 2, fault="lost label", run=tmp_path / "lost", **job)[0]
    assert lost["supervised"] < wanted["supervised"]
    assert lost["losses"] != pytest.approx(wanted["losses"], rel=1e-6)
    twice = on_ranks("faulty_run", 2, fault="counted twice", run=tmp_path / "twice", **job)[0]
    assert twice["slots"] > 1.5 * wanted["slots"]


def test_somebodys_own_module_cuts_its_rows(tiny_model: Path) -> None:
    (wanted,) = on_ranks("own_run", 1, folder=tiny_model, degree=1)
    for found in on_ranks("own_run", 2, folder=tiny_model, degree=2):
        assert found == pytest.approx(wanted, rel=1e-6)


def test_the_mesh_has_a_dimension_of_positions(tiny_model: Path) -> None:
    job: Any = {"folder": tiny_model, "context_parallel": 2}
    found = on_ranks("named_mesh", 4, **job)
    for rank, (mesh, groups, own, losses) in enumerate(found):
        assert mesh == [[0, 1], [2, 3]]
        assert groups == {"dp_shard": [rank % 2, rank % 2 + 2], "context": [rank - rank % 2, rank - rank % 2 + 1]}
        assert (own, losses) == (groups["context"], found[0][3])
    mesh, groups, *_ = on_ranks("named_mesh", 4, sharding="hybrid_shard", replicate_degree=2, shard_degree=2, **job)[3]
    assert (mesh, groups) == ([[0, 1], [2, 3]], {"dp_replicate": [1, 3], "context": [2, 3]})
    mesh, groups, *_ = on_ranks("named_mesh", 2, **job)[1]
    assert (mesh, groups) == ([0, 1], {"context": [0, 1]})


def test_evaluation_says_each_row_once(tiny_model: Path, tmp_path: Path) -> None:
    """Validation, named sets and predictions are those of one process."""
    data = {"val": "generated:7", "max_seq_length": 160, "cache_dir": str(tmp_path / "cache"), "micro_batch_size": 2}
    found = [
        on_ranks("validate_run", ranks, folder=tiny_model, data=data, strategy={"context_parallel": degree})[0]
        for ranks, degree in ((1, 1), (2, 2), (4, 2))
    ]
    assert found[1:] == [pytest.approx(found[0], rel=1e-6)] * 2


def test_what_does_not_fit_is_refused_before_a_process_starts(tiny_model: Path, tmp_path: Path) -> None:
    for strategy, words in [
        ({"engine": "ddp", "context_parallel": 2}, "context_parallel: got above 1 with ddp"),
        ({"engine": "fsdp1", "context_parallel": 2}, "context_parallel: got above 1 with fsdp1"),
        ({"context_parallel": 0}, "context_parallel: got 0"),
        ({"context_parallel": 2, "sharding": "no_shard"}, "context_parallel: got above 1 with no_shard"),
        ({"context_parallel": 2, "compile": True}, "context_parallel: got above 1 with compile: true"),
    ]:
        with pytest.raises(ConfigError, match=words):
            StrategyConfig(**strategy)
    with pytest.raises(ConfigError, match="got 3 on 4 ranks\n  allowed: a divisor of 4"):
        mesh_shape(StrategyConfig(context_parallel=3), 1, 4)
    for family, words in (
        ("qwen3_next", "got 2 for qwen3_next, which has other kinds of layers"),
        ("falcon_h1", "got 2 for falcon_h1, which has other kinds of layers"),
        ("bloom", "got 2 for bloom with attention"),
    ):
        model = build_on_meta(shrink(AutoConfig.for_model(family), miniature_tokenizer()))
        with pytest.raises(ConfigError, match=words):
            context_method(model, ContextConfig(degree=2), "context_parallel")
    model = build_on_meta(AutoConfig.from_pretrained(tiny_model))
    heads = model.config.num_attention_heads
    with pytest.raises(ConfigError, match=f"ulysses over 3 ranks, with {heads} heads\n  allowed: degree: 1 | 2"):
        context_method(model, ContextConfig(degree=3, method="ulysses"), "context_parallel")
    assert context_method(model, ContextConfig(degree=3), "context_parallel") == "all_gather"
    assert context_method(model, ContextConfig(degree=2), "context_parallel") == "ulysses"


@pytest.mark.parametrize("kind", ["longrope", pytest.param("dynamic", marks=MORE)])
def test_frequencies_that_depend_on_the_length_are_those_of_the_whole_row(tmp_path: Path, kind: str) -> None:
    """The rows are longer than the original length, the part of one rank is not."""
    text: dict[str, Any] = {**TINY.to_diff_dict(), "initializer_range": 0.2}
    text["rope_parameters"] = {"rope_type": kind, "rope_theta": 10000.0}
    dims = text["hidden_size"] // text["num_attention_heads"] // 2
    if kind == "longrope":
        factors = {"short_factor": [1.0] * dims, "long_factor": [4.0] * dims, "original_max_position_embeddings": 10}
        text["rope_parameters"] |= factors
        text |= {"original_max_position_embeddings": 10, "max_position_embeddings": 64}
    else:
        text["rope_parameters"]["factor"] = 4.0
        text["max_position_embeddings"] = 10
    folder = tmp_path / "model"
    save_tiny(folder, LlamaConfig(**text))
    job: dict[str, Any] = {"folder": str(folder), "steps": 2, "optim": {"eps": 1e-4}}
    (wanted,) = on_ranks("train", 1, strategy={"precision": "fp32"}, accumulate_grad_batches=12, **job)
    strategy = {"precision": "fp32", "context_parallel": {"degree": 2, "method": "ulysses"}}
    for found in on_ranks("train", 2, strategy=strategy, accumulate_grad_batches=12, **job):
        assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-6)


def test_a_routers_loss_is_of_the_whole_row(tmp_path: Path) -> None:
    names = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads vocab_size"
    sizes = {name: getattr(TINY, name) for name in names.split()}
    folder = save_tiny(tmp_path / "mixture", MixtralConfig(**sizes, num_local_experts=4, output_router_logits=True))
    data = {"packing": True}
    wanted = _run(folder, tmp_path / "one", 1, data=data)
    before = torch.load(tmp_path / "one.pt")
    for method in ("ulysses", "all_gather"):
        found = _run(folder, tmp_path / method, 2, {"degree": 2, "method": method}, data=data)
        assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-6)
        gradients = torch.load(tmp_path / f"{method}.pt")
        assert (gradients - before).norm() / before.norm() <= 1e-6
