"""The ``deepspeed_config`` of Accelerate: its own few keys, or the file of DeepSpeed that it names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lit_fsdp.convert.deepspeed import convert_deepspeed
from lit_fsdp.convert.deepspeed_auto import Auto, defaults, with_precision
from lit_fsdp.convert.read import as_count, beside, drop_listed, drop_unknown, read_mapping
from lit_fsdp.convert.result import Conversion, Section, shown
from lit_fsdp.errors import ConfigError


def convert_zero_section(
    conversion: Conversion, given: dict[str, Any], word: tuple[str, str], ranks: int | None, folder: Path
) -> None:
    """Convert ``deepspeed_config``, or the DeepSpeed file it names.

    Args:
        conversion: Takes the recipe and the lines.
        given: The section.
        word: The key and the word of ``mixed_precision``.
        ranks: Ranks of the run, if known.
        folder: Where a named file is looked for, if not here.
    """
    part = Section(given or None, "deepspeed_config")
    launch = "deepspeed_multinode_launcher deepspeed_hostfile deepspeed_exclusion_filter deepspeed_inclusion_filter"
    drop_listed(conversion, part, dict.fromkeys(launch.split(), "torchrun, srun or Lightning starts the processes"))
    drop_listed(conversion, part, {
        "zero3_init_flag": "the model is always built on meta and read shard by shard",
        "zero3_save_16bit_model": "lit-fsdp export writes the whole model in the dtype you ask for",
        "deepspeed_moe_layer_cls_names": "set wrap: {experts: true} to make experts units of their own",
    })  # fmt: skip
    auto = defaults(word)
    if named := part.take("deepspeed_config_file"):
        values = read_mapping(beside(str(named[1]), folder), named[0])
        conversion.replace(named[0], "the content of that file", "as below")
        _convert_file(conversion, values, word, auto, ranks)
    else:
        _convert_embedded(conversion, part, word, auto, ranks)
    drop_unknown(conversion, part, ("zero_stage", "offload_param_device"), "deepspeed_config")


def _convert_file(
    conversion: Conversion, values: dict[str, Any], word: tuple[str, str], auto: Auto, ranks: int | None
) -> None:
    convert_deepspeed(conversion, with_precision(values, word[1]), auto, ranks)
    conversion.rename({f"{name}.enabled": word[0] for name in ("bf16", "fp16") if name not in values})
    if "default" not in word[0] and not any(fate.key == word[0] for fate in conversion.fates):
        precision = shown(conversion.get("precision"))
        conversion.replace(word[0], f"precision: {precision}", "the DeepSpeed file decides where it is not auto")


def _convert_embedded(
    conversion: Conversion, part: Section, word: tuple[str, str], auto: Auto, ranks: int | None
) -> None:
    values = _embedded(conversion, part, word)
    zero, own = "deepspeed_config.zero_optimization.", "deepspeed_config."
    offloads = {f"{zero}offload_{p}.device": f"{own}offload_{p}_device" for p in ("param", "optimizer")}
    switches = {f"{own}{name}.enabled": word[0] for name in ("bf16", "fp16")}
    names = {f"{zero}stage": f"{own}zero_stage", **offloads, **switches}
    try:
        convert_deepspeed(conversion, values, auto, ranks, "deepspeed_config")
    except ConfigError as error:
        written = names.get(error.field, error.field)
        fix = error.fix.replace(error.field, written).replace("stage:", "zero_stage:")
        raise ConfigError(written, error.given, error.allowed, fix) from None
    conversion.rename(names)
    for long, written in names.items():
        conversion.to_give = [line.replace(long, written) for line in conversion.to_give]


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
    clipping, steps = part.take("gradient_clipping"), part.take("gradient_accumulation_steps")
    if clipping:
        values["gradient_clipping"] = clipping[1]
    else:
        conversion.keep("deepspeed_config.gradient_clipping (1.0 by default)", "trainer.gradient_clip_val", 1.0)
    if steps:
        number = "steps" if steps[1] == "auto" else as_count(*steps)
        conversion.drop(steps[0], f"data.global_batch_size decides: micro_batch_size * {number} * ranks")
    if word[1] == "fp8":
        conversion.drop(word[0], "its fp8 backends have no counterpart under ZeRO; bf16 is used", differs=True)
    if word[1] != "no":
        values["fp16" if word[1] == "fp16" else "bf16"] = {"enabled": True}
    if word[1] == "no" and "default" not in word[0]:
        conversion.keep(word[0], "precision", "fp32")
    return values
