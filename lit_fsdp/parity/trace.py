"""What a run comes to after each optimizer step, and how far two runs are apart."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import zip_longest

import torch

_MOST = 2**14
"""Elements kept of a parameter, evenly spread over it, or nearly twice as many; of a miniature that is all."""
Apart = tuple[float | None, float | None, float]
"""Relative differences of two runs in one step: of loss and gradient norm, None where one of them does not tell, and
‖Δ‖ of all weights by how far the first run has moved them from its start; before the first step by ‖w‖."""
TOLERANCES = {"fp32": (1e-5, 1e-4, 1e-3), "fp16": (1e-3, 1e-2, 2e-1), "bf16": (1e-2, 5e-2, 5e-1)}
"""How large they may be, by dtype, the finest first; in fp32 only the order of summation may differ."""


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
    """Two runs beside each other, step by step; step 0 is before the first."""

    dtype: str
    """That decides what is allowed."""
    losses: list[tuple[float | None, float | None]]
    steps: list[Apart]
    first: int | None
    """The first step in which they differ by more than is allowed."""
    largest: float
    """The largest difference in units of what is allowed."""


def compare(one: Trace, other: Trace) -> Comparison:
    """Compare two runs, by the coarsest dtype that one of them computes in, or in which both sum gradients.

    Gradients that only one of them sums in a coarser dtype are a difference to be found.
    """
    order = list(TOLERANCES)
    reduce = min(one.reduce_dtype, other.reduce_dtype, key=order.index)
    dtype = max(one.compute_dtype, other.compute_dtype, reduce, key=order.index)
    losses = list(zip_longest(one.losses, other.losses, fillvalue=math.nan))  # of a step that one has not taken
    norms = list(zip_longest(one.gradient_norms, other.gradient_norms))
    steps = [
        (_relative(*losses[step]), _relative(*norms[step]), _weights_apart(one, other, step))
        for step in range(len(losses))
    ]
    sizes = [_size(step, TOLERANCES[dtype]) for step in steps]
    first = next((number for number, size in enumerate(sizes) if size > 1), None)
    return Comparison(dtype, losses, steps, first, max(sizes))


def _size(step: Apart, allowed: tuple[float, float, float]) -> float:
    pairs = zip(step, allowed, strict=True)
    return max(math.inf if math.isnan(value) else value / most for value, most in pairs if value is not None)


def _relative(one: float | None, other: float | None) -> float | None:
    if one is None or other is None:
        return None
    return 0.0 if one == other else abs(one - other) / max(abs(one), abs(other))


def _weights_apart(one: Trace, other: Trace, step: int) -> float:
    if step >= min(len(one.weights), len(other.weights)) or one.weights[step].keys() != other.weights[step].keys():
        return math.inf  # one of them has ended, or other parameters are trained
    ours, theirs, start = one.weights[step], other.weights[step], one.weights[0]
    apart = sum(float((ours[name] - theirs[name]).double().square().sum()) for name in ours)
    moved = sum(float((ours[name] - start[name] * bool(step)).double().square().sum()) for name in ours)
    return math.sqrt(apart / max(moved, 1e-30))
