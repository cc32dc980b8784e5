"""The same arguments through ``TrainingArguments`` itself, beside the recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.convert.inputs import convert, strategy

CASES: dict[str, dict[str, Any]] = {
    "text of JSON": {"fsdp": True, "fsdp_config": '{"version": "1", "backward_prefetch": "backward_post"}'},
    "words": {"fsdp": "full_shard auto_wrap offload", "fsdp_config": {"fsdp_transformer_layer_cls_to_wrap": "Block"}},
    "size": {"fsdp": True, "fsdp_config": {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 2000}},
    "gathered": {"fsdp": ["shard_grad_op"], "fsdp_config": {"activation_checkpointing": "true"}},
    "compiled by its backend": {"torch_compile_backend": "inductor", "torch_compile": False},
    "batches": {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 6},
    "schedule": {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": '{"min_lr_rate": "0.1"}'},
}


def _resolved(arguments: Any) -> dict[str, Any]:
    """What ``TrainingArguments`` decided, in the words of a recipe."""
    found: dict[str, Any] = {"compile": arguments.torch_compile}
    plugin = arguments.fsdp_plugin_args
    if plugin is None:
        return found | {"engine": "ddp"}
    gathered = plugin["reshard_after_forward"] in (False, "shard_grad_op")
    wrap: Any = plugin.get("transformer_cls_names_to_wrap", "auto")
    if "min_num_params" in plugin:
        wrap = {"min_num_params": plugin["min_num_params"]}
    elif wrap != "auto":
        wrap = {"classes": wrap.split(","), "embedding_and_head": False}
    found |= {
        "engine": f"fsdp{plugin['fsdp_version']}",
        "sharding": "shard_grad_op" if gathered else "full_shard",
        "wrap": wrap,
        "cpu_offload": plugin.get("cpu_offload", False),
        "activation_checkpointing": "full" if plugin.get("activation_checkpointing") else "none",
        "state_dict": plugin["state_dict_type"].split("_")[0].lower(),
        "cpu_ram_efficient_loading": plugin["cpu_ram_efficient_loading"],
    }
    if "backward_prefetch" in plugin:
        found["backward_prefetch"] = plugin["backward_prefetch"].removeprefix("BACKWARD_").lower()
    return found


def test_the_arguments_decide_what_the_recipe_says(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    out = str(tmp_path / "out")
    for name, given in CASES.items():
        arguments = transformers.TrainingArguments(out, use_cpu=True, report_to=[], **given)
        found = convert("hf-trainer", {"output_dir": out, **given}, 2)
        ours, theirs = strategy(found), _resolved(arguments)
        assert {key: ours[key] for key in theirs} == theirs, name
        # What it writes of itself, with its many nulls, is the same recipe; only the CPU was for this test.
        whole = json.loads(arguments.to_json_string())
        whole.pop("use_cpu")
        again = convert("hf-trainer", whole, 2)
        assert strategy(again) == ours
        assert again.recipe["model"] == found.recipe["model"]
        assert again.recipe["data"]["micro_batch_size"] == found.recipe["data"]["micro_batch_size"]
        assert not again.differs
