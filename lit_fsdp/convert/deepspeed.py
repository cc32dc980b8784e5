"""Convert DeepSpeed's JSON; also ranks and precision for all formats."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from lit_fsdp.config.run import STRATEGY
from lit_fsdp.convert.conversion import Conversion, Given, number, read_mapping
from lit_fsdp.convert.tables import OFF, ONLY_ADAMW, Drop, Keep, Source, Table, rows, under
from lit_fsdp.errors import require

_MODES = {"no": "fp32", "bf16": "mixed", "fp16": "fp16_mixed", "fp8": "fp8"}
_NOTES = {"fp32": "low_precision if the script loads its weights in bf16", "fp8": "torchao chooses other layers"}
_STAGES = {"auto": "shard_grad_op", "0": "no_shard", "1": "shard_grad_op", "2": "shard_grad_op", "3": "full_shard"}
_INSIDE = Drop("FSDP has its own units, buffers and schedule")
_HALF: Table = {
    "enabled": None,
    "loss_scale": Drop("the loss scale is always dynamic here", "0 0.0"),
    "check_grad_overflow": Keep("nonfinite_gradients", {"true": "skip", "false": "error"}),
    **rows("*_master_weights_and_grads bf16_optimizer_states", Drop("weights and moments are fp32 here", OFF)),
    **rows("initial_scale_power loss_scale_window hysteresis min_loss_scale consecutive_hysteresis auto_cast "
           "immediate_grad_update", Drop("torch's scaler sets its own scale")),
}  # fmt: skip
_DEVICE = Keep("cpu_offload", {"none": None, "cpu": True, "nvme": True}, "parameters, gradients and optimizer state "
               "together, in host memory")  # fmt: skip
_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_DEEPSPEED: Table = {
    "train_batch_size": Keep("data.global_batch_size"),
    "train_micro_batch_size_per_gpu": Keep("data.micro_batch_size"),
    "gradient_accumulation_steps": Keep("trainer.accumulate_grad_batches"),
    **under("bf16", _HALF),
    **under("bfloat16", _HALF),
    **under("fp16", _HALF),
    "communication_data_type": Keep("precision.reduce_dtype", why="dtype of the gradient reduction"),
    "data_types.grad_accum_dtype": Drop("gradients are accumulated in fp32 here", "fp32 float32 float"),
    "gradient_clipping": Keep("trainer.gradient_clip_val"),
    **under("scheduler", {
        "type": Keep("model.optim.schedule", _SCHEDULES, other="this schedule is not supported"),
        "params.warmup_max_lr": Keep("model.optim.lr"),
        "params.warmup_num_steps": Keep("model.optim.warmup_steps"),
        "params.warmup_type": None,
        **rows("params.warmup_min_lr params.warmup_min_ratio", Drop("the warm-up starts near 0 here", "0 0.0")),
        "params.cos_min_ratio": Keep("model.optim.min_lr_ratio"),
        "params.total_num_steps": Keep("trainer.max_steps", why="the schedule ends with the run here"),
    }),
    **under("optimizer", {
        "type": Drop(ONLY_ADAMW, "adam adamw fusedadam"),
        "params.lr": Keep("model.optim.lr"),
        "params.betas": Keep("model.optim.beta1 model.optim.beta2"),
        "params.eps": Keep("model.optim.eps"),
        "params.weight_decay": Keep("model.optim.weight_decay", why="decays matrices only"),
        "params.adam_w_mode": Drop("weight decay is always decoupled here", "true 1"),
        "params.bias_correction": Drop("AdamW always corrects the bias", "true 1"),
        **rows("params.torch_adam legacy_fusion", Drop("lit_fsdp uses torch's fused AdamW")),
    }),
    **under("zero_optimization", {
        "stage": None,
        **rows("offload_param.device offload_optimizer.device", _DEVICE),
        **rows("cpu_offload cpu_offload_param", Keep("cpu_offload", {"true": True, "false": None})),
        **rows("offload_param.* offload_optimizer.* cpu_offload_use_pin_memory", Drop("it is for DeepSpeed's offload")),
        **rows("zero_hpz_partition_size mics_*", Drop("shard_degree shards over a subset of the ranks; same losses")),
        "zero_quantized_*": Drop("communication is not quantized here", OFF),
        "zenflow": Drop("every step updates all parameters here", OFF),
        "stage3_gather_*": Drop("lit-fsdp export writes the full model in any dtype"),
        **rows("load_from_fp32_weights elastic_checkpoint pipeline_loading_checkpoint",
               Drop("checkpoints have fp32 weights, and any number of ranks can resume them")),
        **rows("gather_16bit_weights_on_model_save max_live_parameters max_reuse_distance prefetch_bucket_size "
               "param_persistence_threshold model_persistence_threshold stage3_* reduce_* allgather_* overlap_comm "
               "contiguous_gradients sub_group_size round_robin_gradients "
               "use_multi_rank_bucket_allreduce ignore_unused_parameters legacy_stage1 leaf_module parameter_alignment "
               "memory_efficient_linear override_module_apply log_trace_cache_warnings *_sanity_checks", _INSIDE),
    }),
    "activation_checkpointing": Drop("it configures DeepSpeed's own function; use activation_checkpointing: full"),
    **rows("steps_per_print wall_clock_breakdown memory_breakdown dump_state flops_profiler comms_logger tensorboard "
           "wandb comet csv_monitor autotuning", Drop("it only prints or measures; see trainer.logger")),
    **rows("zero_allow_untested_optimizer zero_force_ds_cpu_optimizer prescale_gradients gradient_predivide_factor "
           "disable_allgather aio dataloader_drop_last", _INSIDE),
    **rows("checkpoint elasticity", Drop("the section checkpoint sets it; any number of ranks can resume")),
    "compile": Drop("compile: true of the strategy compiles each block"),
    **rows("sparse_gradients sparse_attention amp compression_training curriculum_learning data_efficiency "
           "progressive_layer_drop eigenvalue quantize_training tensor_parallel autotp_size sequence_parallel_size "
           "hybrid_engine torch_autocast", Drop("this method is not supported", OFF + " 1")),
}  # fmt: skip


OF_ACCELERATE = under("deepspeed_config", {
    **rows("zero_stage deepspeed_config_file", None),
    "gradient_accumulation_steps": Keep("trainer.accumulate_grad_batches"),
    "gradient_clipping": Keep("trainer.gradient_clip_val"),
    **rows("offload_optimizer_device offload_param_device", _DEVICE),
    **rows("zero3_* offload_*", Drop("it is for DeepSpeed's own loading, saving and offload")),
    **rows("deepspeed_multinode_launcher deepspeed_hostfile deepspeed_inclusion_filter deepspeed_exclusion_filter",
           Drop("torchrun, srun or Lightning starts the processes")),
    "deepspeed_moe_layer_cls_names": Drop("experts are in the units of their blocks"),
})  # fmt: skip
"""The keys of Accelerate's ``deepspeed_config``."""


