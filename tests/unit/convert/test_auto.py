"""``auto`` in a DeepSpeed configuration, and batch sizes that follow from each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lit_fsdp.convert.convert import convert_file
from lit_fsdp.convert.result import Conversion
from lit_fsdp.errors import ConfigError

BATCHES = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
# The usual file: everything that Transformers can fill in is auto.
USUAL: dict[str, Any] = {
    **BATCHES,
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"},
    "optimizer": {"type": "AdamW",
                  "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR",
                  "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
    "gradient_clipping": "auto", "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", "loss_scale": 0},
}  # fmt: skip


def _convert(folder: Path, kind: str, given: dict[str, Any], ranks: int | None = None) -> Conversion:
    file = folder / "in.json"
    file.write_text(json.dumps(given))
    return convert_file(kind, file, ranks)


def _leaves(values: dict[str, Any], path: str = "") -> list[str]:
    found = []
    for key, value in values.items():
        name = f"{path}.{key}" if path else key
        found += _leaves(value, name) if isinstance(value, dict) else [name] if value == "auto" else []
    return found


@pytest.mark.parametrize("ranks", [None, 1, 4])
def test_the_usual_file_converts_and_every_auto_is_named(tmp_path: Path, ranks: int | None) -> None:
    found = _convert(tmp_path, "deepspeed", USUAL, ranks)
    assert not found.differs
    said = {fate.key.split("[")[0]: fate.text for fate in found.fates}
    for key in _leaves(USUAL):
        assert "bucket" in key or "auto: " in said[key], (key, said)
    assert said["optimizer.params.lr"].startswith("replaced by model.optim.lr: 5.0e-05 (auto: ")
    assert found.recipe["data"] == {"global_batch_size": 8 * (ranks or 1), "micro_batch_size": 8}
    assert found.recipe["trainer"]["gradient_clip_val"] == 1.0
    assert any("auto in" in line and "optimizer.params.lr" in line for line in found.to_give)


def test_auto_alone_is_auto_in_a_trainer_without_arguments(tmp_path: Path) -> None:
    alone = _convert(tmp_path, "deepspeed", USUAL, 4).recipe
    trainer = _convert(tmp_path, "hf-trainer", {"deepspeed": USUAL}, 4).recipe
    for section in ("model", "data"):
        assert alone[section] == trainer[section]
    assert alone["trainer"]["strategy"] == trainer["trainer"]["strategy"]


def test_the_arguments_fill_it_in(tmp_path: Path) -> None:
    arguments = {"learning_rate": 3e-4, "adam_beta2": 0.95, "per_device_train_batch_size": 2, "bf16": True,
                 "warmup_steps": 0.1, "max_steps": 50, "gradient_accumulation_steps": 3}  # fmt: skip
    found = _convert(tmp_path, "hf-trainer", {"deepspeed": USUAL, **arguments}, 4)
    optim = found.recipe["model"]["optim"]
    assert (optim["lr"], optim["beta2"], optim["warmup_steps"]) == (3e-4, 0.95, 5)
    assert found.recipe["data"] == {"global_batch_size": 24, "micro_batch_size": 2}
    said = {fate.key: fate.text for fate in found.fates}
    assert said["deepspeed.optimizer.params.lr"].endswith("(auto: from TrainingArguments)")


def test_accelerate_says_the_precision(tmp_path: Path) -> None:
    (tmp_path / "zero.json").write_text(json.dumps(USUAL))
    given = {"distributed_type": "DEEPSPEED", "num_processes": 2, "mixed_precision": "bf16",
             "deepspeed_config": {"deepspeed_config_file": "zero.json"}}  # fmt: skip
    found = _convert(tmp_path, "accelerate", given)
    strategy = found.recipe["trainer"]["strategy"]["init_args"]
    assert strategy["precision"] == {"mode": "mixed", "reduce_dtype": "bf16"}
    on = _convert(tmp_path, "deepspeed", {**USUAL, "bf16": {"enabled": True}}, 2)
    assert on.recipe["trainer"]["strategy"]["init_args"]["precision"] == strategy["precision"]


def test_accelerate_adds_the_section_that_the_file_lacks(tmp_path: Path) -> None:
    (tmp_path / "zero.json").write_text('{"zero_optimization": {"stage": 3}}')
    given = {"distributed_type": "DEEPSPEED", "num_processes": 2, "mixed_precision": "bf16",
             "deepspeed_config": {"deepspeed_config_file": "zero.json"}}  # fmt: skip
    found = _convert(tmp_path, "accelerate", given)
    assert found.recipe["trainer"]["strategy"]["init_args"]["precision"]["mode"] == "mixed"


def test_the_trainer_adds_the_section_too(tmp_path: Path) -> None:
    given = {"bf16": True, "deepspeed": {"zero_optimization": {"stage": 3}}}
    found = _convert(tmp_path, "hf-trainer", given, 2)
    assert found.recipe["trainer"]["strategy"]["init_args"]["precision"]["mode"] == "mixed"
    assert "deepspeed.bf16.enabled" not in [fate.key for fate in found.fates]


def test_accelerate_clips_at_one_unless_told(tmp_path: Path) -> None:
    whole = {"distributed_type": "DEEPSPEED", "num_processes": 2}
    for section, norm in (({}, 1.0), ({"gradient_clipping": "auto"}, 1.0), ({"gradient_clipping": 0.5}, 0.5)):
        found = _convert(tmp_path, "accelerate", {**whole, "deepspeed_config": {"zero_stage": 2, **section}})
        assert found.recipe["trainer"]["gradient_clip_val"] == norm


@pytest.mark.parametrize("kind", ["deepspeed", "hf-trainer"])
def test_the_stage_is_two_as_the_plugin_has_it(tmp_path: Path, kind: str) -> None:
    zero = {"train_batch_size": "auto", "zero_optimization": {"stage": "auto"}}
    found = _convert(tmp_path, kind, zero if kind == "deepspeed" else {"deepspeed": zero}, 2)
    strategy = found.recipe["trainer"]["strategy"]["init_args"]
    assert (strategy["engine"], strategy["sharding"]) == ("fsdp2", "shard_grad_op")
    assert not found.differs


def test_accumulation_alone_leaves_the_batch_to_the_script(tmp_path: Path) -> None:
    found = _convert(tmp_path, "deepspeed", {"gradient_accumulation_steps": "auto"})
    assert not found.differs
    assert "global_batch_size" not in found.recipe.get("data", {})


def test_where_nobody_fills_it_in(tmp_path: Path) -> None:
    found = _convert(tmp_path, "deepspeed", {"train_batch_size": 8, "communication_data_type": "auto"}, 2)
    assert [fate.key for fate in found.fates if fate.differs] == ["communication_data_type"]


def test_a_share_of_an_unknown_length_is_a_difference(tmp_path: Path) -> None:
    found = _convert(tmp_path, "hf-trainer", {"deepspeed": USUAL, "warmup_ratio": 0.1}, 2)
    assert [fate.key for fate in found.fates if fate.differs] == ["deepspeed.scheduler.params.warmup_num_steps"]


@pytest.mark.parametrize(
    ("sizes", "ranks", "data", "devices"),
    [
        ((16, 2, None), 4, (16, 2), 4),
        ((16, None, 4), 2, (16, 2), 2),
        ((None, 2, 3), 4, (24, 2), 4),
        ((16, None, None), 2, (16, 8), 2),
        ((16, 2, 4), None, (16, 2), 2),
        ((64, "auto", "auto"), 4, (64, 16), 4),
        (("auto", 4, "auto"), 4, (16, 4), 4),
    ],
)
def test_two_sizes_give_the_third(
    tmp_path: Path, sizes: tuple[Any, ...], ranks: int | None, data: tuple[int, int], devices: int
) -> None:
    given = {key: size for key, size in zip(BATCHES, sizes, strict=True) if size}
    found = _convert(tmp_path, "deepspeed", given, ranks)
    assert (found.recipe["data"]["global_batch_size"], found.recipe["data"]["micro_batch_size"]) == data
    assert found.recipe["trainer"]["devices"] == devices
    assert not found.differs
    assert set(given) <= {fate.key for fate in found.fates}


@pytest.mark.parametrize(
    ("sizes", "ranks", "fix"),
    [
        ((16, None, 3), 2, 18),
        ((16, None, 3), None, 15),
        ((16, 3, None), None, 15),
        ((15, None, None), 2, 16),
        ((16, 2, 2), 2, 8),
        ((2, None, None), 4, 4),
        ((16, 8, "auto"), 4, 32),
    ],
)
def test_sizes_that_no_number_of_ranks_has(tmp_path: Path, sizes: tuple[Any, ...], ranks: int | None, fix: int) -> None:
    given = {key: size for key, size in zip(BATCHES, sizes, strict=True) if size}
    with pytest.raises(ConfigError) as error:
        _convert(tmp_path, "deepspeed", given, ranks)
    assert error.value.field == "train_batch_size"
    assert error.value.fix.startswith(f"write train_batch_size: {fix}")


def test_a_batch_per_rank_without_ranks_is_a_difference(tmp_path: Path) -> None:
    for sizes in ({"train_micro_batch_size_per_gpu": "auto"}, BATCHES, {"gradient_accumulation_steps": 2}):
        arguments = {"gradient_accumulation_steps": 2, "deepspeed": sizes}
        found = _convert(tmp_path, "hf-trainer", arguments)
        assert found.differs
        assert {f"deepspeed.{key}" for key in sizes} <= {fate.key for fate in found.fates}
    for given in ({"train_micro_batch_size_per_gpu": 4}, {**BATCHES, "train_micro_batch_size_per_gpu": 4}):
        found = _convert(tmp_path, "deepspeed", given)
        assert found.differs
        assert set(given) <= {fate.key for fate in found.fates}
