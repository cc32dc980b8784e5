"""Precision modes: one row of dtypes per mode, in the field's short names (fp32, bf16, fp16)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from lit_fsdp.errors import ConfigError

PrecisionMode = Literal["mixed", "auto", "low_precision", "fp32", "fp16_mixed", "fp8"]
DtypeName = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True)
class DtypeRow:
    """The dtypes a mode promises, checked against the live run."""

    param: DtypeName
    """Parameters and optimizer moments at rest."""
    compute: DtypeName
    """All-gathered parameters and activations in forward and backward."""
    reduce: DtypeName
    """Gradients while they are summed over ranks."""


_ROWS: dict[PrecisionMode, DtypeRow] = {
    "auto": DtypeRow("fp32", "bf16", "fp32"),  # until the devices are known: what it may be at most
    "mixed": DtypeRow("fp32", "bf16", "fp32"),
    "low_precision": DtypeRow("bf16", "bf16", "bf16"),
    "fp32": DtypeRow("fp32", "fp32", "fp32"),
    "fp16_mixed": DtypeRow("fp32", "fp16", "fp32"),
    "fp8": DtypeRow("fp32", "bf16", "fp32"),  # linear layers multiply in fp8, all else is as in mixed
}


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """A precision mode, parts of which may be overridden."""

    mode: PrecisionMode = "mixed"
    """mixed: fp32 weights, bf16 compute; auto: mixed where every device has bf16 instructions, else fp32;
    low_precision: bf16 throughout; fp16_mixed: scaled; fp8: Hopper GPUs."""
    reduce_dtype: DtypeName | None = None
    """Dtype of gradients while they are summed over ranks; default: the mode's (mixed reduces in fp32)."""
    output_dtype: DtypeName | None = None
    """Dtype that the model's floating-point outputs (logits) are cast to; default: as computed."""
    buffer_dtype: DtypeName | None = None
    """Dtype that floating-point buffers are cast to once; default: as the model made them."""
    keep_norms_fp32: bool = False
    """Normalisation layers keep fp32 weights and inputs in the forward pass, as FSDP units of their own."""
    fp8_skip: list[str] | None = None
    """With fp8: linear layers, by part of their path, that stay in bf16; default: lm_head."""

    def __post_init__(self) -> None:
        if self.fp8_skip is not None and self.mode != "fp8":
            raise ConfigError("fp8_skip", f"{self.fp8_skip} with mode {self.mode}", "only with mode: fp8", "drop it")
        if self.keep_norms_fp32 and self.mode in ("low_precision", "fp32"):
            raise ConfigError(
                "keep_norms_fp32",
                f"true with mode {self.mode}, which keeps all weights in {_ROWS[self.mode].param}",
                "mixed, fp16_mixed or fp8",
                "drop keep_norms_fp32, or set mode: mixed",
            )
        allowed = {"fp32", _ROWS[self.mode].compute} if self.mode != "fp32" else {"fp32", "bf16", "fp16"}
        if self.reduce_dtype is not None and self.reduce_dtype not in allowed:
            raise ConfigError(
                "reduce_dtype",
                f"{self.reduce_dtype} with mode {self.mode}",
                " | ".join(sorted(allowed)),
                "drop reduce_dtype, or set reduce_dtype: fp32",
            )

    def on(self, has_bf16: bool) -> PrecisionConfig:
        """What ``auto`` is on devices with or without bf16 instructions; in fp32 norms are so anyway."""
        norms = self.keep_norms_fp32 and has_bf16
        return dataclasses.replace(self, mode="mixed" if has_bf16 else "fp32", keep_norms_fp32=norms)

    @property
    def row(self) -> DtypeRow:
        """The dtypes this choice promises."""
        row = _ROWS[self.mode]
        return DtypeRow(row.param, row.compute, self.reduce_dtype or row.reduce)