def convert_deepspeed(conversion: Conversion, values: dict[str, Any], _: Path, ranks: int | None) -> None:
    """Convert a DeepSpeed configuration."""
    source = Source(conversion, _DEEPSPEED, values)
    autos = [name for name in ("bf16", "fp16") if source.look(f"{name}.enabled") == "auto"]
    _put_stage(conversion, source, ranks)
    _put_rest(conversion, source, values, ranks)
    if autos and conversion.get("precision.mode") == "fp32":
        text = f"Set trainer.strategy.init_args.precision, now fp32: the file leaves it to --{' or --'.join(autos)}"
        conversion.to_give.append(f"{text} of the Trainer.")


def put_deepspeed(conversion: Conversion, source: Source, folder: Path, ranks: int | None) -> Callable[[], None] | None:
    """Convert the stage of the DeepSpeed configuration that the key ``deepspeed`` of a file gives or names.

    Returns a function that converts the rest, once the file's own keys have replaced ``auto``; None without DeepSpeed.
    """
    given = source.take("deepspeed", "")
    name = given.value
    if not name or str(name).lower() in OFF.split():
        conversion.drop(given, "it is off")
        return None
    fix = "write deepspeed: FILE"
    require(isinstance(name, str | dict), given.key, repr(name), "a file, its JSON text, or its keys", fix)
    is_file = isinstance(name, str) and not name.lstrip().startswith("{")
    if is_file and not any(path.expanduser().is_file() for path in (Path(name), folder / name)):
        conversion.drop(given, f"it is not here: convert again in a folder that has {name}", differs=True)
        return None
    values = name if isinstance(name, dict) else read_mapping("deepspeed", name.strip(), folder)
    conversion.say(given, "replaced by its keys")
    source.ignore("fsdp", "deepspeed is set")
    if values.get("scheduler"):
        source.ignore("lr_scheduler_type lr_scheduler_kwargs", "the scheduler of the DeepSpeed file applies")
    if values.get("optimizer"):
        source.ignore("optim", "the optimizer of the DeepSpeed file applies")
    own = Source(conversion, _DEEPSPEED, values, "deepspeed")
    _put_stage(conversion, own, ranks)
    return partial(_put_rest, conversion, own, values, ranks)


