"""Precision modes: one row of dtypes per mode, in the field's short names (fp32, bf16)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PrecisionMode = Literal["mixed", "low_precision", "fp32"]
DtypeName = Literal["fp32", "bf16"]


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
    "mixed": DtypeRow("fp32", "bf16", "fp32"),
    "low_precision": DtypeRow("bf16", "bf16", "bf16"),
    "fp32": DtypeRow("fp32", "fp32", "fp32"),
}


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """A precision mode, parts of which may be overridden."""

    mode: PrecisionMode = "mixed"
    """mixed keeps fp32 weights and computes in bf16, low_precision keeps bf16 throughout, fp32 never rounds."""
    reduce_dtype: DtypeName | None = None
    """Dtype of gradients while they are summed over ranks; default: the mode's (mixed reduces in fp32)."""

    @property
    def row(self) -> DtypeRow:
        """The dtypes this choice promises."""
        row = _ROWS[self.mode]
        return DtypeRow(row.param, row.compute, self.reduce_dtype or row.reduce)
