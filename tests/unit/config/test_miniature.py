"""What a miniature on a CPU replaces in the strategy, each with a line that says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lit_fsdp.config.miniature import adapt_to_miniature
from lit_fsdp.config.strategy import WrapConfig


def adapted(devices: int = 2, accelerator: str = "cpu", **args: Any) -> tuple[dict[str, Any], list[str]]:
    """The recipe afterwards and the lines said."""
    trainer = {"devices": devices, "accelerator": accelerator, "strategy": {"init_args": args}}
    values = {"trainer": trainer, "model": {"miniature": True}}
    return values, adapt_to_miniature(values, [])


@pytest.mark.parametrize(
    ("given", "key", "new"),
    [
        ({"precision": "fp8"}, "precision", "auto"),
        (
            {"precision": {"mode": "fp8", "fp8_skip": ["a"], "reduce_dtype": "bf16"}},
            "precision",
            {"mode": "auto", "reduce_dtype": "bf16"},
        ),
        ({"engine": "fsdp1", "cpu_offload": True}, "cpu_offload", False),
        ({"process_group_backend": "cpu:gloo,cuda:nccl"}, "process_group_backend", None),
        ({"sharding": "hybrid_shard_zero2"}, "replicate_degree", 2),
        ({"sharding": "hybrid_shard", "shard_degree": 8}, "shard_degree", -1),
    ],
)
def test_what_a_cpu_lacks_is_replaced(given: dict[str, Any], key: str, new: Any) -> None:
    values, said = adapted(**given)
    assert values["trainer"]["strategy"]["init_args"][key] == new
    assert len(said) >= 1
    assert any(line.startswith(f"trainer.strategy.init_args.{key}: ") for line in said)


def test_a_single_device_is_one_device() -> None:
    values, said = adapted(engine="single")
    assert values["trainer"]["devices"] == 1
    assert said == ["trainer.devices: 2 → 1 (engine single)"]


@pytest.mark.parametrize(
    "given", [{"engine": "fsdp2", "cpu_offload": True}, {"precision": "fp16_mixed"}, {"engine": "ddp"}, {}]
)
def test_what_a_cpu_can_do_stays(given: dict[str, Any]) -> None:
    values, said = adapted(**given)
    assert values["trainer"]["strategy"]["init_args"] == given
    assert said == []


def test_a_gpu_keeps_its_choices() -> None:
    values, said = adapted(accelerator="gpu", precision="fp8", process_group_backend="nccl")
    assert values["trainer"]["strategy"]["init_args"] == {"precision": "fp8", "process_group_backend": "nccl"}
    assert said == []


@pytest.mark.parametrize(
    ("wrap", "kept"),
    [
        (None, {}),
        ("auto", {}),
        ("manual", {"manual": True}),
        (["Layer", "model.layers.*.mlp"], {"classes": ["Layer"], "patterns": ["model.layers.*.mlp"]}),
        ({"experts": True}, {"experts": True}),
    ],
)
def test_the_vocabulary_of_a_model_on_disk_may_stay_in_the_root(
    tmp_path: Path, wrap: Any, kept: dict[str, Any]
) -> None:
    """It is nearly all of the miniature, whose blocks are small."""
    args = {} if wrap is None else {"wrap": wrap}
    trainer = {"devices": 2, "strategy": {"init_args": args}}
    said = adapt_to_miniature({"model": {"name": str(tmp_path), "miniature": True}, "trainer": trainer}, [])
    assert args["wrap"] == {**kept, "max_root_share": 1.0}
    assert len(said) == 1
    assert WrapConfig(**args["wrap"]).max_root_share == 1.0
