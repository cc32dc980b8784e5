"""What ``auto`` in a DeepSpeed configuration stands for.

DeepSpeed does not know the word: Accelerate and Transformers fill it in from their own arguments. A file alone does not
say them, so the defaults of Transformers hold there, each is named in its line, and none counts as a difference.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from lit_fsdp.convert.result import Conversion, Section

_LOOP: dict[str, Any] = {
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "max_grad_norm": 1.0, "learning_rate": 5e-5,
    "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "weight_decay": 0.0, "warmup_steps": 0,
    "warmup_ratio": 0.0, "max_steps": -1,
}  # fmt: skip


def trainer_fills_in(loop: dict[str, Any], precision: str, ranks: int | None) -> dict[str, Any]:
    """What Transformers fills in, by dotted key; ``None`` where only the run knows it.

    Args:
        loop: Numbers of ``TrainingArguments``.
        precision: ``no``, ``bf16`` or ``fp16``.
        ranks: Ranks of the run, if known.
    """
    micro, steps, length = loop["per_device_train_batch_size"], loop["gradient_accumulation_steps"], loop["max_steps"]
    warmup = loop["warmup_steps"] or loop["warmup_ratio"]
    if 0 < warmup < 1:
        warmup = math.ceil(warmup * length) if length > 0 else None
    return {
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
        "scheduler.params.warmup_num_steps": warmup,
        "scheduler.params.total_num_steps": length if length > 0 else None,
        "bf16.enabled": precision == "bf16",
        "fp16.enabled": precision == "fp16",
    }


# Accelerate's DeepSpeed plugin, which Transformers uses as well.
_PLUGIN = {
    "zero_optimization.stage": 2,
    "zero_optimization.offload_param.device": "none",
    "zero_optimization.offload_optimizer.device": "none",
}
_BATCHES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@dataclass(frozen=True)
class Auto:
    """What ``auto`` stands for, and who says so."""

    values: dict[str, Any]
    """By dotted key; ``None`` where only the run knows it."""
    exact: bool = False
    """Whether the input itself says the values; else they are defaults."""
    said_by: dict[str, str] = field(default_factory=dict)
    """The key of the input that says a value, by dotted key."""

    def who_of(self, dotted: str) -> str:
        """Who fills in ``dotted``."""
        if dotted in self.said_by:
            return f"as {self.said_by[dotted]} says"
        if dotted in _PLUGIN:
            return "Accelerate's plugin fills it in"
        return "from TrainingArguments" if self.exact else "what Transformers fills in by default; set your own"


def defaults(precision: tuple[str, str] | None = None) -> Auto:
    """What Transformers fills in where none of its arguments is given.

    Args:
        precision: The key and the word of Accelerate's ``mixed_precision``, which decides about bf16 and fp16.
    """
    if precision is None:
        return Auto(trainer_fills_in(_LOOP, "no", None))
    key, word = precision
    values = trainer_fills_in(_LOOP, "bf16" if word == "fp8" else word, None)
    return Auto(values, said_by=dict.fromkeys(("bf16.enabled", "fp16.enabled"), key))


def with_precision(values: dict[str, Any], word: str) -> dict[str, Any]:
    """The configuration with the section of ``word`` (no, bf16, fp16, fp8), which Accelerate adds where it lacks."""
    name = {"fp16": "fp16", "bf16": "bf16", "fp8": "bf16"}.get(word)
    return values if name is None or name in values else {**values, name: {"enabled": "auto"}}


def without_auto(
    conversion: Conversion, section: Section, auto: Auto, quiet: frozenset[str]
) -> tuple[Section, dict[str, str]]:
    """The section with every ``auto`` replaced by what it stands for, or left out and said.

    Args:
        conversion: Takes the lines of those left out.
        section: The whole configuration; it is empty afterwards.
        auto: What each stands for.
        quiet: Keys that change nothing here, whatever they say; they stay, as the batch sizes do.

    Returns:
        The section, and who filled in each key, by its full path.
    """
    filled: dict[str, str] = {}
    values = {**_PLUGIN, **auto.values}

    def walk(given: dict[str, Any], inner: str, written: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in given.items():
            dotted, shown = (f"{inner}.{key}" if inner else key), (f"{written}.{key}" if written else key)
            if isinstance(value, dict):
                found[key] = walk(value, dotted, shown)
            elif value != "auto" or key in quiet or dotted in _BATCHES:
                found[key] = value
            elif values.get(dotted) is not None:
                found[key] = values[dotted]
                filled[shown] = auto.who_of(dotted)
            elif dotted in values:
                share = "warmup" in dotted
                conversion.replace(shown, "what you set", "auto: it needs the length of the run", differs=share)
                conversion.to_give.append(f"Check what stands for auto in {shown}.")
            else:
                conversion.drop(shown, "nobody fills in auto here, and DeepSpeed refuses the word", differs=True)
        return found

    whole = {key: value for key, _, value in section.drain()}
    return Section(walk(whole, "", section.path), section.path), filled
