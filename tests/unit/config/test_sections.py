from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import math

import pytest

from lit_fsdp.config.data import DataConfig, accumulation_steps
from lit_fsdp.config.model import ModelConfig, OptimConfig, schedule_factor
from lit_fsdp.config.parser import strategy_config
from lit_fsdp.config.run import CheckpointConfig
from lit_fsdp.config.strategy import (
    ActivationConfig,
    DtypeRow,
    PrecisionConfig,
    StrategyConfig,
    WrapConfig,
    mesh_shape,
)
from lit_fsdp.errors import CheckpointError, ConfigError, ContractError, DataError
from lit_fsdp.strategy import fsdp_strategy

SECTIONS = (ActivationConfig, CheckpointConfig, DataConfig, ModelConfig, OptimConfig, PrecisionConfig)


@pytest.mark.parametrize("config", [*SECTIONS, StrategyConfig, WrapConfig])
def test_a_section_is_frozen_takes_keywords_only_and_explains_each_field(config: type):
    made, names = config(), [field.name for field in dataclasses.fields(config)]
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, names[0], None)
    with pytest.raises(TypeError):
        config(None)
    body = ast.parse(inspect.getsource(config)).body[0].body
    after = dict(itertools.pairwise(body))
    docs = {node.target.id: after[node].value.value for node in body if isinstance(node, ast.AnnAssign)}
    assert sorted(docs) == sorted(names)
    assert all(text.endswith(".") for text in docs.values())


def test_errors_say_what_was_given_what_is_allowed_and_how_to_fix_it():
    error = ConfigError("a.b", 3, "1 or 2", "write a.b: 1")
    assert str(error) == "a.b: got 3\n  allowed: 1 or 2\n  fix:     write a.b: 1"
    assert isinstance(error, ValueError)
    assert issubclass(DataError, ValueError)
    assert issubclass(CheckpointError, RuntimeError)
    assert issubclass(ContractError, RuntimeError)


# -- strategy


def test_words_are_short_for_mappings():
    words = strategy_config({"precision": "fp32", "activation_checkpointing": "full", "wrap": ["Block"]})
    spelled = strategy_config(
        {"precision": {"mode": "fp32"}, "activation_checkpointing": {"mode": "full"}, "wrap": {"classes": ["Block"]}}
    )
    for name in ("precision_config", "activation_config", "wrap_config"):
        assert getattr(words, name) == getattr(spelled, name)
    assert StrategyConfig().wrap_config == WrapConfig()
    assert strategy_config({"wrap": {"min_num_params": "1e6"}}).wrap_config.min_num_params == 1e6


def test_the_factorys_arguments_are_the_fields():
    assert [f.name for f in dataclasses.fields(StrategyConfig)] == list(inspect.signature(fsdp_strategy).parameters)
    assert strategy_config({}) == StrategyConfig()
    defaults = {name: p.default for name, p in inspect.signature(fsdp_strategy).parameters.items()}
    assert defaults | {"precision": "mixed"} == vars(StrategyConfig())


@pytest.mark.parametrize(
    ("mode", "override", "row"),
    [
        ("mixed", None, DtypeRow("fp32", "bf16", "fp32")),
        ("mixed", "bf16", DtypeRow("fp32", "bf16", "bf16")),
        ("low_precision", None, DtypeRow("bf16", "bf16", "bf16")),
        ("low_precision", "fp32", DtypeRow("bf16", "bf16", "fp32")),
        ("fp32", None, DtypeRow("fp32", "fp32", "fp32")),
    ],
)
def test_a_precision_mode_promises_these_dtypes(mode: str, override: str | None, row: DtypeRow):
    assert PrecisionConfig(mode=mode, reduce_dtype=override).row == row


