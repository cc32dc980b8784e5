"""The same file through ``accelerate launch`` (its own parser and environment) into its plugin, beside the recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import CONFIG_MAPPING

from lit_fsdp.convert import convert_file
from lit_fsdp.host import free_port
from tests.unit.convert.inputs import convert, strategy

CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "all of version 1": {
        "fsdp_sharding_strategy": "SHARD_GRAD_OP", "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer,LlamaMLP", "fsdp_backward_prefetch": "BACKWARD_POST",
        "fsdp_forward_prefetch": True, "fsdp_offload_params": True, "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_use_orig_params": True, "fsdp_activation_checkpointing": True,
    },
    "without prefix, in numbers": {
        "sharding_strategy": 1, "backward_prefetch": "1", "auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 2000,
        "state_dict_type": "FULL_STATE_DICT", "sync_module_states": False, "cpu_ram_efficient_loading": False,
    },
    "no prefetch, hybrid": {"fsdp_sharding_strategy": 4, "fsdp_backward_prefetch": "NO_PREFETCH"},
    "version 2": {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
    "version 2, gathered": {
        "fsdp_version": 2, "fsdp_reshard_after_forward": False, "fsdp_offload_params": True,
        "fsdp_activation_checkpointing": True, "fsdp_activation_checkpointing_offload": True,
        "fsdp_state_dict_type": "FULL_STATE_DICT", "fsdp_transformer_layer_cls_to_wrap": "Block",
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    },
}  # fmt: skip


def _plugin(file: Path, mixed_precision: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The plugin that a script started by ``accelerate launch --config_file`` would build."""
    torch = pytest.importorskip("torch")
    launch = pytest.importorskip("accelerate.commands.launch")
    from accelerate.utils import dataclasses
    from accelerate.utils.launch import prepare_multi_gpu_env

    # It asks for the current GPU where rank 0 sends its weights; no GPU is used by building the plugin.
    monkeypatch.setattr(dataclasses, "is_cuda_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    parser = launch.launch_command_parser()
    args, _, _ = launch._validate_launch_command(parser.parse_args(["--config_file", str(file), "script.py"]))
    args.num_processes = 8
    for name, value in prepare_multi_gpu_env(args).items():
        if name.startswith(("FSDP_", "ACCELERATE_")):
            monkeypatch.setenv(name, value)
    plugin = dataclasses.FullyShardedDataParallelPlugin()
    if mixed_precision != "no":
        plugin.set_mixed_precision(mixed_precision)
    return plugin


def _resolved(plugin: Any) -> dict[str, Any]:
    """What the plugin decided, in the words of a recipe."""
    policy, offload, first = plugin.auto_wrap_policy, plugin.cpu_offload, plugin.fsdp_version == 1
    wrap: Any = "auto"
    if policy is not None and policy.__name__ == "size_based_auto_wrap_policy":
        wrap = {"min_num_params": plugin.min_num_params}
    elif plugin.transformer_cls_names_to_wrap:
        wrap = {"classes": plugin.transformer_cls_names_to_wrap, "embedding_and_head": False}
    zero = "full_shard" if plugin.reshard_after_forward else "shard_grad_op"
    checkpointing: Any = "full" if plugin.activation_checkpointing else "none"
    if plugin.activation_checkpointing_offload:
        checkpointing = {"mode": "full", "offload_activations": True}
    found = {
        "engine": f"fsdp{plugin.fsdp_version}",
        "sharding": plugin.sharding_strategy.name.lower().removeprefix("_") if first else zero,
        "wrap": wrap,
        "cpu_offload": offload.offload_params if first else type(offload).__name__ == "CPUOffloadPolicy",
        "state_dict": plugin.state_dict_type.name.split("_")[0].lower(),
        "activation_checkpointing": checkpointing,
        "cpu_ram_efficient_loading": plugin.cpu_ram_efficient_loading,
    }
    if first:
        prefetch = plugin.backward_prefetch and plugin.backward_prefetch.name.removeprefix("BACKWARD_").lower()
        found |= {"backward_prefetch": prefetch or "none", "forward_prefetch": plugin.forward_prefetch}
        found |= {"limit_all_gathers": plugin.limit_all_gathers, "sync_module_states": plugin.sync_module_states}
    names = {"torch.bfloat16": "bf16", "torch.float16": "fp16"}
    for part in ("param_dtype", "reduce_dtype", "buffer_dtype"):
        found[part] = names.get(str(getattr(plugin.mixed_precision_policy, part, None)))
    return found


@pytest.mark.filterwarnings("ignore::UserWarning:accelerate")
def test_the_plugin_decides_what_the_recipe_says(tmp_path: Path) -> None:
    file, port = tmp_path / "accelerate.yaml", free_port()
    dtypes = {"fp32": None, "mixed": "bf16", "fp16_mixed": "fp16"}
    for name, config in CASES.items():
        for mixed_precision in ("no", "bf16", "fp16") if name == "defaults" else ("bf16",):
            whole = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "num_processes": 8,
                     "num_machines": 2 if "hybrid" in name else 1, "machine_rank": 0, "main_process_ip": "127.0.0.1",
                     "main_process_port": port, "mixed_precision": mixed_precision, "fsdp_config": config}  # fmt: skip
            file.write_text(yaml.safe_dump(whole))
            with pytest.MonkeyPatch.context() as patch:
                theirs = _resolved(_plugin(file, mixed_precision, patch))
            found = convert_file("accelerate", file)
            ours = strategy(found)
            precision = {"mode": ours["precision"]} if mixed_precision == "no" else dict(ours["precision"])
            ours |= {"reduce_dtype": None, "buffer_dtype": None, "param_dtype": dtypes[precision.pop("mode")]}
            ours |= precision
            assert {key: ours[key] for key in theirs} == theirs, name
            assert not found.differs