def put_of_accelerate(
    conversion: Conversion, source: Source, folder: Path, ranks: int | None, precision: Given
) -> None:
    """Convert the ``deepspeed_config`` of an Accelerate file: the file that it names, or its own keys."""
    file = source.take("deepspeed_config.deepspeed_config_file", "")
    if str(file.value or "none").lower() == "none":
        source.fill_in("deepspeed_config.gradient_clipping", 1.0)
        stage = source.take("deepspeed_config.zero_stage", 2)
        _keep_stage(conversion, stage, ranks)
        put_precision(conversion, precision)
        return
    values = read_mapping(file.key, str(file.value), folder)
    conversion.say(file, "replaced by its keys")
    own = Source(conversion, _DEEPSPEED, values, "deepspeed_config_file")
    _put_stage(conversion, own, ranks)
    if precision.key:
        put_precision(conversion, precision)
    _put_rest(conversion, own, values, ranks)


def _put_stage(conversion: Conversion, source: Source, ranks: int | None) -> None:
    _keep_stage(conversion, source.take("zero_optimization.stage", 0), ranks)


def _keep_stage(conversion: Conversion, stage: Given, ranks: int | None) -> None:
    sharding = stage.read(_STAGES)
    conversion.put("sharding", sharding)
    put_engine(conversion, "" if sharding == "no_shard" else "fsdp2", ranks)
    conversion.keep(stage, "sharding", sharding, f"with engine {conversion.get('engine')}")


def _put_rest(conversion: Conversion, source: Source, values: dict[str, Any], ranks: int | None) -> None:
    for name in ("bf16", "bfloat16", "fp16"):
        switch, word = source.take(f"{name}.enabled", False), name.replace("bfloat", "bf")
        held = str(conversion.get("precision.mode")) if f"{STRATEGY}.precision.mode" in conversion.by else ""
        if switch.value == "auto" and held:
            conversion.drop(switch, "the other file sets it")
        elif switch.value == "auto" or not switch.on:
            why = "no other setting enables it; a Trainer file that names this one may: convert that"
            auto = f" (auto: {why})" if switch.value == "auto" else ""
            conversion.drop(switch, f"it is off{auto}")
            source.ignore(f"{name}.", f"{name} is off")
        elif held in {"bf16": ("mixed", "low_precision"), "fp16": ("fp16_mixed",)}[word]:
            conversion.drop(switch, f"precision: {held} applies")
        else:
            if not held:
                conversion.get(STRATEGY).pop("precision", None)  # a default
            put_precision(conversion, Given(switch.key, word))
    conversion.put("precision.mode", "fp32")
    _check_batches(conversion, source, ranks)
    if values.get("train_batch_size") == "auto":
        source.ignore("train_batch_size", "it follows from the micro batch, the accumulation and the ranks")
    elif "train_batch_size" in values:
        auto = " train_micro_batch_size_per_gpu" * (values.get("train_micro_batch_size_per_gpu") == "auto")
        source.ignore(f"gradient_accumulation_steps{auto}", "it follows from train_batch_size and the ranks")
    _fill_in(conversion, source, values)
    warmup = source.take("scheduler.params.warmup_type", "log")
    source.rest()
    if values.get("optimizer"):
        conversion.put("model.optim.schedule", "constant")
    if conversion.by.get("model.optim.schedule") == source.written("scheduler.type"):
        optim = conversion.get("model.optim")
        warms_up = (optim.get("warmup_steps") or 0) > 1 or optim.get("warmup_ratio")
        differs = str(warmup.value).lower() == "log" and bool(warms_up)
        key = warmup.key or (source.written("scheduler.params.warmup_type (log by default)") if differs else "")
        conversion.say(Given(key, ""), "replaced by a linear warm-up", differs)


