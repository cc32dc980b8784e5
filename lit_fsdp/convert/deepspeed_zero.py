"""DeepSpeed's ``zero_optimization`` section."""

from __future__ import annotations

from typing import Any

from lit_fsdp.convert.read import as_bool, as_choice, as_count, drop_listed, drop_unknown
from lit_fsdp.convert.result import Conversion, Section
from lit_fsdp.errors import ConfigError

_BUCKETS = "units are the model's blocks here, not buckets of a size"
_QUIET = {
    **dict.fromkeys(
        "reduce_bucket_size allgather_bucket_size sub_group_size stage3_prefetch_bucket_size prefetch_bucket_size "
        "stage3_param_persistence_threshold param_persistence_threshold stage3_model_persistence_threshold "
        "stage3_max_live_parameters max_live_parameters stage3_max_reuse_distance max_reuse_distance "
        "stage3_module_granularity_threshold use_multi_rank_bucket_allreduce round_robin_gradients".split(),
        _BUCKETS,
    ),
    **dict.fromkeys(
        ("overlap_comm", "contiguous_gradients", "reduce_scatter", "allgather_partitions"), "FSDP always does so"
    ),
    "stage3_gather_16bit_weights_on_model_save": "lit-fsdp export writes the whole model in the dtype you ask for",
    "stage3_gather_fp16_weights_on_model_save": "lit-fsdp export writes the whole model in the dtype you ask for",
    "gather_16bit_weights_on_model_save": "lit-fsdp export writes the whole model in the dtype you ask for",
    "load_from_fp32_weights": "checkpoints hold fp32 weights only",
    "elastic_checkpoint": "every checkpoint can be resumed on other ranks",
    "pipeline_loading_checkpoint": "each rank reads its own shards",
    **dict.fromkeys(
        "stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential ignore_unused_parameters legacy_stage1 "
        "parameter_alignment memory_efficient_linear override_module_apply log_trace_cache_warnings compute_grad_norm "
        "enable_sanity_checks leaf_module cpu_offload_use_pin_memory mics_hierarchical_params_gather".split(),
        "it is about how DeepSpeed works inside",
    ),
}
_QUANTIZED = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
_KNOWN = (*_QUIET, *_QUANTIZED, "stage", "offload_param", "offload_optimizer", "cpu_offload", "cpu_offload_param",
          "zero_hpz_partition_size", "mics_shard_size", "zenflow")  # fmt: skip
_OFFLOAD_QUIET = ("pin_memory", "buffer_count", "buffer_size", "max_in_cpu", "pipeline_read", "pipeline_write",
                  "pipeline", "fast_init", "super_offload", "cpuadam_cores_perc", "nvme_path")  # fmt: skip

QUIET_ZERO = (*_QUIET, *_OFFLOAD_QUIET)
"""Keys that change nothing that is trained."""


def convert_zero(conversion: Conversion, section: Section, ranks: int | None) -> None:
    """Convert the section; stage 0 becomes ddp, 1 and 2 ``shard_grad_op``, 3 ``full_shard``, all with fsdp2."""
    taken = section.take("stage")
    stage = int(as_choice(*taken, words=("0", "1", "2", "3"))) if taken else 0
    words = ("no_shard", "shard_grad_op", "shard_grad_op", "full_shard")
    single = stage == 0 and ranks == 1
    conversion.put("engine", ("single" if single else "ddp") if stage == 0 else "fsdp2")
    notes = (
        f"engine {conversion.get('engine')}: every rank holds the whole model",
        "gradients are split as well, as in stage 2; the losses are the same",
        "parameters stay gathered from forward to backward",
        "",
    )
    if taken:
        conversion.keep(taken[0], "sharding", words[stage], notes[stage])
    conversion.put("sharding", words[stage])
    conversion.put("wrap", "auto")
    conversion.put("precision", "fp32")
    conversion.put("activation_checkpointing", "none")
    conversion.put("cpu_offload", False)
    conversion.put("state_dict", "sharded" if stage else "full")
    _offload(conversion, section, stage)
    _degrees(conversion, section, stage, ranks)
    for key in _QUANTIZED:
        if taken := section.take(key):
            on = as_bool(*taken)
            conversion.drop(taken[0], "nothing is quantized on its way here" if on else "it is off", differs=on)
    if taken := section.take("zenflow"):
        conversion.drop(taken[0], "every step updates all parameters here", differs=True)
    drop_listed(conversion, section, _QUIET)
    drop_unknown(conversion, section, _KNOWN, "zero_optimization")


def _offload(conversion: Conversion, section: Section, stage: int) -> None:
    for key, least in (("offload_param", 3), ("offload_optimizer", 1)):
        if not (taken := section.take(key)):
            continue
        part = Section(taken[1], taken[0])
        device = part.take("device")
        where = as_choice(*device, words=("none", "cpu", "nvme")) if device else "none"
        name = device[0] if device else taken[0]
        if where != "none" and stage < least:
            raise ConfigError(
                name,
                f"{where} with stage {stage}, which ignores it",
                f"none, or stage {least} and above",
                f"write {name}: none, or stage: {max(least, stage)}",
            )
        if where == "none":
            conversion.drop(name, "nothing is offloaded")
        else:
            disk = ", in host memory instead of on disk" if where == "nvme" else ""
            conversion.put("cpu_offload", True)
            conversion.replace(name, "cpu_offload: true", f"parameters, gradients and optimizer state together{disk}")
        drop_listed(conversion, part, dict.fromkeys(_OFFLOAD_QUIET, "it is about how DeepSpeed offloads"))
        drop_listed(conversion, part, {"ratio": "all of the optimizer state is offloaded or none"})
        drop_unknown(conversion, part, ("device", *_OFFLOAD_QUIET), key)
    for key, least in (("cpu_offload", 1), ("cpu_offload_param", 3)):
        if taken := section.take(key):
            if as_bool(*taken) and stage >= least:
                conversion.put("cpu_offload", True)
                conversion.replace(taken[0], "cpu_offload: true", "the old name of the offload sections")
            elif as_bool(*taken):
                raise ConfigError(
                    taken[0], f"true with stage {stage}", f"true only with stage {least} and above", "drop it"
                )
            else:
                conversion.drop(taken[0], "nothing is offloaded")


def _degrees(conversion: Conversion, section: Section, stage: int, ranks: int | None) -> None:
    for key in ("zero_hpz_partition_size", "mics_shard_size"):
        if not (taken := section.take(key)):
            continue
        degree: Any = taken[1] if taken[1] == -1 else as_count(*taken)
        if degree in (-1, 1) or degree == ranks:
            conversion.drop(taken[0], "one group holds one copy: that is the sharding without it")
        elif stage != 3:
            raise ConfigError(taken[0], f"{degree} with stage {stage}", "only with stage 3", f"drop {key}, or stage: 3")
        elif ranks and ranks % degree:
            raise ConfigError(taken[0], f"{degree} on {ranks} ranks", f"a divisor of {ranks}", f"write {key}: 1")
        else:
            conversion.put("sharding", "hybrid_shard")
            conversion.put("replicate_degree", -1)
            conversion.keep(taken[0], "shard_degree", degree, "with sharding: hybrid_shard; the losses are the same")
