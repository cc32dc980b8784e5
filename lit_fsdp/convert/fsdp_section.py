"""The ``fsdp_config`` of Accelerate (version 1 and 2), which Transformers shares with other defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lit_fsdp.convert.precision import put_policy
from lit_fsdp.convert.read import as_bool, as_choice, as_count, as_names, drop_listed, drop_unknown
from lit_fsdp.convert.result import Conversion, Section
from lit_fsdp.errors import ConfigError

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
_PREFETCH = {"BACKWARD_PRE": "pre", "BACKWARD_POST": "post", "NO_PREFETCH": "none"}
_STATE_DICTS = {"FULL_STATE_DICT": "full", "LOCAL_STATE_DICT": "sharded", "SHARDED_STATE_DICT": "sharded"}
KEYS = tuple(
    "version sharding_strategy reshard_after_forward auto_wrap_policy transformer_layer_cls_to_wrap min_num_params "
    "backward_prefetch forward_prefetch state_dict_type offload_params cpu_offload activation_checkpointing "
    "activation_checkpointing_offload cpu_ram_efficient_loading sync_module_states use_orig_params limit_all_gathers "
    "mixed_precision_policy ignored_modules xla xla_fsdp_v2 xla_fsdp_settings xla_fsdp_grad_ckpt".split()
)


@dataclass(frozen=True)
class Defaults:
    """What the library in question takes for a key that is not given."""

    version: int
    policy: str
    min_num_params: int
    state_dict: dict[int, str]
    """By FSDP version."""
    efficient_loading: bool


ACCELERATE = Defaults(1, "NO_WRAP", 100_000_000, {1: "FULL_STATE_DICT", 2: "SHARDED_STATE_DICT"}, True)
TRANSFORMERS = Defaults(2, "TRANSFORMER_BASED_WRAP", 0, dict.fromkeys((1, 2), "FULL_STATE_DICT"), False)


def refuse_xla(key: str, value: Any) -> ConfigError:
    """The error for anything that needs XLA."""
    return ConfigError(
        key,
        f"{value}, which is FSDP on TPUs through XLA",
        "engine fsdp2 | fsdp1 | ddp | single on CUDA or CPU",
        "drop the xla keys and train on GPUs, or keep the original trainer for TPUs",
    )


def drop_on_cpu(conversion: Conversion, section: Section) -> None:
    """Drop the whole section: on a CPU both libraries train with DDP, whatever it says."""
    for key, path, value in section.drain():
        if key not in KEYS:
            conversion.drop(path, "fsdp_config has no such key", differs=True)
        elif value is not None:
            conversion.drop(path, "it is about FSDP, and DDP is used on a CPU")


def version_of(section: Section, default: int) -> int:
    """1 or 2; the key stays in the section."""
    return 2 if as_choice(section.name("version"), section.peek("version", default), ("1", "2")) == "2" else 1


def convert_fsdp(conversion: Conversion, section: Section, defaults: Defaults) -> int:
    """Convert the section, whose keys have lost their ``fsdp_`` already; gives the FSDP version."""
    for key in ("xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt"):
        if (taken := section.take(key)) and as_bool(*taken):
            raise refuse_xla(taken[0], "true")
        if taken:
            conversion.drop(taken[0], "XLA is off")
    drop_listed(conversion, section, {"xla_fsdp_settings": "XLA is off"})
    version = version_of(section, defaults.version)
    if taken := section.take("version"):
        conversion.keep(taken[0], "engine", f"fsdp{version}")
    conversion.put("engine", f"fsdp{version}")
    _sharding(conversion, section, version, defaults)
    _wrap(conversion, section, defaults)
    _prefetch(conversion, section, version)
    _memory(conversion, section, version)
    _loading(conversion, section, version, defaults)
    _state_dict(conversion, section, version, defaults)
    if taken := section.take("mixed_precision_policy"):
        put_policy(conversion, *taken, fsdp_version=version)
    if taken := section.take("ignored_modules"):
        conversion.drop(taken[0], "every parameter is in a unit here", differs=True)
    drop_unknown(conversion, section, KEYS, "fsdp_config")
    return version


def _sharding(conversion: Conversion, section: Section, version: int, defaults: Defaults) -> None:
    found: dict[str, tuple[str, str]] = {}
    for key in ("sharding_strategy", "reshard_after_forward"):
        if not (taken := section.take(key)):
            continue
        path, value = taken
        named = str(value).strip().upper() in (*STRATEGIES, *"12345")
        if key == "sharding_strategy":
            word = as_choice(path, value, STRATEGIES, numbered=True)
            if version == 2:
                conversion.drop(path, "version 2 does not read it: reshard_after_forward decides")
                continue
        elif version == 2:
            word = "FULL_SHARD" if as_bool(path, value) else "SHARD_GRAD_OP"
        elif not named and defaults is ACCELERATE:
            conversion.drop(path, "version 1 does not read it: sharding_strategy decides")
            continue
        elif not named:
            allowed, fix = " | ".join(STRATEGIES), f"write {path}: FULL_SHARD, or version: 2"
            raise ConfigError(path, f"{value} with version 1", allowed, fix)
        else:
            word = as_choice(path, value, STRATEGIES, numbered=True)
        other = next(iter(found), None)
        if other and found[other][0] != word:
            fix = f"drop {path}"
            raise ConfigError(path, f"{value} beside {other} {found[other][0]}", "one sharding strategy", fix)
        note = ""
        if version == 1 and key == "reshard_after_forward" and word != "FULL_SHARD" and not found:
            note = "Accelerate 1.x ignores it with version 1 and shards fully; the losses are the same"
        found[path] = (word, note)
    word = next((word for word, _ in found.values()), "FULL_SHARD")
    for path, (_, note) in found.items():
        put_sharding(conversion, path, word.lower(), note)
    conversion.put("sharding", conversion.get("sharding", word.lower()))


def put_sharding(conversion: Conversion, path: str, word: str, note: str = "") -> None:
    """Keep a strategy; a hybrid one on a single node is the one without copies, for torch shards within a node."""
    plain = {"hybrid_shard": "full_shard", "hybrid_shard_zero2": "shard_grad_op"}.get(word)
    if plain is None or conversion.get("trainer.num_nodes") != 1:
        conversion.keep(path, "sharding", word, note)
        return
    conversion.put("sharding", plain)
    conversion.replace(path, f"sharding: {plain}", f"{word} has one copy per node, and this is one node")


def _wrap(conversion: Conversion, section: Section, defaults: Defaults) -> None:
    policy = defaults.policy
    policy_key = section.name("auto_wrap_policy")
    given = section.take("auto_wrap_policy")
    if given:
        policy = as_choice(*given, words=_POLICIES)
    classes, smallest = section.take("transformer_layer_cls_to_wrap"), section.take("min_num_params")
    names = as_names(*classes) if classes else []
    number = as_count(*smallest, least=0) if smallest else None
    if classes and smallest and names and number:
        raise ConfigError(
            smallest[0],
            f"{number} beside {classes[0]}",
            "class names or a smallest unit, not both",
            f"drop {smallest[0] if policy == _POLICIES[0] else classes[0]}: {policy} ignores it",
        )
    wrap: Any = "auto"
    note = "one unit for the whole model would gather all of it at once; the losses are the same"
    if policy == "TRANSFORMER_BASED_WRAP":
        # the classes and nothing else, as the policy wraps them
        wrap = {"classes": names, "embedding_and_head": False} if names else "auto"
        note = "" if names else "the model's own block classes"
    elif policy == "SIZE_BASED_WRAP":
        size = defaults.min_num_params if number is None else number
        wrap, note = ({"min_num_params": size}, "") if size else ("auto", f"a smallest unit of 0 wraps nothing: {note}")
    conversion.put("wrap", wrap)
    if given and wrap == "auto":
        conversion.replace(policy_key, "wrap: auto", note)
    elif given:
        conversion.keep(policy_key, "wrap", wrap)
    for taken, policy_that_reads in ((classes, _POLICIES[0]), (smallest, _POLICIES[1])):
        if taken and policy == policy_that_reads and wrap != "auto":
            conversion.keep(taken[0], "wrap", wrap)
        elif taken:
            conversion.drop(taken[0], f"auto_wrap_policy {policy} does not read it, or it is empty")


def _prefetch(conversion: Conversion, section: Section, version: int) -> None:
    backward, forward = section.take("backward_prefetch"), section.take("forward_prefetch")
    if backward:
        word = as_choice(*backward, words=tuple(_PREFETCH), numbered=True)
        if version == 1:
            conversion.keep(backward[0], "backward_prefetch", _PREFETCH[word])
        else:
            conversion.replace(backward[0], "backward_prefetch: pre", "FSDP2 in Accelerate always does so")
    if forward:
        wanted = as_bool(*forward)
        if version == 1:
            conversion.keep(forward[0], "forward_prefetch", wanted)
        else:
            conversion.drop(forward[0], "version 2 of Accelerate does not read it; forward_prefetch: true exists here")
    conversion.put("backward_prefetch", conversion.get("backward_prefetch", "none" if version == 1 else "pre"))
    conversion.put("forward_prefetch", conversion.get("forward_prefetch", False))


def _memory(conversion: Conversion, section: Section, version: int) -> None:
    conversion.put("cpu_offload", False)
    for key in ("offload_params", "cpu_offload"):
        if taken := section.take(key):
            conversion.keep(taken[0], "cpu_offload", as_bool(*taken) or conversion.get("cpu_offload"))
    conversion.put("activation_checkpointing", "none")
    offload = section.take("activation_checkpointing_offload")
    offloads = bool(offload) and as_bool(*offload)  # type: ignore[misc]
    taken = section.take("activation_checkpointing")
    checkpoints = bool(taken) and as_bool(*taken)  # type: ignore[misc]
    if offload and offloads and not (checkpoints and version == 2):
        lacks = "version 1" if checkpoints else "activation_checkpointing false"
        raise ConfigError(
            offload[0],
            f"true with {lacks}",
            "true only with activation_checkpointing: true and version 2",
            "set fsdp_activation_checkpointing: true and fsdp_version: 2, or drop it",
        )
    mode: Any = {"mode": "full", "offload_activations": True} if offloads else "full" if checkpoints else "none"
    for found in (taken, offload):
        if found:
            conversion.keep(found[0], "activation_checkpointing", mode)


def _loading(conversion: Conversion, section: Section, version: int, defaults: Defaults) -> None:
    efficient, sync = section.take("cpu_ram_efficient_loading"), section.take("sync_module_states")
    loads = as_bool(*efficient) if efficient else None
    syncs = as_bool(*sync) if sync else True
    if efficient and loads and not syncs:
        raise ConfigError(
            efficient[0],
            f"true with {sync[0] if sync else 'sync_module_states'} false",
            "true only with sync_module_states: true",
            f"write {sync[0] if sync else 'sync_module_states'}: true",
        )
    loads = (defaults.efficient_loading and syncs) if loads is None else loads
    conversion.put("cpu_ram_efficient_loading", loads)
    conversion.put("sync_module_states", syncs)
    if efficient:
        note = "each rank reads its own shards, and none reads all" if loads else ""
        conversion.keep(efficient[0], "cpu_ram_efficient_loading", loads, note)
    if sync and version == 1:
        conversion.keep(sync[0], "sync_module_states", syncs)
    elif sync:
        conversion.put("sync_module_states", True)
        conversion.put("cpu_ram_efficient_loading", loads)
        conversion.replace(sync[0], "sync_module_states: true", "FSDP2 in Accelerate always starts from rank 0")
    if taken := section.take("use_orig_params"):
        if as_bool(*taken):
            conversion.keep(taken[0], "use_orig_params", True)
        else:
            conversion.replace(taken[0], "use_orig_params: true", "always so here; the losses are the same")
    if taken := section.take("limit_all_gathers"):
        limits = as_bool(*taken)
        if version == 1 and defaults is TRANSFORMERS:
            conversion.keep(taken[0], "limit_all_gathers", limits)
        else:
            who = "accelerate launch" if version == 1 else "FSDP2"
            conversion.drop(taken[0], f"{who} does not read it and always limits them")
    conversion.put("limit_all_gathers", conversion.get("limit_all_gathers", True))


def _state_dict(conversion: Conversion, section: Section, version: int, defaults: Defaults) -> None:
    taken = section.take("state_dict_type")
    word = as_choice(*taken, words=tuple(_STATE_DICTS), numbered=True) if taken else defaults.state_dict[version]
    if taken and word == "LOCAL_STATE_DICT":
        if version == 2:
            raise ConfigError(
                taken[0],
                "LOCAL_STATE_DICT with version 2",
                "SHARDED_STATE_DICT | FULL_STATE_DICT",
                f"write {taken[0]}: SHARDED_STATE_DICT",
            )
        conversion.replace(taken[0], "state_dict: sharded", "local files fit only the ranks that wrote them")
    elif taken:
        conversion.keep(taken[0], "state_dict", _STATE_DICTS[word])
    conversion.put("state_dict", _STATE_DICTS[word])
