"""Transformers ``TrainingArguments`` as JSON or YAML: strategy and precision; the training loop has its own file."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from lit_fsdp.convert.deepspeed import convert_deepspeed
from lit_fsdp.convert.deepspeed_auto import Auto, trainer_fills_in, with_precision
from lit_fsdp.convert.fsdp_section import (
    STRATEGIES,
    TRANSFORMERS,
    convert_fsdp,
    drop_on_cpu,
    put_sharding,
    refuse_xla,
    version_of,
)
from lit_fsdp.convert.hf_loop import KNOWN as LOOP_KEYS
from lit_fsdp.convert.hf_loop import convert_loop, loop_values
from lit_fsdp.convert.hf_switches import Precision, convert_accelerator, convert_compile, precision_switches
from lit_fsdp.convert.precision import put_precision
from lit_fsdp.convert.read import as_bool, as_mapping, as_number, drop_listed, drop_unknown
from lit_fsdp.convert.result import Conversion, Section, shown
from lit_fsdp.errors import ConfigError

_KNOWN = (*LOOP_KEYS, "fsdp", "fsdp_config", "deepspeed", "bf16", "fp16", "gradient_checkpointing", "use_cpu",
          "activation_checkpointing", "torch_compile", "torch_compile_backend", "torch_compile_mode", "ddp_timeout",
          "ddp_backend", "accelerator_config", "gradient_checkpointing_kwargs",
          "activation_checkpointing_kwargs")  # fmt: skip

_MAY_BE_FILES = ("fsdp_config", "deepspeed", "accelerator_config")
_MAPPINGS = (*_MAY_BE_FILES, "lr_scheduler_kwargs", "gradient_checkpointing_kwargs", "activation_checkpointing_kwargs")


def convert_hf_trainer(
    conversion: Conversion, values: dict[str, Any], folder: Path, ranks: int | None, num_nodes: int
) -> None:
    """Convert TrainingArguments; files they name are looked for from here, then from ``folder``."""
    _read_texts(values, folder)
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
    precision = precision_switches(section)
    if on_cpu and precision.word == "fp16":
        raise ConfigError("fp16", "true with use_cpu", "fp16 on GPUs only", "write bf16: true instead of fp16")
    accelerator = convert_accelerator(conversion, section, ranks)
    loop = loop_values(section)
    checkpointing = _recompute_keys(section)
    version = _fsdp(conversion, section, on_cpu, any(on for _, on in checkpointing))
    deepspeed = section.take("deepspeed")
    if deepspeed and not deepspeed[1]:
        conversion.drop(deepspeed[0], "it is empty, so DeepSpeed is off")
        deepspeed = None
    if deepspeed and version:
        raise ConfigError("fsdp", "given beside deepspeed", "one of the two", "drop fsdp, or drop deepspeed")
    zero: dict[str, Any] = {}
    if deepspeed:
        zero = as_mapping(*deepspeed, folder=folder)
        _deepspeed(conversion, zero, loop, precision, ranks, deepspeed[0])
    elif version is None:
        _whole_model(conversion, ranks)
    if not deepspeed:
        put_precision(conversion, precision.key, precision.word, version)
    for key in precision.off:
        conversion.drop(key, "it is off")
    for path, on in checkpointing:
        if on:
            conversion.keep(path, "activation_checkpointing", "full", "the blocks of the wrap choice")
        else:
            conversion.drop(path, "it is off")
    convert_loop(conversion, section, ranks, zero, accelerator)
    _strategy_rest(conversion, section)
    drop_unknown(conversion, section, _KNOWN, "TrainingArguments")
    if conversion.get("data.max_seq_length") is None:
        conversion.to_give.append("Set data.max_seq_length as your script cuts its samples.")


def _read_texts(values: dict[str, Any], folder: Path) -> None:
    """Put mappings in the place of the JSON texts and files that stand for them, as Transformers does."""
    for key in _MAPPINGS:
        text = values.get(key)
        if isinstance(text, str) and text.strip() and (key in _MAY_BE_FILES or text.lstrip().startswith("{")):
            values[key] = _encoded(text) if key == "deepspeed" else None
            values[key] = values[key] or as_mapping(key, text, folder)


def _encoded(text: str) -> dict[str, Any] | None:
    """JSON in base64, as Transformers accepts for DeepSpeed; ``None`` where it is not that."""
    try:
        found = json.loads(base64.urlsafe_b64decode(text))
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _recompute_keys(section: Section) -> list[tuple[str, bool]]:
    found = []
    for key in ("gradient_checkpointing", "activation_checkpointing"):
        if taken := section.take(key):
            found.append((taken[0], as_bool(*taken)))
    return found


def _fsdp(conversion: Conversion, section: Section, on_cpu: bool, recomputes: bool) -> int | None:
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
    part = Section(config[1] if config else None, "fsdp_config", "fsdp_")
    if on_cpu:
        conversion.replace(switch[0], "engine: ddp", "on a CPU Transformers trains with DDP: FSDP is for GPUs there")
        drop_on_cpu(conversion, part)
        return None
    for key in ("xla", "xla_fsdp_v2"):
        if part.has(key) and as_bool(part.name(key), part.peek(key)):
            raise refuse_xla(part.name(key), "true")
    version = version_of(part, TRANSFORMERS.version)
    named = part.has("reshard_after_forward") or (version == 1 and part.has("sharding_strategy"))
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
    _apply_words(conversion, switch[0], words, strategy, named)
    return version


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
    plain = {"hybrid_shard": "full_shard", "hybrid_shard_zero2": "shard_grad_op"}
    if strategy and named and conversion.get("sharding") not in (strategy[0], plain.get(strategy[0])):
        raise ConfigError(
            path,
            f"{strategy[0]} beside fsdp_config with {conversion.get('sharding')}",
            "one sharding strategy",
            f"drop {strategy[0]} from fsdp",
        )
    if strategy:
        put_sharding(conversion, path, strategy[0])
    if "offload" in words:
        conversion.keep(path, "cpu_offload", True, "offload")
    if "auto_wrap" in words:
        conversion.keep(path, "wrap", conversion.get("wrap"), "auto_wrap")
    if not strategy:
        conversion.keep(path, "engine", conversion.get("engine"))


def _deepspeed(
    conversion: Conversion, zero: dict[str, Any], loop: dict[str, Any], precision: Precision, ranks: int | None,
    path: str,
) -> None:  # fmt: skip
    auto = Auto(trainer_fills_in(loop, precision.word, ranks), exact=True)
    _agree(zero, loop, path, ranks)
    convert_deepspeed(conversion, with_precision(zero, precision.word), auto, ranks, path)
    if precision.word not in zero:
        conversion.rename({f"{path}.{precision.word}.enabled": precision.key})
    if precision.given:
        by = f"precision: {shown(conversion.get('precision'))}"
        conversion.replace(precision.key, by, "it fills in auto in the deepspeed configuration, which decides")


def _agree(zero: dict[str, Any], loop: dict[str, Any], path: str, ranks: int | None) -> None:
    """Transformers refuses a DeepSpeed number that is neither auto nor its own argument."""
    names = {"train_micro_batch_size_per_gpu": "per_device_train_batch_size", "gradient_clipping": "max_grad_norm",
             "gradient_accumulation_steps": "gradient_accumulation_steps"}  # fmt: skip
    for key, name in names.items():
        given = zero.get(key)
        if given not in (None, "auto") and as_number(f"{path}.{key}", given) != loop[name]:
            raise ConfigError(
                f"{path}.{key}", f"{given} with {name} {loop[name]}", f"{loop[name]}, or auto", f"write {key}: auto"
            )
    total = (ranks or 0) * loop["per_device_train_batch_size"] * loop["gradient_accumulation_steps"]
    key, given = f"{path}.train_batch_size", zero.get("train_batch_size")
    if total and given not in (None, "auto") and as_number(key, given) != total:
        allowed = f"{total} (per_device_train_batch_size * gradient_accumulation_steps * {ranks} ranks), or auto"
        raise ConfigError(key, f"{given}", allowed, "write train_batch_size: auto")
    section = zero.get("optimizer")
    params = section.get("params") if isinstance(section, dict) else None
    rate = params.get("lr") if isinstance(params, dict) else None
    wanted = loop["learning_rate"]
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
    convert_compile(conversion, section)
    if taken := section.take("ddp_timeout"):
        conversion.keep(taken[0], "timeout_seconds", as_number(*taken, least=1))
    if taken := section.take("ddp_backend"):
        if taken[1] in ("nccl", "gloo"):
            conversion.keep(taken[0], "process_group_backend", taken[1])
        else:
            conversion.replace(taken[0], "process_group_backend by device", "gloo and nccl exist here")
    quiet = ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs")
    drop_listed(conversion, section, dict.fromkeys(quiet, "its switch decides, with torch's defaults"))
