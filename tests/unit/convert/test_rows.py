"""One row per snippet: what it becomes, what is said of its keys, and whether it trains the same."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.convert.inputs import convert, said, strategy

FSDP = {"distributed_type": "FSDP", "num_processes": 8, "mixed_precision": "bf16"}
BF16_V1 = {"mode": "mixed", "reduce_dtype": "bf16", "buffer_dtype": "bf16"}
BF16_V2 = {"mode": "mixed", "reduce_dtype": "bf16"}
NAMED = {"classes": ["A", "B"], "embedding_and_head": False}


def _v1(**config: Any) -> dict[str, Any]:
    return {**FSDP, "fsdp_config": config}


def _v2(**config: Any) -> dict[str, Any]:
    return {**FSDP, "fsdp_config": {"fsdp_version": 2, **config}}


# input, arguments of the strategy, {key: beginning of its line}, whether it differs
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
    "without prefix, text for switches": (
        _v1(sharding_strategy="shard_grad_op", offload_params="true"), {"sharding": "shard_grad_op", "cpu_offload": True},
        {"fsdp_config.sharding_strategy": "kept as sharding: shard_grad_op",
         "fsdp_config.offload_params": "kept as cpu_offload: true"}, False,
    ),
    "strategy 2": (_v1(fsdp_sharding_strategy=2), {"sharding": "shard_grad_op"}, {}, False),
    "strategy '3'": (_v1(fsdp_sharding_strategy="3"), {"sharding": "no_shard"}, {}, False),
    "hybrid on two machines": (
        {**_v1(fsdp_sharding_strategy=5), "num_machines": 2}, {"sharding": "hybrid_shard_zero2"},
        {"num_machines": "kept as trainer.num_nodes: 2", "num_processes": "kept as trainer.devices: 4"}, False,
    ),
    "hybrid on one": (
        _v1(fsdp_sharding_strategy="HYBRID_SHARD"), {"sharding": "full_shard"},
        {"fsdp_config.fsdp_sharding_strategy": "replaced by sharding: full_shard (hybrid_shard has one copy"}, False,
    ),
    "what version 1 does not read": (
        _v1(fsdp_reshard_after_forward=False), {"sharding": "full_shard"},
        {"fsdp_config.fsdp_reshard_after_forward": "dropped because version 1 does not read it"}, False,
    ),
    "what version 2 does not read": (
        _v2(fsdp_sharding_strategy="SHARD_GRAD_OP", fsdp_forward_prefetch=True, fsdp_backward_prefetch="BACKWARD_POST"),
        {"sharding": "full_shard", "backward_prefetch": "pre", "forward_prefetch": False}, {}, False,
    ),
    "reshard false": (_v2(fsdp_reshard_after_forward=False), {"sharding": "shard_grad_op"}, {}, False),
    "classes with commas": (
        _v1(fsdp_auto_wrap_policy="transformer_based_wrap", fsdp_transformer_layer_cls_to_wrap="A, B"), {"wrap": NAMED},
        {"fsdp_config.fsdp_transformer_layer_cls_to_wrap": "kept as wrap: {classes: [A, B], embedding_"}, False,
    ),
    "classes as a list": (
        _v2(auto_wrap_policy="TRANSFORMER_BASED_WRAP", transformer_layer_cls_to_wrap=["A", "B"]), {"wrap": NAMED}, {},
        False,
    ),
    "size of the launcher": (
        _v1(fsdp_auto_wrap_policy="SIZE_BASED_WRAP"), {"wrap": {"min_num_params": 100_000_000}}, {}, False,
    ),
    "no wrap": (
        _v1(fsdp_auto_wrap_policy="NO_WRAP", fsdp_min_num_params=5), {"wrap": "auto"},
        {"fsdp_config.fsdp_min_num_params": "dropped because auto_wrap_policy NO_WRAP"}, False,
    ),
    "local state": (_v1(fsdp_state_dict_type="LOCAL_STATE_DICT"), {"state_dict": "sharded"}, {}, False),
    "recompute and offload": (
        _v2(fsdp_activation_checkpointing=True, fsdp_activation_checkpointing_offload=True),
        {"activation_checkpointing": {"mode": "full", "offload_activations": True}}, {}, False,
    ),
    "fp16": (
        {**_v1(), "mixed_precision": "fp16"},
        {"precision": {"mode": "fp16_mixed", "reduce_dtype": "fp16", "buffer_dtype": "fp16"}}, {}, False,
    ),
    "no, as YAML reads it": (
        {**_v2(), "mixed_precision": False}, {"precision": "fp32"},
        {"mixed_precision": "kept as precision.mode: fp32 (low_precision if"}, False,
    ),
    "fp8": ({**_v2(), "mixed_precision": "fp8"}, {"precision": "fp8"}, {}, True),
    "ignored modules": (_v1(fsdp_ignored_modules="lm_head"), {}, {}, True),
    "unknown key": (
        _v1(fsdp_ofload_params=True), {"cpu_offload": False},
        {"fsdp_config.fsdp_ofload_params": "dropped because there is no such key; the nearest is fsdp_config.offload_p"},
        True,
    ),
    "null and empty": ({**_v1(fsdp_min_num_params=None), "dynamo_config": {}}, {"wrap": "auto"}, {}, False),
    "tpu": (_v1(fsdp_xla=True), {}, {}, True),
    "inductor": ({**_v2(), "dynamo_config": {"dynamo_backend": "INDUCTOR"}}, {"compile": True}, {}, False),
    "other dynamo": ({**_v2(), "dynamo_backend": "EAGER"}, {"compile": False}, {}, True),
    "mesh": (
        {**_v2(), "parallelism_config": {"parallelism_config_dp_replicate_size": 2, "dp_shard_size": 4, "tp_size": 1}},
        {"sharding": "hybrid_shard", "replicate_degree": 2, "shard_degree": 4}, {}, False,
    ),
    "tensor parallel": ({**_v2(), "parallelism_config": {"tp_size": 2}}, {}, {}, True),
    "ddp": (
        {"distributed_type": "MULTI_GPU", "num_processes": 2, "mixed_precision": "bf16", "gpu_ids": "0,3"},
        {"engine": "ddp", "sharding": "no_shard", "precision": "mixed"}, {"gpu_ids": "kept as trainer.devices: [0, 3]"},
        False,
    ),
    "fsdp on a cpu": (
        {**_v1(fsdp_offload_params=True), "use_cpu": True}, {"engine": "ddp", "precision": "mixed", "cpu_offload": False},
        {"distributed_type": "replaced by engine: ddp (Accelerate trains with DDP on a CPU)"}, False,
    ),
    "one": ({"distributed_type": False, "mixed_precision": "bf16"}, {"engine": "single", "precision": "mixed"}, {}, False),
    "zero inside": (
        {"distributed_type": "DEEPSPEED", "num_processes": 4, "mixed_precision": "bf16",
         "deepspeed_config": {"zero_stage": 3, "offload_optimizer_device": "cpu", "gradient_clipping": 0.5,
                              "gradient_accumulation_steps": 2, "zero3_init_flag": True}},
        {"engine": "fsdp2", "sharding": "full_shard", "precision": BF16_V2, "cpu_offload": True},
        {"deepspeed_config.gradient_clipping": "kept as trainer.gradient_clip_val: 0.5",
         "deepspeed_config.gradient_accumulation_steps": "kept as trainer.accumulate_grad_batches: 2"}, False,
    ),
}  # fmt: skip

HF = {"per_device_train_batch_size": 2, "max_steps": 10}
HF_ROWS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, str], bool]] = {
    "plain": (HF, {"engine": "ddp", "precision": "fp32"}, {}, False),
    "true": ({**HF, "fsdp": True, "bf16": True}, {"engine": "fsdp2", "precision": BF16_V2, "state_dict": "full"},
             {"fsdp": "kept as engine: fsdp2"}, False),
    "words": ({**HF, "fsdp": "shard_grad_op auto_wrap offload"}, {"sharding": "shard_grad_op", "cpu_offload": True}, {},
              False),
    "list": ({**HF, "fsdp": ["full_shard"]}, {"sharding": "full_shard"}, {}, False),
    "version 1": (
        {**HF, "fsdp": "hybrid_shard_zero2 auto_wrap",
         "fsdp_config": {"fsdp_version": 1, "fsdp_limit_all_gathers": False, "sync_module_states": True}},
        {"engine": "fsdp1", "sharding": "hybrid_shard_zero2", "limit_all_gathers": False}, {}, False,
    ),
    "text of JSON": ({**HF, "fsdp": True, "fsdp_config": '{"version": "1", "backward_prefetch": "backward_post"}'},
                     {"engine": "fsdp1", "backward_prefetch": "post"}, {}, False),
    "off": ({**HF, "fsdp": "", "fsdp_config": {"min_num_params": 5}}, {"engine": "ddp"},
            {"fsdp_config.min_num_params": "dropped because fsdp is off"}, False),
    "on a cpu": ({**HF, "use_cpu": True, "bf16": True, "fsdp": "full_shard offload"},
                 {"engine": "ddp", "precision": "mixed", "cpu_offload": False}, {}, False),
    "recompute": ({**HF, "fsdp": True, "gradient_checkpointing": True}, {"activation_checkpointing": "full"}, {}, False),
    "compiled": ({**HF, "torch_compile_backend": "inductor"}, {"compile": True}, {}, False),
    "another optimizer": ({**HF, "optim": "adafactor"}, {}, {"optim": "dropped because AdamW is the optimizer"}, True),
    "another schedule": ({**HF, "lr_scheduler_type": "polynomial"}, {}, {}, True),
    "another loss": ({**HF, "label_smoothing_factor": 0.1}, {}, {}, True),
    "half an epoch": ({"num_train_epochs": 1.5}, {}, {}, True),
    "a share of an unknown length": ({"warmup_ratio": 0.1}, {}, {}, True),
    "not an argument": ({**HF, "learnin_rate": 1}, {}, {"learnin_rate": "dropped because there is no such"}, True),
    "deepspeed": (
        {**HF, "bf16": True, "max_grad_norm": 0.5, "deepspeed": {"zero_optimization": {"stage": "auto"},
         "bf16": {"enabled": "auto"}, "gradient_clipping": "auto", "train_batch_size": "auto"}},
        {"sharding": "shard_grad_op", "precision": BF16_V2},
        {"deepspeed.gradient_clipping": "replaced by trainer.gradient_clip_val: 0.5 (auto: "}, False,
    ),
    "deepspeed without a section": ({**HF, "bf16": True, "deepspeed": {"zero_optimization": {"stage": 3}}},
                                    {"sharding": "full_shard", "precision": BF16_V2}, {}, False),
}  # fmt: skip

ZERO = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2}
DEEPSPEED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, str], bool]] = {
    "stage 0": ({**ZERO, "zero_optimization": {"stage": 0}}, {"engine": "ddp", "precision": "fp32"}, {}, False),
    "stage 1": ({**ZERO, "zero_optimization": {"stage": 1}}, {"engine": "fsdp2", "sharding": "shard_grad_op"}, {}, False),
    "stage 3, nvme": (
        {**ZERO, "bf16": {"enabled": True}, "zero_optimization": {
            "stage": 3, "overlap_comm": True, "offload_param": {"device": "nvme"}, "stage3_max_live_parameters": 1e9}},
        {"cpu_offload": True, "precision": BF16_V2}, {"zero_optimization.offload_param.device": "kept as cpu_off"},
        False,
    ),
    "fp16": (
        {**ZERO, "zero_optimization": {"stage": 3}, "communication_data_type": "fp32",
         "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16}},
        {"precision": {"mode": "fp16_mixed", "reduce_dtype": "fp32"}}, {}, False,
    ),
    "a fixed scale": ({**ZERO, "fp16": {"enabled": True, "loss_scale": 128}}, {}, {}, True),
    "of fp16 that is off": ({**ZERO, "fp16": {"enabled": False, "loss_scale": 128}}, {"precision": "fp32"}, {}, False),
    "quantized": ({**ZERO, "zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, {}, {}, True),
    "a method that is off": ({**ZERO, "curriculum_learning": {"enabled": False, "min_difficulty": 8}}, {}, {}, False),
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
    "unknown": ({**ZERO, "grad_clipping": 1.0}, {}, {"grad_clipping": "dropped because there is no such key"}, True),
}  # fmt: skip

ROWS = [
    pytest.param(kind, *row, id=f"{kind}: {name}")
    for kind, table in (("accelerate", ACCELERATE), ("hf-trainer", HF_ROWS), ("deepspeed", DEEPSPEED))
    for name, row in table.items()
]


@pytest.mark.parametrize(("kind", "given", "arguments", "lines", "differs"), ROWS)
def test_a_row(
    kind: str, given: dict[str, Any], arguments: dict[str, Any], lines: dict[str, str], differs: bool
) -> None:
    found = convert(kind, given, *((8, 2) if kind == "hf-trainer" else ()))
    ours = strategy(found)
    assert {name: ours[name] for name in arguments} == arguments
    assert {key: said(found).get(key, "")[: len(text)] for key, text in lines.items()} == lines
    assert found.differs is differs, [str(fate) for fate in found.fates if fate.differs]
