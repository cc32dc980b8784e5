"""What a run leaves of each optimizer step for a comparison, and how far two runs are apart."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import save_file

from lit_fsdp.config.strategy import DtypeRow

_MOST = 2**16
"""Elements kept of a parameter, evenly spread over it, or nearly twice as many; of a miniature that is all."""


class Apart(NamedTuple):
    """Relative differences of two runs in one step, or how large they may be."""

    loss: float
    grad_norm: float
    weights: float
    """‖Δ‖ of all weights by how far the first run has moved them from its start; of step 0 by ‖w‖."""


TOLERANCES = {"fp32": Apart(1e-5, 1e-4, 1e-3), "fp16": Apart(1e-3, 1e-2, 1e-1), "bf16": Apart(1e-2, 5e-2, 5e-1)}
"""By the coarsest dtype of two runs, finest first; in fp32 only the order of summation differs."""


def sampled(weight: torch.Tensor) -> np.ndarray:
    """The elements of a whole parameter that are compared, fp32 of one dimension."""
    flat = weight.detach().flatten()
    return np.asarray(flat[:: max(1, len(flat) // _MOST)].to("cpu", torch.float32, copy=True).numpy())


def write_step(
    folder: Path, step: int, loss: float, grad_norm: float | None, weights: dict[str, np.ndarray], dtypes: DtypeRow
) -> None:
    """Write down what a step (0: before the first) has come to.

    Args:
        folder: Of the run.
        step: Optimizer steps taken.
        loss: Of the global batch, before the step.
        grad_norm: Of all gradients, before clipping; None where it is not known.
        weights: What is trained, by its name; see :func:`sampled`.
        dtypes: Of the run.
    """
    numbers = {"loss": loss, "grad_norm": grad_norm, "dtypes": [dtypes.compute, dtypes.reduce]}
    save_file(weights, _file(folder, step), {"numbers": json.dumps(numbers)})


def tolerance(one: Path, other: Path) -> tuple[str, Apart]:
    """The coarsest dtype that one of two runs computes in, or both sum gradients in, and what it may make differ.

    Gradients that only one of them sums in a coarser dtype than it computes in are a difference to be found.
    """
    order = list(TOLERANCES)
    compute, reduce = zip(*(_numbers(_file(folder, 0))["dtypes"] for folder in (one, other)), strict=True)
    dtype = max(*compute, min(reduce, key=order.index), key=order.index)
    return dtype, TOLERANCES[dtype]


@dataclass(frozen=True)
class StepDifference:
    """How far two runs are apart in one step."""

    step: int
    """From 1; 0 is before the first."""
    losses: tuple[float, float]
    """Of the two runs."""
    apart: Apart
    parameter: str
    """The one that the weights differ most in."""

    def beyond(self, allowed: Apart) -> list[str]:
        """What differs by more than is allowed, in words."""
        pairs = zip(self.apart._fields, self.apart, allowed, strict=True)
        return [f"{name.replace('_', ' ')} {found:.1e}" for name, found, limit in pairs if not found <= limit]


def differences(one: Path, other: Path) -> list[StepDifference]:
    """Compare two runs step by step, as far as both have gone; step 0 shows whether they begin alike."""
    start, found = _weights(_file(one, 0)), []
    for step in range(len(list(one.glob("step-*")))):
        files = _file(one, step), _file(other, step)
        if not files[1].is_file():
            break
        ours, theirs = map(_weights, files)
        numbers = [_numbers(file) for file in files]
        if ours.keys() == theirs.keys():
            squared = {name: _squared(ours[name] - theirs[name]) for name in ours}
        else:  # other parameters are trained
            squared = dict.fromkeys(ours.keys() ^ theirs.keys(), math.inf)
        moved = sum(_squared(ours[name] - start[name] if step else start[name]) for name in ours)
        found.append(
            StepDifference(
                step,
                (numbers[0]["loss"], numbers[1]["loss"]),
                Apart(
                    *(_relative(*(one[name] for one in numbers)) for name in ("loss", "grad_norm")),
                    math.sqrt(sum(squared.values()) / max(moved, 1e-30)),
                ),
                max(squared, key=lambda name: squared[name]),
            )
        )
    return found


def _file(folder: Path, step: int) -> Path:
    return folder / f"step-{step:04d}.safetensors"


def _numbers(file: Path) -> dict[str, Any]:
    with safe_open(file, "numpy") as opened:
        return dict(json.loads(opened.metadata()["numbers"]))


def _weights(file: Path) -> dict[str, np.ndarray]:
    with safe_open(file, "numpy") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)


def _squared(values: np.ndarray) -> float:
    return float(np.square(values, dtype=np.float64).sum())


def _relative(one: float | None, other: float | None) -> float:
    if one is None or other is None or one == other:
        return 0.0
    apart = abs(one - other) / max(abs(one), abs(other))
    return math.inf if math.isnan(apart) else apart
