"""Convert the YAML of ``accelerate config``, and its ``fsdp_config``, which Transformers uses with other defaults."""

from pathlib import Path
from typing import Any

from lit_fsdp.convert.conversion import Conversion, Given, names, number
from lit_fsdp.convert.deepspeed import OF_ACCELERATE, put_engine, put_of_accelerate, put_precision, put_ranks
from lit_fsdp.convert.tables import OFF, Drop, Keep, Source, Table, rows, under
from lit_fsdp.errors import require

SHARDINGS = {w: w.lower() for w in "FULL_SHARD SHARD_GRAD_OP NO_SHARD HYBRID_SHARD HYBRID_SHARD_ZERO2".split()}
_PREFETCH = {"BACKWARD_PRE": "pre", "BACKWARD_POST": "post", "NO_PREFETCH": "none"}
_STATE_DICTS = {"FULL_STATE_DICT": "full", "LOCAL_STATE_DICT": "sharded", "SHARDED_STATE_DICT": "sharded"}
_FSDP: Table = {
    "version": Keep("engine", {"1": "fsdp1", "2": "fsdp2"}),
    **rows("auto_wrap_policy transformer_layer_cls_to_wrap min_num_params", None),
    **rows("offload_params cpu_offload", Keep("cpu_offload")),
    "activation_checkpointing": Keep("activation_checkpointing.mode", {"true": "full", "false": None}),
    "activation_checkpointing_offload": Keep("activation_checkpointing.offload_activations"),
    "cpu_ram_efficient_loading": Keep("cpu_ram_efficient_loading", why="if true, each rank reads its own shards"),
    "state_dict_type": Keep("state_dict", _STATE_DICTS),
    "use_orig_params": Drop("parameters keep their own names here; the losses are the same"),
    "mixed_precision_policy": Drop("accelerate launch ignores it and uses mixed_precision"),
    "ignored_modules": Drop("every parameter is in a unit here", OFF),
    **rows("xla xla_*", Drop("FSDP through XLA is for TPUs", OFF)),
}
_VERSION_1: Table = {
    "sharding_strategy": Keep("sharding", SHARDINGS),
    "reshard_after_forward": Drop("version 1 ignores it and uses sharding_strategy"),
    "backward_prefetch": Keep("backward_prefetch", _PREFETCH),
    "forward_prefetch": Keep("forward_prefetch"),
    "sync_module_states": Keep("sync_module_states"),
    "limit_all_gathers": Drop("accelerate launch ignores it and always limits all-gathers"),
}
_VERSION_2: Table = {
    "sharding_strategy": Drop("version 2 ignores it and uses reshard_after_forward"),
    "reshard_after_forward": Keep("sharding", {"true": "full_shard", "false": "shard_grad_op"}),
    "backward_prefetch": Drop("version 2 always gathers as backward_prefetch: pre does"),
    "forward_prefetch": Drop("version 2 ignores it; lit_fsdp supports forward_prefetch: true"),
    "sync_module_states": Drop("version 2 always broadcasts from rank 0"),
    "limit_all_gathers": Drop("version 2 always limits all-gathers"),
}
_KINDS = {"NO": "single", "FSDP": "fsdp", "DEEPSPEED": "deepspeed", "MULTI_GPU": "ddp", "MULTI_CPU": "ddp"}
_POLICIES = {"TRANSFORMER_BASED_WRAP": "classes", "SIZE_BASED_WRAP": "min_num_params", "NO_WRAP": "auto"}
_STARTS = Drop("torchrun, srun or Lightning starts the processes")
_ACCELERATE: Table = {
    **rows("distributed_type num_processes num_machines gpu_ids use_cpu mixed_precision", None),
    "compute_environment": Drop("recipes cannot start jobs of that service", "local_machine"),
    **rows("machine_rank main_* rdzv_backend same_network mpirun_config enable_cpu_affinity", _STARTS),
    "debug": Drop("it only checks shapes"),
    **rows("tpu_* command_file commands downcast_bf16 megatron_lm_config", Drop("distributed_type does not use it")),
    "fp16": Drop("mixed_precision applies", OFF),
    "fp8_config": Drop("torchao's fp8 has its own options"),
    **rows("dynamo_backend dynamo_config.backend",
           Keep("compile", {"NO": False, "INDUCTOR": True}, "block by block", "only inductor compiles blocks")),
    **rows("dynamo_config.mode dynamo_config.use_*", Drop("each block is compiled with torch's defaults")),
    **under("parallelism_config", {
        "dp_replicate_size": Keep("replicate_degree"),
        **rows("dp_shard_size cp_size tp_size", None),
        "sp_size": Drop("splitting sequences by DeepSpeed is not converted", "1"),
        **rows("cp_* sp_* enable_async_tp", Drop("it affects speed, not results")),
    }),
    **OF_ACCELERATE,
}  # fmt: skip


