"""One row per snippet: what it becomes, which keys are said to be what, and whether it trains the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lit_fsdp.config.parser import check_recipe
from lit_fsdp.convert.convert import convert_file

FSDP = {"distributed_type": "FSDP", "num_processes": 8, "mixed_precision": "bf16"}
BF16_V1 = {"mode": "mixed", "reduce_dtype": "bf16", "buffer_dtype": "bf16"}
BF16_V2 = {"mode": "mixed", "reduce_dtype": "bf16"}
NAMED = {"classes": ["A"], "embedding_and_head": False}


def _v1(**config: Any) -> dict[str, Any]:
    return {**FSDP, "fsdp_config": config}


def _v2(**config: Any) -> dict[str, Any]:
    return {**FSDP, "fsdp_config": {"fsdp_version": 2, **config}}


# input, init_args that must come out, {key: beginning of its line}, whether it differs
ACCELERATE: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, str], bool]] = {
    "defaults of version 1": (
        _v1(),
        {"engine": "fsdp1", "sharding": "full_shard", "wrap": "auto", "precision": BF16_V1, "backward_prefetch": "none",
         "state_dict": "full", "cpu_ram_efficient_loading": True, "cpu_offload": False},
        {"num_processes": "kept as trainer.devices: 8 (per node)"}, False,
    ),
    "defaults of version 2": (
        _v2(), {"engine": "fsdp2", "sharding": "full_shard", "precision": BF16_V2, "state_dict": "sharded"},
        {"fsdp_config.fsdp_version": "kept as engine: fsdp2"}, False,
    ),
    "without prefix": (
        _v1(sharding_strategy="SHARD_GRAD_OP", offload_params=True), {"sharding": "shard_grad_op", "cpu_offload": True},
        {"fsdp_config.sharding_strategy": "kept as sharding: shard_grad_op",
         "fsdp_config.offload_params": "kept as cpu_offload: true"}, False,
    ),
    "strategy 1": (_v1(fsdp_sharding_strategy=1), {"sharding": "full_shard"}, {}, False),
    "strategy 2": (_v1(fsdp_sharding_strategy=2), {"sharding": "shard_grad_op"}, {}, False),
    "strategy '3'": (_v1(fsdp_sharding_strategy="3"), {"sharding": "no_shard"}, {}, False),
    "strategy in small letters": (_v1(fsdp_sharding_strategy="full_shard"), {"sharding": "full_shard"}, {}, False),
    "hybrid on two machines": (
        {**_v1(fsdp_sharding_strategy="HYBRID_SHARD"), "num_machines": 2}, {"sharding": "hybrid_shard"},
        {"num_machines": "kept as trainer.num_nodes: 2", "num_processes": "kept as trainer.devices: 4"}, False,
    ),
    "hybrid 5 on two machines": (
        {**_v1(fsdp_sharding_strategy=5), "num_machines": 2}, {"sharding": "hybrid_shard_zero2"}, {}, False,
    ),
    "reshard name in version 1": (
        _v1(fsdp_reshard_after_forward="SHARD_GRAD_OP"), {"sharding": "shard_grad_op"},
        {"fsdp_config.fsdp_reshard_after_forward": "kept as sharding: shard_grad_op (Accelerate 1.x ignores it"}, False,
    ),
    "reshard false in version 2": (
        _v2(fsdp_reshard_after_forward=False), {"sharding": "shard_grad_op"},
        {"fsdp_config.fsdp_reshard_after_forward": "kept as sharding: shard_grad_op"}, False,
    ),
    "classes with commas": (
        _v1(fsdp_auto_wrap_policy="transformer_based_wrap", fsdp_transformer_layer_cls_to_wrap="A, B"),
        {"wrap": {**NAMED, "classes": ["A", "B"]}},
        {"fsdp_config.fsdp_transformer_layer_cls_to_wrap": "kept as wrap: {classes: [A, B], embedding_"}, False,
    ),
    "classes as a list": (
        _v2(auto_wrap_policy="TRANSFORMER_BASED_WRAP", transformer_layer_cls_to_wrap=["A"]), {"wrap": NAMED}, {}, False,
    ),
    "wrapped by the model's classes": (
        _v1(fsdp_auto_wrap_policy="TRANSFORMER_BASED_WRAP"), {"wrap": "auto"},
        {"fsdp_config.fsdp_auto_wrap_policy": "replaced by wrap: auto (the model's own block classes)"}, False,
    ),
    "size": (
        _v1(fsdp_auto_wrap_policy="SIZE_BASED_WRAP", fsdp_min_num_params=2000), {"wrap": {"min_num_params": 2000}},
        {"fsdp_config.fsdp_min_num_params": "kept as wrap: {min_num_params: 2000}"}, False,
    ),
    "size of the launcher": (
        _v1(fsdp_auto_wrap_policy="SIZE_BASED_WRAP"), {"wrap": {"min_num_params": 100_000_000}}, {}, False,
    ),
    "no wrap": (
        _v1(fsdp_auto_wrap_policy="NO_WRAP", fsdp_min_num_params=5), {"wrap": "auto"},
        {"fsdp_config.fsdp_auto_wrap_policy": "replaced by wrap: auto (one unit",
         "fsdp_config.fsdp_min_num_params": "dropped because auto_wrap_policy NO_WRAP"}, False,
    ),
    "prefetch post": (
        _v1(fsdp_backward_prefetch="backward_post", fsdp_forward_prefetch="true"),
        {"backward_prefetch": "post", "forward_prefetch": True}, {}, False,
    ),
    "prefetch 3": (_v1(fsdp_backward_prefetch=3), {"backward_prefetch": "none"}, {}, False),
    "prefetch in version 2": (
        _v2(fsdp_backward_prefetch="BACKWARD_POST", fsdp_forward_prefetch=True),
        {"backward_prefetch": "pre", "forward_prefetch": False},
        {"fsdp_config.fsdp_backward_prefetch": "replaced by backward_prefetch: pre",
         "fsdp_config.fsdp_forward_prefetch": "dropped because version 2"}, False,
    ),
    "local state": (
        _v1(fsdp_state_dict_type="LOCAL_STATE_DICT"), {"state_dict": "sharded"},
        {"fsdp_config.fsdp_state_dict_type": "replaced by state_dict: sharded"}, False,
    ),
    "recompute": (_v1(fsdp_activation_checkpointing=True), {"activation_checkpointing": "full"}, {}, False),
    "recompute and offload": (
        _v2(fsdp_activation_checkpointing=True, fsdp_activation_checkpointing_offload=True),
        {"activation_checkpointing": {"mode": "full", "offload_activations": True}}, {}, False,
    ),
    "flat parameters": (
        _v1(fsdp_use_orig_params=False, fsdp_limit_all_gathers=False), {"limit_all_gathers": True},
        {"fsdp_config.fsdp_use_orig_params": "replaced by use_orig_params: true",
         "fsdp_config.fsdp_limit_all_gathers": "dropped because accelerate launch does not read it"}, False,
    ),
    "loading": (
        _v1(fsdp_cpu_ram_efficient_loading=False, fsdp_sync_module_states=False),
        {"cpu_ram_efficient_loading": False, "sync_module_states": False}, {}, False,
    ),
    "fp16": (
        {**_v1(), "mixed_precision": "fp16"},
        {"precision": {"mode": "fp16_mixed", "reduce_dtype": "fp16", "buffer_dtype": "fp16"}}, {}, False,
    ),
    "no": ({**_v2(), "mixed_precision": False}, {"precision": "fp32"},
           {"mixed_precision": "kept as precision: fp32 (if the script"}, False),
    "fp8": ({**_v2(), "mixed_precision": "fp8"}, {"precision": "fp8"}, {}, True),
    "policy that agrees": (
        _v2(fsdp_mixed_precision_policy="bf16"), {"precision": BF16_V2},
        {"fsdp_config.fsdp_mixed_precision_policy": "kept as precision"}, False,
    ),
    "policy that does not": (
        _v2(fsdp_mixed_precision_policy={"param_dtype": "torch.bfloat16", "reduce_dtype": "float32"}),
        {"precision": {"mode": "mixed", "reduce_dtype": "fp32"}}, {}, True,
    ),
    "ignored modules": (_v1(fsdp_ignored_modules="lm_head"), {}, {}, True),
    "unknown key": (
        _v1(fsdp_ofload_params=True), {"cpu_offload": False},
        {"fsdp_config.fsdp_ofload_params":
         "dropped because fsdp_config has no such key; the nearest is offload_params"},
        True,
    ),
    "null value": (_v1(fsdp_transformer_layer_cls_to_wrap=None), {"wrap": "auto"}, {}, False),
    "inductor": ({**_v2(), "dynamo_config": {"dynamo_backend": "INDUCTOR"}}, {"compile": True}, {}, False),
    "old dynamo": ({**_v2(), "dynamo_backend": "NO"}, {"compile": False}, {}, False),
    "other dynamo": ({**_v2(), "dynamo_config": {"dynamo_backend": "EAGER"}}, {"compile": False}, {}, True),
    "mesh": (
        {**_v2(), "parallelism_config": {"parallelism_config_dp_replicate_size": 2, "dp_shard_size": 4, "tp_size": 1}},
        {"sharding": "hybrid_shard", "replicate_degree": 2, "shard_degree": 4}, {}, False,
    ),
    "tensor parallel": (
        {**_v2(), "parallelism_config": {"tp_size": 2}}, {},
        {"parallelism_config.tp_size": "dropped because no tensor"}, True,
    ),
    "ddp": (
        {"distributed_type": "MULTI_GPU", "num_processes": 2, "mixed_precision": "bf16", "gpu_ids": "0,3"},
        {"engine": "ddp", "sharding": "no_shard", "precision": "mixed"}, {"gpu_ids": "kept as trainer.devices: [0, 3]"},
        False,
    ),
    "cpu": ({"distributed_type": "MULTI_CPU", "num_processes": 2}, {"engine": "ddp"}, {}, False),
    "one": ({"distributed_type": "NO"}, {"engine": "single"}, {"distributed_type": "replaced by engine: singl"}, False),
    "one, as YAML reads": ({"distributed_type": False, "mixed_precision": "bf16"}, {"precision": "mixed"}, {}, False),
    "zero inside": (
        {"distributed_type": "DEEPSPEED", "num_processes": 4, "mixed_precision": "bf16",
         "deepspeed_config": {"zero_stage": 3, "offload_optimizer_device": "none", "gradient_clipping": 1.0,
                              "gradient_accumulation_steps": 2, "zero3_init_flag": True}},
        {"engine": "fsdp2", "sharding": "full_shard", "precision": BF16_V2},
        {"deepspeed_config.gradient_clipping": "kept as trainer.gradient_clip_val: 1.0",
         "deepspeed_config.zero3_init_flag": "dropped because"}, False,
    ),
}  # fmt: skip

HF = {"per_device_train_batch_size": 2, "max_steps": 10}
HF_ROWS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, str], bool]] = {
    "plain": (HF, {"engine": "ddp", "precision": "fp32"}, {}, False),
    "true": ({**HF, "fsdp": True, "bf16": True}, {"engine": "fsdp2", "precision": BF16_V2, "state_dict": "full"},
             {"fsdp": "kept as engine: fsdp2"}, False),
    "words": (
        {**HF, "fsdp": "shard_grad_op auto_wrap offload"}, {"sharding": "shard_grad_op", "cpu_offload": True}, {},
        False,
    ),
    "list": ({**HF, "fsdp": ["full_shard"]}, {"sharding": "full_shard"}, {}, False),
    "version 1": (
        {**HF, "fsdp": "hybrid_shard_zero2 auto_wrap", "fsdp_config": {
         "fsdp_version": 1, "fsdp_limit_all_gathers": False,
         "sync_module_states": True}, "num_nodes": None}, {"engine": "fsdp1", "sharding": "hybrid_shard_zero2",
         "limit_all_gathers": False}, {}, False,
    ),
    "false": ({**HF, "fsdp": "", "fsdp_config": {"min_num_params": 5}}, {"engine": "ddp"},
              {"fsdp_config": "dropped because fsdp is off"}, False),
    "recompute": ({**HF, "fsdp": True, "gradient_checkpointing": True},
                  {"activation_checkpointing": "full"}, {}, False),
    "smallest": ({**HF, "fsdp": True, "fsdp_config": {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 7}},
                 {"wrap": {"min_num_params": 7}}, {}, False),
    "another optimizer": ({**HF, "optim": "adafactor"}, {}, {"optim": "replaced by torch's fused AdamW (ada"}, True),
    "another schedule": ({**HF, "lr_scheduler_type": "polynomial"}, {}, {}, True),
    "smoothing": ({**HF, "label_smoothing_factor": 0.1}, {}, {}, True),
    "half an epoch": ({"per_device_train_batch_size": 2, "num_train_epochs": 1.5}, {}, {}, True),
    "not an argument": ({**HF, "learnin_rate": 1}, {}, {"learnin_rate": "dropped because TrainingArguments"}, True),
    "deepspeed": ({**HF, "bf16": True, "deepspeed": {"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"},
                  "gradient_clipping": "auto"}}, {"sharding": "shard_grad_op", "precision": BF16_V2}, {}, False),
}  # fmt: skip

ZERO = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}
DEEPSPEED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, str], bool]] = {
    "stage 0": ({**ZERO, "zero_optimization": {"stage": 0}}, {"engine": "ddp", "precision": "fp32"}, {}, False),
    "stage 1": ({**ZERO, "zero_optimization": {"stage": 1}}, {"sharding": "shard_grad_op"},
                {"zero_optimization.stage": "kept as sharding: shard_grad_op (gradients are split as well"}, False),
    "stage 3, nvme": (
        {**ZERO, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
        {"cpu_offload": True, "precision": BF16_V2}, {"zero_optimization.offload_param.device": "replaced by cpu_off"},
        False,
    ),
    "hierarchical": (
        {**ZERO, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4, "overlap_comm": True}},
        {"sharding": "hybrid_shard", "shard_degree": 4, "replicate_degree": -1},
        {"zero_optimization.overlap_comm": "dropped because FSDP always does so"}, False,
    ),
    "fp16": (
        {**ZERO, "zero_optimization": {"stage": 3}, "communication_data_type": "fp32",
         "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16}},
        {"precision": "fp16_mixed"}, {"fp16.loss_scale": "dropped because the loss scale is dynamic here too"}, False,
    ),
    "a fixed scale": (
        {**ZERO, "zero_optimization": {"stage": 3}, "fp16": {"enabled": True, "loss_scale": 128}}, {}, {}, True,
    ),
    "quantized": ({**ZERO, "zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, {}, {}, True),
    "auto": ({**ZERO, "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}, "bf16": {"enabled": "auto"}},
             {"precision": "fp32"}, {"bf16.enabled": "replaced by precision: fp32 (auto: "}, False),
    "lamb": ({**ZERO, "optimizer": {"type": "Lamb", "params": {"lr": 1e-3}}}, {}, {}, True),
    "logarithmic warm-up": (
        {**ZERO, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 5}}}, {},
        {"scheduler.params.warmup_type (log by default)": "replaced by a linear warm-up"}, True,
    ),
    "linear warm-up": (
        {**ZERO, "scheduler": {"type": "WarmupDecayLR", "params": {
            "warmup_max_lr": 1e-3, "warmup_num_steps": 5, "warmup_type": "linear", "total_num_steps": 50}}}, {},
        {"scheduler.params.total_num_steps": "kept as trainer.max_steps: 50"}, False,
    ),
    "unknown": ({**ZERO, "grad_clipping": 1.0}, {}, {"grad_clipping": "dropped because DeepSpeed has no such"}, True),
}  # fmt: skip

ROWS = [
    pytest.param(kind, *row, id=f"{kind}: {name}")
    for kind, rows in (("accelerate", ACCELERATE), ("hf-trainer", HF_ROWS), ("deepspeed", DEEPSPEED))
    for name, row in rows.items()
]


@pytest.mark.parametrize(("kind", "given", "init_args", "lines", "differs"), ROWS)
def test_one_row(
    tmp_path: Path, kind: str, given: dict[str, Any], init_args: dict[str, Any], lines: dict[str, str], differs: bool
) -> None:
    given = dict(given)
    nodes = 2 if given.pop("num_nodes", 0) is None else 1
    file = tmp_path / "in.json"
    file.write_text(json.dumps(given))
    found = convert_file(kind, file, *((8, nodes) if kind == "hf-trainer" else ()))
    strategy = found.recipe["trainer"]["strategy"]["init_args"]
    assert {name: strategy.get(name) for name in init_args} == init_args
    said = {fate.key: fate.text for fate in found.fates}
    assert {key: said.get(key, "")[: len(text)] for key, text in lines.items()} == lines
    assert found.differs is differs, [str(fate) for fate in found.fates if fate.differs]


@pytest.mark.parametrize(("kind", "given"), [(row.values[0], row.values[1]) for row in ROWS], ids=[r.id for r in ROWS])
def test_every_key_is_said_and_the_recipe_is_one(tmp_path: Path, kind: str, given: dict[str, Any]) -> None:
    given = dict(given)
    nodes = 2 if given.pop("num_nodes", 0) is None else 1
    file = tmp_path / "in.json"
    file.write_text(json.dumps(given))
    found = convert_file(kind, file, *((8, nodes) if kind == "hf-trainer" else ()))
    said = [fate.key for fate in found.fates]
    for key, value in given.items():
        paths = [f"{key}.{inner}" for inner, v in value.items() if v is not None] if isinstance(value, dict) else [key]
        for path in paths:
            assert any(
                one == path or one.startswith((f"{path}.", key if one == key else f"{path} ")) for one in said
            ), path
    recipe = found.recipe
    recipe.setdefault("model", {})["name"] = "some/model"
    recipe.setdefault("data", {})["train"] = "rows.jsonl"
    recipe["trainer"].setdefault("max_steps", 100)
    if isinstance(recipe["trainer"]["devices"], int) and "global_batch_size" not in recipe["data"]:
        recipe["data"]["global_batch_size"] = 16
    assert check_recipe(recipe, "fit").strategy.engine in ("fsdp1", "fsdp2", "ddp", "single")
