"""DeepSpeed's JSON as a recipe: batches, optimizer, schedule and precision; the ZeRO section has its own file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lit_fsdp.convert.deepspeed_auto import Auto, without_auto
from lit_fsdp.convert.deepspeed_batches import convert_batches
from lit_fsdp.convert.deepspeed_optim import convert_optimizer, convert_scheduler
from lit_fsdp.convert.deepspeed_zero import QUIET_ZERO, convert_zero
from lit_fsdp.convert.precision import dtype_of
from lit_fsdp.convert.read import as_bool, as_number, drop_listed, drop_unknown
from lit_fsdp.convert.result import Conversion, Section, shown
from lit_fsdp.errors import ConfigError

_QUIET = {
    "steps_per_print": "trainer.log_every_n_steps decides",
    "wall_clock_breakdown": "it only prints",
    "memory_breakdown": "it only prints",
    "dump_state": "it only prints",
    "flops_profiler": "it only measures",
    "comms_logger": "it only measures",
    "tensorboard": "add a logger under trainer.logger",
    "wandb": "add a logger under trainer.logger",
    "csv_monitor": "metrics.csv is always written",
    "comet": "add a logger under trainer.logger",
    "checkpoint": "checkpoints have one format here; the checkpoint section decides",
    "zero_allow_untested_optimizer": "no optimizer is special here",
    "zero_force_ds_cpu_optimizer": "the optimizer is torch's fused AdamW, on the CPU too",
    "prescale_gradients": "it changes when gradients are divided, not by what",
    "gradient_predivide_factor": "it changes when gradients are divided, not by what",
    "disable_allgather": "it is about DeepSpeed's own buckets",
    "dataloader_drop_last": "global batches are always whole here",
    "aio": "nothing is offloaded to disk here",
    "elasticity": "a resume may use other ranks, and the global batch stays",
    "autotuning": "it searches for settings and trains nothing",
    "compile": "set compile: true to compile each block",
}
_SCALE_QUIET = ("initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale", "consecutive_hysteresis")
_ACTIVATION = "it only configures DeepSpeed's own checkpoint function; set activation_checkpointing: full to recompute"
_OTHER_TRAINING = ("sparse_gradients", "sparse_attention", "amp", "compression_training", "curriculum_learning",
                   "data_efficiency", "progressive_layer_drop", "eigenvalue", "quantize_training", "tensor_parallel",
                   "autotp_size", "sequence_parallel_size", "hybrid_engine", "torch_autocast")  # fmt: skip
_KNOWN = (*_QUIET, *_OTHER_TRAINING, "zero_optimization", "bf16", "bfloat16", "fp16", "optimizer", "scheduler",
          "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
          "communication_data_type", "data_types", "activation_checkpointing")  # fmt: skip


def convert_deepspeed(
    conversion: Conversion, values: Mapping[str, Any], auto: Auto, ranks: int | None, path: str = ""
) -> None:
    """Convert a DeepSpeed configuration.

    Args:
        conversion: Takes the recipe and the lines.
        values: The configuration.
        auto: What ``auto`` stands for.
        ranks: Ranks of the run, if known.
        path: Where ``values`` stands in the input.
    """
    section = Section(dict(values), path)
    resolved, filled = without_auto(conversion, section, auto, frozenset((*_QUIET, *_SCALE_QUIET, *QUIET_ZERO)))
    zero = Section(resolved.peek("zero_optimization"), _join(path, "zero_optimization"))
    resolved.take("zero_optimization")
    convert_zero(conversion, zero, ranks)
    _precision(conversion, resolved, path, filled)
    convert_batches(conversion, resolved, auto, ranks)
    _clipping(conversion, resolved)
    convert_optimizer(conversion, resolved, alone=not auto.exact)
    convert_scheduler(conversion, resolved)
    if taken := resolved.take("activation_checkpointing"):
        conversion.drop(taken[0], _ACTIVATION)
    drop_listed(conversion, resolved, _QUIET)
    for key in _OTHER_TRAINING:
        if taken := resolved.take(key):
            idle = taken[1] in (False, 1, None) or (isinstance(taken[1], dict) and taken[1].get("enabled") is False)
            conversion.drop(taken[0], "it is off" if idle else "there is no such method here", differs=not idle)
    drop_unknown(conversion, resolved, _KNOWN, "DeepSpeed")
    conversion.fill(filled)
    if filled and not auto.exact:
        conversion.to_give.append(f"Check what stands for auto in {', '.join(filled)}.")


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _precision(conversion: Conversion, section: Section, path: str, filled: Mapping[str, str]) -> None:
    enabled: list[tuple[str, str]] = []
    left_open: list[str] = []
    for name, short in (("bf16", "bf16"), ("bfloat16", "bf16"), ("fp16", "fp16")):
        if not (taken := section.take(name)):
            continue
        part = Section(taken[1], taken[0])
        switch = part.take("enabled")
        on = as_bool(*switch) if switch else False
        if on:
            enabled.append((switch[0] if switch else taken[0], short))
        elif switch and switch[0] in filled:
            left_open.append(switch[0])
        else:
            conversion.drop(switch[0] if switch else taken[0], "it is off" if switch else "enabled is not given")
        _scale(conversion, part, on)
    if len({word for _, word in enabled}) > 1:
        raise ConfigError(enabled[1][0], "true beside bf16", "bf16 or fp16, not both", "disable one of them")
    word = enabled[0][1] if enabled else None
    reduce: str | None = word
    if taken := section.take("communication_data_type"):
        reduce = dtype_of(*taken)
        conversion.replace(taken[0], f"precision.reduce_dtype: {reduce}", "the dtype gradients are summed in")
    if word is None:
        precision: Any = "fp32"
    else:
        if reduce not in ("fp32", word):
            raise ConfigError(
                _join(path, "communication_data_type"), f"{reduce} with {word}", f"fp32 | {word}", f"write {word}"
            )
        mode = {"bf16": "mixed", "fp16": "fp16_mixed"}[word]
        precision = {"mode": mode, "reduce_dtype": reduce} if reduce != "fp32" else mode
    if enabled:
        note = f"fp32 weights, {word} compute, gradients summed in {reduce}"
        conversion.keep(enabled[0][0], "precision", precision, note)
    conversion.put("precision", precision)
    for key in left_open:
        conversion.replace(key, f"precision: {shown(precision)}", f"auto: {filled[key]}")
    if taken := section.take("data_types"):
        types = Section(taken[1], taken[0])
        if given := types.take("grad_accum_dtype"):
            dtype = dtype_of(*given)
            conversion.drop(given[0], f"gradients add up in fp32 here, not in {dtype}" if dtype != "fp32" else
                            "gradients add up in fp32 here too", differs=dtype != "fp32")  # fmt: skip
        drop_unknown(conversion, types, ("grad_accum_dtype",), "data_types")


def _scale(conversion: Conversion, part: Section, on: bool) -> None:
    if taken := part.take("loss_scale"):
        static = as_number(*taken) > 0
        why = "the loss scale is always dynamic here" if static else "the loss scale is dynamic here too"
        conversion.drop(taken[0], why, differs=static and on)
    if taken := part.take("check_grad_overflow"):
        policy = "skip" if as_bool(*taken) else "error"
        conversion.keep(taken[0], "nonfinite_gradients", policy) if on else conversion.drop(taken[0], "it is off")
    drop_listed(conversion, part, dict.fromkeys(_SCALE_QUIET, "torch's scaler finds its own scale"))
    drop_listed(conversion, part, {"immediate_grad_update": "it changes when, not what", "auto_cast": "inputs are ids"})
    for key in ("fp16_master_weights_and_grads", "bf16_master_weights_and_grads", "bf16_optimizer_states"):
        if taken := part.take(key):
            wanted = as_bool(*taken)
            conversion.drop(taken[0], "master weights and moments are fp32 here", differs=wanted and on)
    drop_unknown(conversion, part, (*_SCALE_QUIET, "enabled", "loss_scale"), "the section")


def _clipping(conversion: Conversion, section: Section) -> None:
    if not (taken := section.take("gradient_clipping")):
        return
    norm = as_number(*taken)
    if norm:
        conversion.keep(taken[0], "trainer.gradient_clip_val", norm)
    else:
        conversion.drop(taken[0], "0 clips nothing")
