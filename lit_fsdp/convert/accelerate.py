"""The YAML (or JSON) that ``accelerate config`` writes and ``accelerate launch`` reads."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from lit_fsdp.convert.accelerate_zero import convert_zero_section
from lit_fsdp.convert.fsdp_section import ACCELERATE, convert_fsdp, drop_on_cpu, refuse_xla, version_of
from lit_fsdp.convert.precision import put_precision
from lit_fsdp.convert.read import as_bool, as_choice, as_count, drop_listed, drop_unknown
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
    word = _mixed_precision(conversion, section, "mixed_precision" in values)
    on_cpu = conversion.get("trainer.accelerator") == "cpu"
    if on_cpu and word[1] == "fp16":
        raise ConfigError(word[0], "fp16 on a CPU", "no | bf16 on a CPU", f"write {word[0]}: bf16")
    sharded = kind == "FSDP" and not on_cpu
    conversion.put("compile", False)
    fsdp = Section(section.peek("fsdp_config") or None, "fsdp_config", "fsdp_")
    deepspeed = section.peek("deepspeed_config") or {}
    section.take("fsdp_config")
    section.take("deepspeed_config")
    version = version_of(fsdp, 1) if sharded else None
    if kind != "DEEPSPEED":
        put_precision(conversion, *word, fsdp_version=version)
        for _, path, _ in Section(deepspeed, "deepspeed_config").drain():
            conversion.drop(path, f"distributed_type is {kind}")
    if sharded:
        convert_fsdp(conversion, fsdp, ACCELERATE)
    elif kind == "FSDP":
        drop_on_cpu(conversion, fsdp)
    else:
        for _, path, _ in fsdp.drain():
            conversion.drop(path, f"distributed_type is {kind}")
    if kind == "DEEPSPEED":
        convert_zero_section(conversion, deepspeed, word, ranks, folder)
    elif not sharded:
        _whole_model(conversion, ranks)
    _parallelism(conversion, section, kind, version, ranks)
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
    cpu = section.peek("use_cpu")
    if kind == "FSDP" and cpu is not None and as_bool("use_cpu", cpu):
        conversion.replace(path, "engine: ddp", "Accelerate trains with DDP on a CPU: FSDP is for GPUs there")
        return kind
    if kind == "FSDP":
        version = version_of(Section(section.peek("fsdp_config") or None, "fsdp_config", "fsdp_"), 1)
        conversion.replace(path, f"engine: fsdp{version}", "by the version of fsdp_config, 1 by default")
    elif kind == "DEEPSPEED":
        conversion.replace(path, "the engine of its ZeRO stage", "fsdp2 shards as ZeRO does; stage 0 is ddp")
    else:
        conversion.replace(path, f"engine: {'single' if kind == 'NO' else 'ddp'}", "the whole model on every rank")
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
        conversion.keep(cpu[0], "trainer.accelerator", conversion.get("trainer.accelerator"))
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
    ids = _gpus(gpus[1]) if gpus and not on_cpu else None
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


def _gpus(value: Any) -> list[Any] | None:
    """The numbers of ``gpu_ids``, ``None`` for all."""
    if isinstance(value, list):
        return value
    return None if str(value).lower() == "all" else [number for number in str(value).split(",") if number.strip()]


def _mixed_precision(conversion: Conversion, section: Section, named: bool) -> tuple[str, str]:
    taken, old = section.take("mixed_precision"), section.take("fp16")
    if old and named:
        as_bool(*old)
        conversion.drop(old[0], f"Accelerate reads mixed_precision ({taken[1] if taken else 'null'}) instead")
        old = None
    if taken:
        value = "no" if taken[1] is False else taken[1]  # YAML reads no as false
        return taken[0], as_choice(taken[0], value, ("no", "fp16", "bf16", "fp8"))
    return (old[0], "fp16" if as_bool(*old) else "no") if old else ("mixed_precision (no by default)", "no")


def _whole_model(conversion: Conversion, ranks: int | None) -> None:
    conversion.put("engine", "single" if ranks == 1 else "ddp")
    for field, value in (("sharding", "no_shard"), ("wrap", "auto"), ("activation_checkpointing", "none"),
                         ("state_dict", "full")):  # fmt: skip
        conversion.put(field, value)


def _parallelism(conversion: Conversion, section: Section, kind: str, version: int | None, ranks: int | None) -> None:
    taken = section.take("parallelism_config")
    if not taken or not taken[1]:
        return
    if kind == "FSDP" and conversion.get("trainer.accelerator") == "cpu":
        conversion.drop(taken[0], "it is about FSDP, and DDP is used on a CPU")
        return
    if kind != "FSDP" or version != 2:
        raise ConfigError(taken[0], f"given with {kind}, fsdp_version {version}", "only with FSDP version 2", "drop it")
    part = Section(taken[1], taken[0], "parallelism_config_")
    names = ("dp_replicate_size", "dp_shard_size")
    sizes = {key: (found[0], as_count(*found)) for key in names if (found := part.take(key))}
    copies, shards = (sizes.get(key, ("", 1))[1] for key in names)
    others = [(found[0], as_count(*found)) for key in ("tp_size", "cp_size", "sp_size") if (found := part.take(key))]
    if all(size == 1 for _, size in others):
        _sizes_fit(sizes, copies, shards, ranks)
    for key, (path, size) in sizes.items():
        field = key.removeprefix("dp_").replace("size", "degree")
        if copies > 1:
            conversion.keep(path, field, size)
        else:
            conversion.drop(path, "one copy over all ranks is full_shard")
    if copies > 1:
        zero3 = conversion.get("sharding") == "full_shard"
        conversion.put("sharding", "hybrid_shard" if zero3 else "hybrid_shard_zero2")
    for path, size in others:
        conversion.drop(path, "it is off" if size == 1 else "no tensor or sequence is split here", size > 1)
    quiet = (
        "cp_comm_strategy",
        "sp_backend",
        "cp_backend",
        "enable_async_tp",
        "sp_seq_length",
        "sp_seq_length_is_variable",
        "sp_attn_implementation",
    )
    drop_listed(conversion, part, dict.fromkeys(quiet, "no sequence is split here"))
    drop_unknown(conversion, part, ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size"), "parallelism_config")


def _sizes_fit(sizes: dict[str, tuple[str, int]], copies: int, shards: int, ranks: int | None) -> None:
    """Accelerate wants a size for every rank, and more than one shard."""
    path = sizes["dp_shard_size"][0] if "dp_shard_size" in sizes else "parallelism_config.dp_shard_size"
    if shards > 1 and ranks in (None, copies * shards):
        return
    fits = ranks // copies if ranks and ranks % copies == 0 and ranks > copies else 2
    given = f"{shards} with {copies} copies" + (f" on {ranks} ranks" if ranks else "")
    allowed = "dp_replicate_size * dp_shard_size == num_processes, with dp_shard_size >= 2"
    raise ConfigError(path, given, allowed, f"write {path}: {fits}, or mend num_processes")


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
