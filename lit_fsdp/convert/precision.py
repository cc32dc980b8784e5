"""Dtypes of the three libraries in the words of the recipe."""

from __future__ import annotations

from typing import Any

from lit_fsdp.convert.result import Conversion
from lit_fsdp.errors import ConfigError

_MODES = {"bf16": "mixed", "fp16": "fp16_mixed"}
_DTYPES = {
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bf16"),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16", "torch.half"), "fp16"),
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32", "torch.float"), "fp32"),
}


def dtype_of(key: str, value: Any) -> str:
    """The short name of a dtype, also from ``torch.bfloat16`` and the like."""
    name = _DTYPES.get(str(value).strip().lower())
    if name is None:
        raise ConfigError(key, repr(value), "fp32 | bf16 | fp16", f"write {key}: bf16")
    return name


def accelerate_precision(word: str, fsdp_version: int | None) -> str | dict[str, str]:
    """What Accelerate makes of ``mixed_precision``: fp32 weights, and under FSDP the word also for reductions.

    Args:
        word: ``no``, ``bf16`` or ``fp16``.
        fsdp_version: 1 casts buffers too, 2 does not; ``None`` is DDP or one device, where gradients stay fp32.
    """
    if word == "no":
        return "fp32"
    if fsdp_version is None:
        return _MODES[word]
    row = {"mode": _MODES[word], "reduce_dtype": word}
    return {**row, "buffer_dtype": word} if fsdp_version == 1 else row


def put_precision(conversion: Conversion, key: str, word: str, fsdp_version: int | None) -> None:
    """Convert ``mixed_precision`` (or Transformers' ``bf16`` and ``fp16``)."""
    if word == "fp8":
        conversion.keep(
            key,
            "precision",
            "fp8",
            "Accelerate's fp8 backends choose other layers and scales than torchao's here",
            differs=True,
        )
        return
    notes = {
        "no": "if the script loads its weights in fp32; if in bf16, write low_precision",
        "bf16": "fp32 weights, bf16 compute",
        "fp16": "fp32 weights, fp16 compute, scaled loss",
    }
    reduced = f", gradients summed in {word} as Accelerate does" if fsdp_version and word != "no" else ""
    conversion.keep(key, "precision", accelerate_precision(word, fsdp_version), notes[word] + reduced)


def put_policy(conversion: Conversion, key: str, value: Any, fsdp_version: int) -> None:
    """Convert ``mixed_precision_policy``: one dtype for all, or a mapping of param, reduce, buffer and output dtype.

    ``accelerate launch`` does not hand it on, so it is a difference wherever it disagrees with ``mixed_precision``.
    """
    names = ("param_dtype", "reduce_dtype", "buffer_dtype" if fsdp_version == 1 else "output_dtype")
    given = value if isinstance(value, dict) else dict.fromkeys(names, value)
    if unknown := [name for name in given if name not in names]:
        raise ConfigError(f"{key}.{unknown[0]}", repr(given[unknown[0]]), " | ".join(names), "drop it")
    if missing := [name for name in names[:2] if given.get(name) is None]:
        raise ConfigError(f"{key}.{missing[0]}", "null", "fp32 | bf16 | fp16", f"write {missing[0]}: bf16")
    dtypes = {name: dtype_of(f"{key}.{name}", given[name]) for name in names if given.get(name) is not None}
    param = dtypes.pop("param_dtype")
    found: str | dict[str, str] = {"mode": _MODES.get(param, "fp32"), **dtypes}
    if fsdp_version == 2 and isinstance(found, dict) and found.get("output_dtype") == param:
        found.pop("output_dtype")  # what is computed in it already
    if param == "fp32" and set(dtypes.values()) == {"fp32"}:
        found = "fp32"
    before = conversion.get("precision")
    agrees = found == before
    note = "agrees with mixed_precision" if agrees else f"accelerate launch ignores it and trains with {before}"
    conversion.keep(key, "precision", found, note, differs=not agrees)
