"""Switches of ``TrainingArguments`` that several arguments decide together: precision, compiling, Accelerate's own."""

from __future__ import annotations

from dataclasses import dataclass

from lit_fsdp.convert.read import as_bool, as_count, drop_listed, drop_unknown
from lit_fsdp.convert.result import Conversion, Section
from lit_fsdp.errors import ConfigError

_LOADER = dict.fromkeys(
    ("dispatch_batches", "even_batches", "use_seedable_sampler", "non_blocking"),
    "the data module has its own loader, with whole global batches only",
)
_ACCELERATOR = ("split_batches", *_LOADER, "gradient_accumulation_kwargs", "use_configured_state")


@dataclass(frozen=True)
class Precision:
    """What ``bf16`` and ``fp16`` say together."""

    key: str
    """The argument that decides."""
    word: str
    """``no``, ``bf16`` or ``fp16``."""
    off: tuple[str, ...]
    """Those that are there, off, and do not decide."""
    given: bool = True
    """Whether any of the two is there."""


def precision_switches(section: Section) -> Precision:
    """The precision of ``bf16`` and ``fp16``; both at once is an error in Transformers too."""
    found = {word: as_bool(*taken) for word in ("bf16", "fp16") if (taken := section.take(word))}
    on = [word for word, value in found.items() if value]
    if len(on) > 1:
        raise ConfigError("fp16", "true beside bf16", "bf16 or fp16, not both", "drop fp16")
    if on:
        return Precision(on[0], on[0], tuple(word for word in found if word not in on))
    first = next(iter(found), "bf16, fp16 (off by default)")
    return Precision(first, "no", tuple(found)[1:], given=bool(found))


def convert_compile(conversion: Conversion, section: Section) -> None:
    """Convert ``torch_compile``, which a backend or a mode turns on as well, even where it is false."""
    switch = section.take("torch_compile")
    backend, mode = section.take("torch_compile_backend"), section.take("torch_compile_mode")
    on = bool(switch and as_bool(*switch)) or bool(backend) or bool(mode)
    why = next((taken[0] for taken in (backend, mode) if taken), "")
    word = str(backend[1]).lower() if backend else "inductor"
    compiles = on and word == "inductor"
    conversion.put("compile", compiles)
    note = "block by block; compiled code rounds a little differently" if compiles else ""
    if switch and on and not as_bool(*switch):
        conversion.replace(switch[0], f"compile: {str(compiles).lower()}", f"{why} turns it on in Transformers")
    elif switch:
        conversion.keep(switch[0], "compile", compiles, note)
    if backend and compiles:
        conversion.keep(backend[0], "compile", True, note)
    elif backend:
        conversion.drop(backend[0], f"blocks are compiled by inductor only, not by {word}", differs=True)
    if mode:
        conversion.drop(mode[0], "each block is compiled with torch's defaults")


@dataclass(frozen=True)
class Batches:
    """What ``accelerator_config`` says about batches."""

    split: str | None = None
    """The key that splits ``per_device_train_batch_size`` over the ranks instead of multiplying it."""
    steps_key: str | None = None
    """The key that takes the place of ``gradient_accumulation_steps``."""
    steps: int = 1
    """Accumulation steps it says."""


def convert_accelerator(conversion: Conversion, section: Section, ranks: int | None) -> Batches:
    """Read ``accelerator_config``; the batch sizes that follow are put by the loop."""
    taken = section.take("accelerator_config")
    part = Section(taken[1] if taken else None, "accelerator_config")
    split = part.take("split_batches")
    splits = bool(split) and as_bool(*split)  # type: ignore[misc]
    if split and not splits:
        conversion.drop(split[0], "it is off")
    drop_listed(conversion, part, _LOADER)
    drop_listed(conversion, part, {"use_configured_state": "a recipe starts its own processes"})
    inner = part.take("gradient_accumulation_kwargs")
    kwargs = Section(inner[1] if inner else None, "accelerator_config.gradient_accumulation_kwargs")
    steps = kwargs.take("num_steps")
    number = as_count(*steps) if steps else 1
    given = as_count("gradient_accumulation_steps", section.peek("gradient_accumulation_steps", 1))
    if steps and given > 1:
        allowed = "gradient_accumulation_steps or num_steps, not both"
        raise ConfigError(steps[0], f"{number} beside gradient_accumulation_steps {given}", allowed, "drop num_steps")
    quiet = ("sync_each_batch", "sync_with_dataloader", "adjust_scheduler")
    drop_listed(conversion, kwargs, dict.fromkeys(quiet, "Transformers accumulates by itself"))
    drop_unknown(conversion, kwargs, ("num_steps", *quiet), "gradient_accumulation_kwargs")
    drop_unknown(conversion, part, _ACCELERATOR, "accelerator_config")
    batch = as_count("per_device_train_batch_size", section.peek("per_device_train_batch_size", 8))
    if split and splits and ranks and batch % ranks:
        given_text = f"true with per_device_train_batch_size {batch} on {ranks} ranks"
        raise ConfigError(split[0], given_text, f"a batch that is a multiple of {ranks}", f"write {split[0]}: false")
    return Batches(split[0] if split and splits else None, steps[0] if steps else None, number)