@pytest.mark.parametrize(
    ("sharding", "copies", "nodes", "ranks", "shape"),
    [
        ("full_shard", None, 1, 1, (1, 1)),
        ("full_shard", None, 2, 16, (1, 16)),
        ("shard_grad_op", None, 1, 8, (1, 8)),
        ("no_shard", None, 1, 8, (8, 1)),
        ("hybrid_shard", None, 2, 16, (2, 8)),
        ("hybrid_shard", 4, 2, 16, (4, 4)),
        ("hybrid_shard", 1, 1, 8, (1, 8)),
        ("hybrid_shard", 8, 1, 8, (8, 1)),
    ],
)
def test_mesh_shape(sharding: str, copies: int | None, nodes: int, ranks: int, shape: tuple[int, int]):
    config = StrategyConfig(sharding=sharding, replicate_degree=copies)
    assert mesh_shape(config, nodes, ranks) == shape
    assert shape[0] * shape[1] == ranks


@pytest.mark.parametrize(
    ("options", "nodes", "ranks", "shape"),
    [
        ({"sharding": "hybrid_shard", "shard_degree": 4}, 1, 8, (2, 4)),
        ({"sharding": "hybrid_shard", "shard_degree": -1, "replicate_degree": 2}, 4, 8, (2, 4)),
        ({"sharding": "hybrid_shard_zero2", "shard_degree": 2, "replicate_degree": -1}, 1, 8, (4, 2)),
        ({"sharding": "hybrid_shard", "shard_degree": 2, "replicate_degree": 4}, 1, 8, (4, 2)),
        ({"sharding": "hybrid_shard", "shard_degree": -1}, 2, 8, (2, 4)),
        ({"shard_degree": -1}, 2, 8, (1, 8)),
        ({"shard_degree": 8, "replicate_degree": 1}, 1, 8, (1, 8)),
        ({"sharding": "no_shard", "replicate_degree": -1}, 1, 8, (8, 1)),
        ({"sharding": "no_shard", "replicate_degree": 8, "shard_degree": 1}, 1, 8, (8, 1)),
        ({"engine": "ddp"}, 1, 8, (8, 1)),
        ({"engine": "single"}, 1, 1, (1, 1)),
    ],
)
def test_degrees(options: dict[str, object], nodes: int, ranks: int, shape: tuple[int, int]):
    assert mesh_shape(strategy_config(options), nodes, ranks) == shape


@pytest.mark.parametrize(
    ("options", "ranks", "field", "given", "fix"),
    [
        ({"shard_degree": 4}, 8, "shard_degree", "4 with sharding full_shard on 8 ranks", "set shard_degree: 8, or sh"),
        (
            {"sharding": "hybrid_shard", "shard_degree": 4, "replicate_degree": 4},
            8,
            "shard_degree",
            "4 with replicate_degree 4 on 8 ranks",
            "set shard_degree: -1, or shard_degree: 2 with replicate_degree: 4",
        ),
        ({"sharding": "hybrid_shard", "shard_degree": 6}, 8, "shard_degree", "6 on 8 ranks", "set shard_degree: 4"),
        ({"sharding": "no_shard", "replicate_degree": 4}, 8, "replicate_degree", "4 with", "set replicate_degree: 8"),
        ({"engine": "single"}, 2, "engine", "single on 2 ranks", "set trainer.devices: 1, or engine: ddp"),
        ({"sharding": "hybrid_shard"}, 8, "replicate_degree", "null on one node", "set replicate_degree: 2, or"),
    ],
)
def test_degrees_that_do_not_fit(options: dict[str, object], ranks: int, field: str, given: str, fix: str):
    with pytest.raises(ConfigError) as caught:
        mesh_shape(strategy_config(options), 1, ranks, "s")
    assert caught.value.field == f"s.{field}"
    assert str(caught.value.given).startswith(given)
    assert caught.value.fix.startswith(fix)