def _check_batches(conversion: Conversion, source: Source, ranks: int | None) -> None:
    """Check that the batch sizes agree, as DeepSpeed does; in a Trainer's file, with those of its own keys, too."""
    whole, key = source.look("train_batch_size"), source.written("train_batch_size")
    parallel = [source.look(name) for name in ("sequence_parallel_size", "tensor_parallel", "autotp_size")]
    if whole in (None, "auto") or not {*map(str, parallel)} <= {"None", "1"}:  # ranks that share rows
        return
    sizes: dict[str, Any] = {"ranks": ranks}
    for name, path in (("train_micro_batch_size_per_gpu", "data.micro_batch_size"),
                       ("gradient_accumulation_steps", "trainer.accumulate_grad_batches")):  # fmt: skip
        size = source.look(name)
        sizes[name] = conversion.get(path) if size in (None, "auto") else number(source.written(name), size)
    known = {name: size for name, size in sizes.items() if size}
    whole, product, is_all = number(key, whole), math.prod(known.values()), len(known) == 3
    fitting = product if is_all else product * max(1, whole // product)
    given = f"{whole} with {', '.join(f'{name}: {size}' for name, size in known.items())}"
    allowed = f"{'their product' if is_all else 'a multiple of'} {product}"
    require(whole == fitting, key, given, allowed, f"write train_batch_size: {fitting}")


def _fill_in(conversion: Conversion, source: Source, values: dict[str, Any]) -> None:
    """Apply defaults of DeepSpeed 0.19.8 to keys that the file does not set."""
    source.fill_in("gradient_clipping", 1.0, ", 0 before DeepSpeed 0.19.3")
    scheduler, peak = str(source.look("scheduler.type")).lower(), "scheduler.params.warmup_max_lr"
    steps = "scheduler.params.warmup_num_steps"
    if scheduler in map(str.lower, _SCHEDULES) and source.look(steps) is None:
        source.fill_in(steps, 1000)
        conversion.outrank("model.optim.warmup_ratio", f"{source.written(steps)} (1000 by default)")
    if scheduler == "warmupcosinelr":
        source.fill_in("scheduler.params.cos_min_ratio", 0.0001)
    if scheduler == "warmupdecaylr":
        source.fill_in(peak, 0.001)
    if source.look(peak) not in (None, "auto"):
        source.ignore("optimizer.params.lr", f"{source.written(peak)} applies")
    if values.get("optimizer"):
        if source.look(peak) is None:
            source.fill_in("optimizer.params.lr", 0.001)
        source.fill_in("optimizer.params.betas", [0.9, 0.999])
        source.fill_in("optimizer.params.eps", 1e-8)
        source.fill_in("optimizer.params.weight_decay", 0.01 if source.look("optimizer.params.torch_adam") else 0.0)


def put_engine(conversion: Conversion, engine: str, ranks: int | None, state_dict: str = "") -> None:
    """Set the engine (or, if empty, the one with the full model on every rank) and its defaults."""
    conversion.put("engine", engine or ("single" if ranks == 1 else "ddp"))
    conversion.put("sharding", "full_shard" if engine else "no_shard")
    conversion.put("state_dict", state_dict or ("sharded" if engine else "full"))


def put_ranks(conversion: Conversion, ranks: int | None, num_nodes: int, key: str = "--ranks") -> None:
    """Set nodes, and devices per node: all available devices if the ranks are unknown."""
    fits = num_nodes > 0 and (ranks or 0) % num_nodes == 0
    require(fits, key, ranks, f"a multiple of {num_nodes} nodes", f"write {key} {num_nodes}")
    conversion.put("trainer.num_nodes", num_nodes)
    conversion.put("trainer.devices", ranks // num_nodes if ranks else "auto")


def put_precision(conversion: Conversion, word: Given) -> None:
    """Convert no, bf16, fp16 or fp8: fp32 weights, with FSDP its reduction dtype, with version 1 its buffer dtype."""
    mode, engine = word.read(_MODES), conversion.get("engine")
    conversion.keep(word, "precision.mode", mode, _NOTES.get(mode, ""), differs=mode == "fp8")
    if mode in ("mixed", "fp16_mixed") and engine.startswith("fsdp"):
        short = "bf16" if mode == "mixed" else "fp16"
        conversion.put("precision.reduce_dtype", short)
        if engine == "fsdp1":
            conversion.put("precision.buffer_dtype", short)
