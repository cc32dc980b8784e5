"""What a run comes to after each optimizer step, and how far two runs are apart."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

_MOST = 2**14
"""Elements kept of a parameter, evenly spread over it, or nearly twice as many; of a miniature that is all."""


class Apart(NamedTuple):
    """Relative differences of two runs in one step, or how large they may be."""

    loss: float | None
    """None where one of them does not tell; so also of the norm."""
    gradient_norm: float | None
    weights: float
    """‖Δ‖ of all weights by how far the first run has moved them from its start; before the first step by ‖w‖."""


TOLERANCES = {"fp32": Apart(1e-5, 1e-4, 1e-3), "fp16": Apart(1e-3, 1e-2, 2e-1), "bf16": Apart(1e-2, 5e-2, 5e-1)}
"""By dtype, the finest first; in fp32 only the order of summation may differ."""


@dataclass
class Trace:
    """What a run has come to before its first step and after each."""

    compute_dtype: str
    reduce_dtype: str
    losses: list[float | None] = field(default_factory=list)
    gradient_norms: list[float | None] = field(default_factory=list)
    weights: list[dict[str, torch.Tensor]] = field(default_factory=list)

    def add(self, loss: float | None, gradient_norm: float | None, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Note loss and gradient norm of a step, None where not known, and the weights after it, whole, by name."""
        self.losses.append(loss)
        self.gradient_norms.append(gradient_norm)
        flat = ((name, weight.detach().flatten()) for name, weight in weights)
        kept = {name: w[:: max(1, len(w) // _MOST)].to("cpu", torch.float32, copy=True) for name, w in flat}
        self.weights.append(kept)


@dataclass(frozen=True)
class Comparison:
    """Two runs beside each other."""

    dtype: str
    """That decides what is allowed."""
    allowed: Apart
    losses: list[tuple[float | None, float | None]]
    """Of both; step 0 is before the first. Of a step that one of them has not taken, its loss is nan."""
    steps: list[Apart]

    @property
    def first(self) -> int | None:
        """The first step in which they differ by more than is allowed."""
        return next((step for step in range(len(self.steps)) if self.beyond(step)), None)

    def beyond(self, step: int) -> str:
        """What differs in a step by more than is allowed, in words."""
        found = [
            (name.replace("_", " "), value)
            for name, value, most in zip(Apart._fields, self.steps[step], self.allowed, strict=True)
            if value is not None and most is not None and not value <= most
        ]
        return ", ".join(f"{name} {value:.1e}" for name, value in found)

    @property
    def untold(self) -> list[str]:
        """What could not be compared."""
        taken = self.steps[1:2]
        return [name.replace("_", " ") for step in taken for name in Apart._fields if getattr(step, name) is None]

    @property
    def size(self) -> float:
        """The largest difference in units of what is allowed."""
        pairs = [pair for step in self.steps for pair in zip(step, self.allowed, strict=True)]
        return max(value / most for value, most in pairs if value is not None and most is not None)


def compare(one: Trace, other: Trace) -> Comparison:
    """Compare two runs, by the coarsest dtype that one of them computes in, or in which both sum gradients.

    Gradients that only one of them sums in a coarser dtype are a difference to be found.
    """
    order = list(TOLERANCES)
    reduce = min(one.reduce_dtype, other.reduce_dtype, key=order.index)
    dtype = max(one.compute_dtype, other.compute_dtype, reduce, key=order.index)
    losses = list(zip(one.losses, other.losses, strict=False))
    norms = list(zip(one.gradient_norms, other.gradient_norms, strict=False))
    steps = [
        Apart(_relative(*losses[step]), _relative(*norms[step]), _weights_apart(one, other, step))
        for step in range(len(losses))
    ]
    if len(one.losses) != len(other.losses):  # one of them ended early
        longer = one.losses[len(losses) :] or other.losses[len(losses) :]
        losses.append((longer[0], math.nan) if len(one.losses) > len(other.losses) else (math.nan, longer[0]))
        steps.append(Apart(math.inf, None, math.inf))
    return Comparison(dtype, TOLERANCES[dtype], losses, steps)


def _relative(one: float | None, other: float | None) -> float | None:
    if one is None or other is None:
        return None
    if one == other:
        return 0.0
    apart = abs(one - other) / max(abs(one), abs(other))
    return math.inf if math.isnan(apart) else apart


def _weights_apart(one: Trace, other: Trace, step: int) -> float:
    ours, theirs, start = one.weights[step], other.weights[step], one.weights[0]
    if ours.keys() != theirs.keys():
        return math.inf  # other parameters are trained
    apart = sum(float((ours[name] - theirs[name]).double().square().sum()) for name in ours)
    moved = sum(float((ours[name] - start[name] * bool(step)).double().square().sum()) for name in ours)
    return math.sqrt(apart / max(moved, 1e-30))
