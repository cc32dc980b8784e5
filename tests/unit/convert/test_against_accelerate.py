"""The same file through ``accelerate launch`` (its own parser and environment) into its plugin, beside the recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_fsdp.convert import convert_file
from tests.unit.convert.inputs import strategy

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
    file = tmp_path / "accelerate.yaml"
    dtypes = {"fp32": None, "mixed": "bf16", "fp16_mixed": "fp16"}
    for name, config in CASES.items():
        for mixed_precision in ("no", "bf16", "fp16") if name == "defaults" else ("bf16",):
            whole = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "num_processes": 8,
                     "num_machines": 2 if "hybrid" in name else 1, "machine_rank": 0, "main_process_ip": "127.0.0.1",
                     "main_process_port": 29500, "mixed_precision": mixed_precision, "fsdp_config": config}  # fmt: skip
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