def test_engines_without_shards_say_what_they_replace():
    assert strategy_config({"engine": "ddp"}).replaced == {
        "sharding": "full_shard → no_shard (engine ddp: every rank holds the whole model)"
    }
    assert strategy_config({"engine": "single", "sharding": "no_shard"}).replaced == {}
    given = {"sharding": "hybrid_shard", "shard_degree": 2, "cpu_offload": True, "forward_prefetch": 2}
    given |= {"sync_each_micro_batch": False, "wrap": {"max_root_share": 0.7}}
    config = strategy_config({"engine": "single", **given})
    assert not config.offloads
    assert mesh_shape(config, 1, 1) == (1, 1)
    assert {name: text.partition(" (")[0] for name, text in config.replaced.items()} == {
        "sharding": "hybrid_shard → no_shard",
        "shard_degree": "2 → null",
        "cpu_offload": "true → false",
        "forward_prefetch": "2 → false",
        "sync_each_micro_batch": "false → true",
        "wrap.max_root_share": "0.7 → null",
    }
    assert "sync_each_micro_batch" not in strategy_config({"engine": "ddp", **given}).replaced
    assert strategy_config({}).replaced == {}


@pytest.mark.parametrize(
    ("copies", "nodes", "ranks", "given", "fix"),
    [
        (3, 1, 8, "3 on 8 ranks", "set replicate_degree: 2"),
        (16, 1, 8, "16 on 8 ranks", "set replicate_degree: 8"),
        (None, 3, 8, "3 on 8 ranks", "set replicate_degree: 2"),
    ],
)
def test_copies_that_do_not_divide_the_ranks_are_refused(copies, nodes, ranks, given, fix):
    with pytest.raises(ConfigError) as caught:
        mesh_shape(StrategyConfig(sharding="hybrid_shard", replicate_degree=copies), nodes, ranks, "s")
    assert (caught.value.field, caught.value.given, caught.value.fix) == ("s.replicate_degree", given, fix)
    assert caught.value.allowed == "a divisor of the ranks: 1, 2, 4, 8"


# -- batches


@pytest.mark.parametrize(("batch", "micro", "ranks", "steps"), [(16, 4, 2, 2), (8, 1, 8, 1), (6, 3, 1, 2)])
def test_accumulation_follows_from_the_batches(batch: int, micro: int, ranks: int, steps: int):
    config = DataConfig(global_batch_size=batch, micro_batch_size=micro)
    assert accumulation_steps(config, ranks) == steps == accumulation_steps(config, ranks, steps)
    assert steps * micro * ranks == batch


@pytest.mark.parametrize(("batch", "nearest"), [(1, 6), (7, 6), (10, 12), (20, 18)])
def test_a_batch_that_cannot_be_split_gets_the_nearest_that_can(batch: int, nearest: int):
    with pytest.raises(ConfigError, match=f"set global_batch_size: {nearest},"):
        accumulation_steps(DataConfig(global_batch_size=batch, micro_batch_size=3), 2)


# -- schedule


def test_warm_up_is_linear_and_reaches_the_peak():
    optim = OptimConfig(warmup_steps=4)
    assert [schedule_factor(optim, step, 100) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


@pytest.mark.parametrize(
    ("schedule", "quarter", "half", "end"),
    [
        ("linear", 0.75, 0.5, 0.0),
        ("cosine", (1 + math.sqrt(0.5)) / 2, 0.5, 0.0),
        ("constant", 1.0, 1.0, 1.0),
    ],
)
def test_schedules_fall_over_the_run(schedule, quarter: float, half: float, end: float):
    optim = OptimConfig(schedule=schedule)
    found = [schedule_factor(optim, step, 100) for step in (0, 25, 50, 100, 150)]
    assert found == pytest.approx([1.0, quarter, half, end, end])


def test_the_schedule_ends_at_its_floor():
    optim = OptimConfig(schedule="cosine", warmup_steps=10, min_lr_ratio=0.1)
    assert schedule_factor(optim, 60, 110) == pytest.approx(0.55)
    assert schedule_factor(optim, 110, 110) == pytest.approx(0.1)


def test_a_run_that_is_all_warm_up_never_divides_by_zero():
    assert schedule_factor(OptimConfig(warmup_steps=3), 3, 3) == 1.0