TRAINER_CASES: dict[str, dict[str, Any]] = {
    "text of JSON": {"fsdp": True, "fsdp_config": '{"version": "1", "backward_prefetch": "backward_post"}'},
    "words": {"fsdp": "full_shard auto_wrap offload", "fsdp_config": {"fsdp_transformer_layer_cls_to_wrap": "Block"}},
    "size": {"fsdp": True, "fsdp_config": {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 2000}},
    "gathered": {"fsdp": ["shard_grad_op"], "fsdp_config": {"activation_checkpointing": "true"}},
    "compiled by its backend": {"torch_compile_backend": "inductor", "torch_compile": False},
    "batches": {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 6},
    "schedule": {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": '{"min_lr_rate": "0.1"}'},
}


def _resolved_trainer(arguments: Any) -> dict[str, Any]:
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
        "state_dict": plugin.get("state_dict_type", "FULL").split("_")[0].lower(),
        "cpu_ram_efficient_loading": plugin["cpu_ram_efficient_loading"],
    }
    if "backward_prefetch" in plugin:
        found["backward_prefetch"] = plugin["backward_prefetch"].removeprefix("BACKWARD_").lower()
    return found


@pytest.mark.skipif("gemma4_text" not in CONFIG_MAPPING, reason="earlier releases of transformers have other defaults")
def test_the_arguments_decide_what_the_recipe_says(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    out = str(tmp_path / "out")
    for name, given in TRAINER_CASES.items():
        arguments = transformers.TrainingArguments(out, use_cpu=True, report_to=[], **given)
        found = convert("hf-trainer", {"output_dir": out, **given}, 2)
        ours, theirs = strategy(found), _resolved_trainer(arguments)
        assert {key: ours[key] for key in theirs} == theirs, name
        # What it writes of itself, with its many nulls, is the same recipe; only the CPU was for this test.
        whole = json.loads(arguments.to_json_string())
        whole.pop("use_cpu")
        again = convert("hf-trainer", whole, 2)
        assert strategy(again) == ours
        assert again.recipe["model"] == found.recipe["model"]
        assert again.recipe["data"]["micro_batch_size"] == found.recipe["data"]["micro_batch_size"]
        assert not again.differs