def convert_accelerate(conversion: Conversion, values: dict[str, Any], folder: Path, ranks: int | None) -> None:
    """Convert an Accelerate configuration for FSDP, DeepSpeed, DDP or a single process."""
    require(not ranks, "--ranks", ranks, "nothing: num_processes is in the file", "drop it")
    version, table = fsdp_table(values, "1", {})
    source = Source(conversion, {**_ACCELERATE, **table}, values)
    distributed, word = source.take("distributed_type", "NO"), source.take("mixed_precision", "no")
    kind = distributed.read(_KINDS)
    ranks, on_cpu = _processes(conversion, source, kind, distributed.value)
    kind = "ddp" if kind == "fsdp" and on_cpu else kind
    if kind != "deepspeed":
        source.ignore("deepspeed_config.", "distributed_type does not use it")
    if kind == "fsdp":
        convert_fsdp(conversion, source, version, "full" if version == "1" else "sharded", "NO_WRAP", 100_000_000)
        conversion.put("cpu_ram_efficient_loading", True)
        degree = source.take("parallelism_config.cp_size", 1)
        if degree.key:
            conversion.keep(degree, "context_parallel", degree.read(number))
        name = "parallelism_config.dp_shard_size"
        put_shards(conversion, source, name, degree.read(number), "parallelism_config.tp_size")
    elif kind == "deepspeed":
        source.ignore("fsdp_config. parallelism_config.", "DeepSpeed does not read it")
        put_of_accelerate(conversion, source, folder, ranks, word)
    else:
        where = f"{distributed.value} does not read it" + " on a CPU" * on_cpu
        source.ignore("fsdp_config. parallelism_config.", where)
        put_engine(conversion, "", ranks)
    whole = "Accelerate trains with DDP on a CPU" if on_cpu else "the whole model on every rank"
    notes = {"fsdp": "from the version in fsdp_config, 1 by default", "deepspeed": "from the stage of ZeRO"}
    note = notes.get(kind, whole)
    conversion.say(distributed, f"replaced by engine: {conversion.get('engine')} ({note})")
    if kind != "deepspeed":
        put_precision(conversion, word)
    source.rest()


def fsdp_table(values: dict[str, Any], default: str, of_version_1: Table) -> tuple[str, Table]:
    """Return the version in ``fsdp_config`` and its rows; the library's rows of version 1 are ``of_version_1``."""
    config = values.get("fsdp_config")
    config = config if isinstance(config, dict) else {}
    version = str(config.get("fsdp_version") or config.get("version") or default)
    table = {**_FSDP, **(_VERSION_2 if version == "2" else {**_VERSION_1, **of_version_1})}
    return version, under("fsdp_config", table)


def convert_fsdp(
    conversion: Conversion, source: Source, version: str, state_dict: str, policy: str, smallest: int
) -> None:
    """Set the defaults of ``fsdp_config``, and convert the three keys that together define the units."""
    put_engine(conversion, f"fsdp{version}", None, state_dict)
    chosen = source.take("fsdp_config.auto_wrap_policy", policy)
    classes = source.take("fsdp_config.transformer_layer_cls_to_wrap", [])
    size = source.take("fsdp_config.min_num_params", smallest)
    kind = chosen.read(_POLICIES)
    wrap: Any = "auto"
    if kind == "classes" and classes.value:
        # only these classes, like the policy
        wrap = {"classes": classes.read(names), "embedding_and_head": False}
    elif kind == "min_num_params" and size.read(number):
        wrap = {"min_num_params": size.read(number)}
    conversion.keep(chosen, "wrap", wrap, "the model's own blocks" if wrap == "auto" else "")
    for given, reads in ((classes, "classes"), (size, "min_num_params")):
        if reads in wrap:
            conversion.keep(given, "wrap", wrap)
        else:
            conversion.drop(given, f"auto_wrap_policy {chosen.value} does not read it, or it is empty")
    conversion.put("backward_prefetch", "none" if version == "1" else "pre")


def put_shards(conversion: Conversion, source: Source, name: str, parts: Any, tensor: str) -> None:
    """Convert the number of ranks that share weights, which here includes the ``parts`` of context parallel.

    The argument ``tensor`` is the key of the degree of tensor parallelism, which is not converted.
    """
    shards, split = source.take(name), source.take(tensor, 1)
    is_split, why = split.read(number) > 1, "tensor parallelism is not supported"
    conversion.drop(split, why if is_split else "it is off", differs=is_split)
    if is_split:
        conversion.drop(shards, f"{why}: all ranks share the weights")
    elif shards.key and shards.read(number) > 0:
        note = "times the degree of context parallel" if int(parts) > 1 else ""
        conversion.keep(shards, "shard_degree", int(shards.read(number) * int(parts)), note)
    else:
        conversion.drop(shards, "all ranks share the weights")


def _processes(conversion: Conversion, source: Source, kind: str, name: Any) -> tuple[int | None, bool]:
    """Set devices, nodes and accelerator; returns the ranks, if known, and whether they use CPUs."""
    cpu, nodes = source.take("use_cpu", False), source.take("num_machines", 1)
    on_cpu = cpu.on or str(name).upper() == "MULTI_CPU"
    conversion.keep(cpu, "trainer.accelerator", "cpu" if on_cpu else "auto" if kind == "single" else "gpu")
    processes, gpus = source.take("num_processes", 1 if kind == "single" else -1), source.take("gpu_ids", "all")
    if kind == "single" and processes.value not in (1, "1"):
        conversion.drop(processes, f"accelerate launch starts one process with distributed_type: {name}")
        processes = Given("", 1)
    ranks = None if str(processes.value) == "-1" else int(processes.read(number))
    if gpus.value == "all" or on_cpu:
        conversion.drop(gpus, "trainer.devices sets the number")
    else:
        conversion.keep(gpus, "trainer.devices", [int(number(gpus.key, one)) for one in gpus.read(names)][:ranks])
    put_ranks(conversion, ranks, int(nodes.read(number)), "num_processes")
    conversion.keep(nodes, "trainer.num_nodes", int(nodes.read(number)))
    conversion.say(processes, f"kept as trainer.devices: {conversion.get('trainer.devices')} (per node)")
    return ranks, on_cpu
