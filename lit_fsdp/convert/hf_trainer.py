"""Transformers ``TrainingArguments`` as JSON or YAML: strategy and precision; the training loop has its own file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lit_fsdp.convert.deepspeed import convert_deepspeed
from lit_fsdp.convert.fsdp_section import STRATEGIES, TRANSFORMERS, convert_fsdp, refuse_xla, version_of
from lit_fsdp.convert.hf_loop import KNOWN as LOOP_KEYS
from lit_fsdp.convert.hf_loop import convert_loop, loop_values
from lit_fsdp.convert.precision import put_precision
from lit_fsdp.convert.read import as_bool, as_number, beside, drop_listed, drop_unknown, read_mapping
from lit_fsdp.convert.result import Conversion, Section
from lit_fsdp.errors import ConfigError

_KNOWN = (*LOOP_KEYS, "fsdp", "fsdp_config", "deepspeed", "bf16", "fp16", "gradient_checkpointing", "use_cpu",
          "activation_checkpointing", "torch_compile", "ddp_timeout", "ddp_backend")  # fmt: skip


def convert_hf_trainer(
    conversion: Conversion, values: dict[str, Any], folder: Path, ranks: int | None, num_nodes: int
) -> None:
    """Convert TrainingArguments; files they name are looked for from here, then from ``folder``."""
    section = Section(values)
    if ranks and ranks % num_nodes:
        raise ConfigError("--ranks", f"{ranks} on {num_nodes} nodes", f"a multiple of {num_nodes}", "mend --num_nodes")
    conversion.put("trainer.devices", ranks // num_nodes if ranks else "auto")
    conversion.put("trainer.num_nodes", num_nodes)
    cpu = section.take("use_cpu")
    on_cpu = bool(cpu and as_bool(*cpu))
    conversion.put("trainer.accelerator", "cpu" if on_cpu else "auto")
    if cpu:
        conversion.keep(cpu[0], "trainer.accelerator", "cpu" if on_cpu else "auto")
    conversion.put("compile", False)
    precision = _precision_word(section)
    loop = loop_values(section)
    checkpointing = _recompute_keys(section)
    version = _fsdp(conversion, section, folder, any(on for _, on in checkpointing))
    deepspeed = section.take("deepspeed")
    if deepspeed and version:
        raise ConfigError("fsdp", "given beside deepspeed", "one of the two", "drop fsdp, or drop deepspeed")
    zero: dict[str, Any] = {}
    if deepspeed:
        zero = _mapping_or_file(deepspeed, folder)
        _deepspeed(conversion, zero, loop, precision, ranks, deepspeed[0])
    elif version is None:
        _whole_model(conversion, ranks)
    if not deepspeed:
        put_precision(conversion, precision[0], precision[1], version)
    for path, on in checkpointing:
        if on:
            conversion.keep(path, "activation_checkpointing", "full", "the blocks of the wrap choice")
        else:
            conversion.drop(path, "it is off")
    convert_loop(conversion, section, ranks, zero)
    _strategy_rest(conversion, section)
    drop_unknown(conversion, section, _KNOWN, "TrainingArguments")
    if conversion.get("data.max_seq_length") is None:
        conversion.to_give.append("Set data.max_seq_length as your script cuts its samples.")


def _precision_word(section: Section) -> tuple[str, str]:
    found = [(taken[0], word) for word in ("bf16", "fp16") if (taken := section.take(word)) and as_bool(*taken)]
    if len(found) > 1:
        raise ConfigError("fp16", "true beside bf16", "bf16 or fp16, not both", "drop fp16")
    return found[0] if found else ("bf16, fp16 (off)", "no")


def _recompute_keys(section: Section) -> list[tuple[str, bool]]:
    found = []
    for key in ("gradient_checkpointing", "activation_checkpointing"):
        if taken := section.take(key):
            found.append((taken[0], as_bool(*taken)))
    return found


def _mapping_or_file(taken: tuple[str, Any], folder: Path) -> dict[str, Any]:
    path, value = taken
    if isinstance(value, str):
        if value.lstrip().startswith("{"):
            raise ConfigError(path, "JSON inside text", "a mapping or the path of a JSON file", "write it as a mapping")
        return read_mapping(beside(value, folder), path)
    if not isinstance(value, dict):
        raise ConfigError(path, repr(value), "a mapping or the path of a JSON file", f"write {path}: file.json")
    return value


def _fsdp(conversion: Conversion, section: Section, folder: Path, recomputes: bool) -> int | None:
    """Convert ``fsdp`` and ``fsdp_config``; gives the FSDP version, or ``None`` where it is off."""
    switch, config = section.take("fsdp"), section.take("fsdp_config")
    words = _fsdp_words(switch)
    if not words:
        if switch:
            conversion.drop(switch[0], "it is off")
        if config:
            conversion.drop(config[0], "fsdp is off, so Transformers does not read it")
        return None
    assert switch is not None
    part = Section(_mapping_or_file(config, folder) if config else None, "fsdp_config", "fsdp_")
    for key in ("xla", "xla_fsdp_v2"):
        if part.has(key) and as_bool(part.name(key), part.peek(key)):
            raise refuse_xla(part.name(key), "true")
    version = version_of(part, TRANSFORMERS.version)
    strategy = [word for word in words if word.upper() in STRATEGIES]
    if len(strategy) > 1:
        raise ConfigError(switch[0], " ".join(strategy), "one sharding strategy", f"write fsdp: {strategy[0]}")
    if "offload" in words and not strategy:
        raise ConfigError(
            switch[0], "offload alone", "offload with full_shard or shard_grad_op", "write fsdp: full_shard offload"
        )
    if version == 2 and strategy and strategy[0] not in ("full_shard", "shard_grad_op"):
        raise ConfigError(
            switch[0],
            f"{strategy[0]} with version 2",
            "full_shard | shard_grad_op, or version 1",
            "add version: 1 to fsdp_config",
        )
    if recomputes and as_bool("activation_checkpointing", part.peek("activation_checkpointing", False)):
        raise ConfigError(
            part.name("activation_checkpointing"),
            "true beside gradient_checkpointing true",
            "one of the two: both would recompute and gather twice",
            "drop gradient_checkpointing",
        )
    convert_fsdp(conversion, part, TRANSFORMERS)
    _apply_words(conversion, switch[0], words, strategy, bool(config and _names_strategy(config, folder)))
    return version


def _names_strategy(config: tuple[str, Any], folder: Path) -> bool:
    keys = {str(key).removeprefix("fsdp_") for key in _mapping_or_file(config, folder)}
    return bool(keys & {"reshard_after_forward", "sharding_strategy"})


def _fsdp_words(switch: tuple[str, Any] | None) -> list[str]:
    if switch is None:
        return []
    value = switch[1]
    if isinstance(value, bool):
        return ["on"] if value else []
    words = value.split() if isinstance(value, str) else value
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ConfigError(switch[0], repr(value), "true, words with spaces, or a list of words", "write fsdp: true")
    words = [word.strip().lower() for word in words]
    if words in (["true"], ["false"]):
        return ["on"] if words == ["true"] else []
    known = [strategy.lower() for strategy in STRATEGIES] + ["offload", "auto_wrap"]
    for word in words:
        if word not in known:
            raise ConfigError(switch[0], word, " | ".join(known), "write fsdp: full_shard auto_wrap")
    return words


def _apply_words(conversion: Conversion, path: str, words: list[str], strategy: list[str], named: bool) -> None:
    if strategy and named and conversion.get("sharding") != strategy[0]:
        raise ConfigError(
            path,
            f"{strategy[0]} beside fsdp_config with {conversion.get('sharding')}",
            "one sharding strategy",
            f"drop {strategy[0]} from fsdp",
        )
    if strategy:
        conversion.keep(path, "sharding", strategy[0])
    if "offload" in words:
        conversion.keep(path, "cpu_offload", True, "offload")
    if "auto_wrap" in words:
        conversion.keep(path, "wrap", conversion.get("wrap"), "auto_wrap")
    if not strategy:
        conversion.keep(path, "engine", conversion.get("engine"))


def _deepspeed(
    conversion: Conversion, zero: dict[str, Any], loop: dict[str, Any], precision: tuple[str, str], ranks: int | None,
    path: str,
) -> None:  # fmt: skip
    micro, steps = loop["per_device_train_batch_size"], loop["gradient_accumulation_steps"]
    auto = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
        "train_batch_size": micro * steps * ranks if ranks else None,
        "gradient_clipping": loop["max_grad_norm"],
        "optimizer.params.lr": loop["learning_rate"],
        "optimizer.params.betas": [loop["adam_beta1"], loop["adam_beta2"]],
        "optimizer.params.eps": loop["adam_epsilon"],
        "optimizer.params.weight_decay": loop["weight_decay"],
        "scheduler.params.warmup_min_lr": 0,
        "scheduler.params.warmup_max_lr": loop["learning_rate"],
        "scheduler.params.warmup_num_steps": loop["warmup_steps"],
        "scheduler.params.total_num_steps": loop["max_steps"] if loop["max_steps"] > 0 else None,
        "bf16.enabled": precision[1] == "bf16",
        "fp16.enabled": precision[1] == "fp16",
    }
    _agree(zero, auto, loop, path)
    convert_deepspeed(conversion, zero, auto, ranks, path)
    if precision[1] != "no":
        conversion.replace(precision[0], f"precision: {conversion.get('precision')}", "the deepspeed file decides")


def _agree(zero: dict[str, Any], auto: dict[str, Any], loop: dict[str, Any], path: str) -> None:
    """Transformers refuses a DeepSpeed number that is neither auto nor its own argument."""
    names = {"train_micro_batch_size_per_gpu": "per_device_train_batch_size", "gradient_clipping": "max_grad_norm",
             "gradient_accumulation_steps": "gradient_accumulation_steps"}  # fmt: skip
    for key, name in names.items():
        given = zero.get(key)
        if given not in (None, "auto") and as_number(f"{path}.{key}", given) != loop[name]:
            raise ConfigError(
                f"{path}.{key}", f"{given} with {name} {loop[name]}", f"{loop[name]}, or auto", f"write {key}: auto"
            )
    section = zero.get("optimizer")
    params = section.get("params") if isinstance(section, dict) else None
    rate = params.get("lr") if isinstance(params, dict) else None
    wanted = auto["optimizer.params.lr"]
    if rate not in (None, "auto") and as_number(f"{path}.optimizer.params.lr", rate) != wanted:
        raise ConfigError(
            f"{path}.optimizer.params.lr", f"{rate} with learning_rate {wanted}", f"{wanted}, or auto", "write lr: auto"
        )


def _whole_model(conversion: Conversion, ranks: int | None) -> None:
    conversion.put("engine", "single" if ranks == 1 else "ddp")
    for field, value in (("sharding", "no_shard"), ("wrap", "auto"), ("activation_checkpointing", "none"),
                         ("state_dict", "full")):  # fmt: skip
        conversion.put(field, value)


def _strategy_rest(conversion: Conversion, section: Section) -> None:
    if taken := section.take("torch_compile"):
        on = as_bool(*taken)
        conversion.keep(taken[0], "compile", on, "block by block" if on else "")
    if taken := section.take("ddp_timeout"):
        conversion.keep(taken[0], "timeout_seconds", as_number(*taken, least=1))
    if taken := section.take("ddp_backend"):
        if taken[1] in ("nccl", "gloo"):
            conversion.keep(taken[0], "process_group_backend", taken[1])
        else:
            conversion.replace(taken[0], "process_group_backend by device", "gloo and nccl exist here")
    quiet = ("torch_compile_backend", "torch_compile_mode", "gradient_checkpointing_kwargs",
             "activation_checkpointing_kwargs")  # fmt: skip
    drop_listed(conversion, section, dict.fromkeys(quiet, "its switch decides, with torch's defaults"))
