"""The YAML (or JSON) that ``accelerate config`` writes and ``accelerate launch`` reads."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from lit_fsdp.convert.deepspeed import convert_deepspeed
from lit_fsdp.convert.fsdp_section import ACCELERATE, convert_fsdp, refuse_xla, version_of
from lit_fsdp.convert.precision import put_precision
from lit_fsdp.convert.read import as_bool, as_choice, as_count, beside, drop_listed, drop_unknown, read_mapping
from lit_fsdp.convert.result import Conversion, Section
from lit_fsdp.errors import ConfigError

_KINDS = ("NO", "FSDP", "MULTI_GPU", "MULTI_CPU", "DEEPSPEED")
_ELSEWHERE = ("MEGATRON_LM", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_XPU", "MULTI_HPU",
              "MULTI_NEURON")  # fmt: skip
_LAUNCH = dict.fromkeys(
    "machine_rank main_process_ip main_process_port rdzv_backend same_network main_training_function "
    "mpirun_config enable_cpu_affinity".split(),
    "torchrun, srun or Lightning starts the processes",
)
_TPU = dict.fromkeys(
    "tpu_name tpu_zone tpu_use_cluster tpu_use_sudo command_file commands tpu_vm tpu_env downcast_bf16".split(),
    "it is for TPUs",
)
_KNOWN = (*_LAUNCH, *_TPU, "compute_environment", "distributed_type", "mixed_precision", "use_cpu", "debug", "fp16",
          "num_processes", "num_machines", "gpu_ids", "fp8_config", "deepspeed_config", "fsdp_config",
          "parallelism_config", "megatron_lm_config", "dynamo_config", "dynamo_backend")  # fmt: skip


def convert_accelerate(conversion: Conversion, values: dict[str, Any], folder: Path) -> None:
    """Convert an Accelerate configuration; files it names are looked for from here, then from ``folder``."""
    section = Section(values)
    for key in values:
        if key not in _KNOWN:
            near = difflib.get_close_matches(str(key), _KNOWN, n=1, cutoff=0.5)
            raise ConfigError(
                str(key),
                f"{values[key]!r} for a key that Accelerate refuses",
                ", ".join(sorted(_KNOWN)),
                f"write {near[0]}" if near else "remove this key",
            )
    kind = _kind(conversion, section)
    ranks = _ranks(conversion, section, kind)
    word = _mixed_precision(section)
    conversion.put("compile", False)
    fsdp = Section(section.peek("fsdp_config") or None, "fsdp_config", "fsdp_")
    deepspeed = section.peek("deepspeed_config") or {}
    section.take("fsdp_config")
    section.take("deepspeed_config")
    version = version_of(fsdp, 1) if kind == "FSDP" else None
    if kind != "DEEPSPEED":
        put_precision(conversion, *word, fsdp_version=version)
        for _, path, _ in Section(deepspeed, "deepspeed_config").drain():
            conversion.drop(path, f"distributed_type is {kind}")
    if kind == "FSDP":
        convert_fsdp(conversion, fsdp, ACCELERATE)
    else:
        for _, path, _ in fsdp.drain():
            conversion.drop(path, f"distributed_type is {kind}")
    if kind == "DEEPSPEED":
        _deepspeed(conversion, deepspeed, word, ranks, folder)
    elif kind != "FSDP":
        _whole_model(conversion, ranks)
    _parallelism(conversion, section, kind, version)
    _dynamo(conversion, section)
    _rest(conversion, section, word[1])
    if kind != "DEEPSPEED":
        conversion.to_give.append("Set trainer.max_steps or max_epochs, trainer.gradient_clip_val, model.optim,")
        conversion.to_give.append("data.micro_batch_size and data.global_batch_size as your script does.")


def _kind(conversion: Conversion, section: Section) -> str:
    if taken := section.take("compute_environment"):
        if str(taken[1]).upper() != "LOCAL_MACHINE":
            raise ConfigError(
                taken[0], repr(taken[1]), "LOCAL_MACHINE", "write the recipe's training job for that service by hand"
            )
        conversion.drop(taken[0], "a recipe runs wherever it is started")
    taken = section.take("distributed_type")
    if taken is None:
        raise ConfigError("distributed_type", "null", " | ".join(_KINDS), "write distributed_type: FSDP")
    path, value = taken
    value = "NO" if value is False else value  # YAML reads NO as false
    if str(value).upper() in ("XLA", "TPU"):
        raise refuse_xla(path, value)
    if str(value).upper() in _ELSEWHERE:
        raise ConfigError(path, value, " | ".join(_KINDS), f"keep the original trainer for {value}")
    kind = as_choice(path, value, _KINDS)
    engines = {"NO": "single", "MULTI_GPU": "ddp", "MULTI_CPU": "ddp", "FSDP": "fsdp1 or fsdp2", "DEEPSPEED": "ZeRO"}
    conversion.replace(path, f"engine {engines[kind]}", "see trainer.strategy.init_args")
    return kind


def _ranks(conversion: Conversion, section: Section, kind: str) -> int | None:
    machines = section.take("num_machines")
    nodes = as_count(*machines) if machines else 1
    conversion.put("trainer.num_nodes", nodes)
    if machines:
        conversion.keep(machines[0], "trainer.num_nodes", nodes)
    cpu = section.take("use_cpu")
    on_cpu = kind == "MULTI_CPU" or bool(cpu and as_bool(*cpu))
    conversion.put("trainer.accelerator", "cpu" if on_cpu else "auto" if kind == "NO" else "gpu")
    if cpu:
        note = (
            "Accelerate itself falls back to DDP on a CPU; the losses are the same" if on_cpu and kind == "FSDP" else ""
        )
        conversion.keep(cpu[0], "trainer.accelerator", conversion.get("trainer.accelerator"), note)
    processes = section.take("num_processes")
    if processes and processes[1] not in (-1, "-1"):
        ranks = as_count(*processes)
    else:
        ranks = 1 if kind == "NO" and not processes else 0
    if ranks % nodes:
        raise ConfigError(processes[0] if processes else "num_processes", f"{ranks} on {nodes} machines",
                          f"a multiple of num_machines ({nodes})", f"write num_processes: {nodes}")  # fmt: skip
    if kind == "NO" and ranks > 1:
        raise ConfigError("num_processes", f"{ranks} with distributed_type NO", "1", "write MULTI_GPU or FSDP")
    gpus = section.take("gpu_ids")
    ids = str(gpus[1]).split(",") if gpus and str(gpus[1]).lower() != "all" and not on_cpu else None
    conversion.put("trainer.devices", ranks // nodes if ranks else "auto")
    if gpus and ids:
        devices = [as_count(gpus[0], number, least=0) for number in ids]
        if ranks and nodes == 1 and len(devices) >= ranks:
            devices = devices[:ranks]
        conversion.keep(gpus[0], "trainer.devices", devices)
    elif gpus:
        conversion.drop(gpus[0], "trainer.devices says how many")
    if processes and ranks and not (gpus and ids):
        conversion.keep(processes[0], "trainer.devices", ranks // nodes, "per node")
    elif processes:
        conversion.replace(processes[0], f"trainer.devices: {conversion.get('trainer.devices')}", "those at hand")
    return ranks or None


def _mixed_precision(section: Section) -> tuple[str, str]:
    taken, old = section.take("mixed_precision"), section.take("fp16")
    if taken:
        value = "no" if taken[1] is False else taken[1]  # YAML reads no as false
        return taken[0], as_choice(taken[0], value, ("no", "fp16", "bf16", "fp8"))
    return (old[0], "fp16" if as_bool(*old) else "no") if old else ("mixed_precision (no by default)", "no")


def _whole_model(conversion: Conversion, ranks: int | None) -> None:
    conversion.put("engine", "single" if ranks == 1 else "ddp")
    for field, value in (("sharding", "no_shard"), ("wrap", "auto"), ("activation_checkpointing", "none"),
                         ("state_dict", "full")):  # fmt: skip
        conversion.put(field, value)


def _deepspeed(
    conversion: Conversion, given: dict[str, Any], word: tuple[str, str], ranks: int | None, folder: Path
) -> None:
    part = Section(given or None, "deepspeed_config")
    launch = "deepspeed_multinode_launcher deepspeed_hostfile deepspeed_exclusion_filter deepspeed_inclusion_filter"
    drop_listed(conversion, part, dict.fromkeys(launch.split(), "torchrun, srun or Lightning starts the processes"))
    drop_listed(conversion, part, {
        "zero3_init_flag": "the model is always built on meta and read shard by shard",
        "zero3_save_16bit_model": "lit-fsdp export writes the whole model in the dtype you ask for",
        "deepspeed_moe_layer_cls_names": "set wrap: {experts: true} to make experts units of their own",
    })  # fmt: skip
    auto = {"bf16.enabled": word[1] == "bf16", "fp16.enabled": word[1] == "fp16"}
    if named := part.take("deepspeed_config_file"):
        values = read_mapping(beside(str(named[1]), folder), named[0])
        conversion.replace(named[0], "the content of that file", "as below")
        convert_deepspeed(conversion, values, auto, ranks)
        if "default" not in word[0]:
            conversion.replace(word[0], "auto in the DeepSpeed file", "which decides where it says more than auto")
    else:
        values = _embedded(conversion, part, word)
        convert_deepspeed(conversion, values, auto, ranks, "deepspeed_config")
        zero, own = "deepspeed_config.zero_optimization.", "deepspeed_config."
        offloads = {f"{zero}offload_{p}.device": f"{own}offload_{p}_device" for p in ("param", "optimizer")}
        switches = {f"{own}{name}.enabled": word[0] for name in ("bf16", "fp16")}
        conversion.rename({f"{zero}stage": f"{own}zero_stage", **offloads, **switches})
    drop_unknown(conversion, part, ("zero_stage", "offload_param_device"), "deepspeed_config")


def _embedded(conversion: Conversion, part: Section, word: tuple[str, str]) -> dict[str, Any]:
    """The DeepSpeed configuration that Accelerate makes of its own few keys."""
    stage = part.take("zero_stage")
    zero: dict[str, Any] = {"stage": stage[1] if stage else 2}
    for name in ("param", "optimizer"):
        device, path = part.take(f"offload_{name}_device"), part.take(f"offload_{name}_nvme_path")
        if device:
            zero[f"offload_{name}"] = {"device": device[1]}
        if path:
            conversion.drop(path[0], "nothing is offloaded to disk here")
    values: dict[str, Any] = {"zero_optimization": zero}
    for key in ("gradient_clipping", "gradient_accumulation_steps"):
        if taken := part.take(key):
            if key == "gradient_clipping":
                values[key] = taken[1]
            else:
                conversion.drop(taken[0], f"data.global_batch_size decides: micro_batch_size * {taken[1]} * ranks")
    if word[1] == "fp8":
        conversion.drop(word[0], "its fp8 backends have no counterpart under ZeRO; bf16 is used", differs=True)
    if word[1] != "no":
        values["fp16" if word[1] == "fp16" else "bf16"] = {"enabled": True}
    if word[1] == "no" and "default" not in word[0]:
        conversion.keep(word[0], "precision", "fp32")
    return values


def _parallelism(conversion: Conversion, section: Section, kind: str, version: int | None) -> None:
    taken = section.take("parallelism_config")
    if not taken or not taken[1]:
        return
    if kind != "FSDP" or version != 2:
        raise ConfigError(taken[0], f"given with {kind}, fsdp_version {version}", "only with FSDP version 2", "drop it")
    part = Section(taken[1], taken[0], "parallelism_config_")
    sizes = {}
    for key in ("dp_replicate_size", "dp_shard_size"):
        if found := part.take(key):
            sizes[key] = (found[0], as_count(*found))
    copies = sizes.get("dp_replicate_size", ("", 1))[1]
    for key, (path, size) in sizes.items():
        field = key.removeprefix("dp_").replace("size", "degree")
        if copies > 1:
            conversion.keep(path, field, size)
        else:
            conversion.drop(path, "one copy over all ranks is full_shard")
    if copies > 1:
        zero3 = conversion.get("sharding") == "full_shard"
        conversion.put("sharding", "hybrid_shard" if zero3 else "hybrid_shard_zero2")
    for key in ("tp_size", "cp_size", "sp_size"):
        if found := part.take(key):
            size = as_count(*found)
            conversion.drop(found[0], "it is off" if size == 1 else "no tensor or sequence is split here", size > 1)
    quiet = ("cp_comm_strategy", "sp_backend", "cp_backend", "enable_async_tp")
    drop_listed(conversion, part, dict.fromkeys(quiet, "no sequence is split here"))
    drop_unknown(conversion, part, ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size"), "parallelism_config")


def _dynamo(conversion: Conversion, section: Section) -> None:
    old = section.take("dynamo_backend")
    taken = section.take("dynamo_config")
    part = Section((taken[1] or None) if taken else None, "dynamo_config", "dynamo_")
    backend = part.take("backend") or old
    if backend:
        word = str(backend[1]).upper() if backend[1] is not False else "NO"
        note = "block by block; compiled code rounds a little differently" if word == "INDUCTOR" else ""
        if word in ("NO", "INDUCTOR"):
            conversion.keep(backend[0], "compile", word == "INDUCTOR", note)
        else:
            conversion.drop(backend[0], f"blocks are compiled by inductor only, not by {word}", differs=True)
    quiet = ("mode", "use_fullgraph", "use_dynamic", "use_regional_compilation")
    drop_listed(conversion, part, dict.fromkeys(quiet, "each block is compiled with torch's defaults"))
    drop_unknown(conversion, part, ("backend", *quiet), "dynamo_config")


def _rest(conversion: Conversion, section: Section, precision: str) -> None:
    drop_listed(conversion, section, {**_LAUNCH, **_TPU, "debug": "collectives have a timeout; nothing else is traced"})
    if (taken := section.take("fp8_config")) and taken[1]:
        conversion.drop(taken[0], "torchao's fp8 here has its own choices", differs=precision == "fp8")
    if (taken := section.take("megatron_lm_config")) and taken[1]:
        conversion.drop(taken[0], "distributed_type is not MEGATRON_LM")
    drop_unknown(conversion, section, _KNOWN, "Accelerate")
