"""Record a run after each optimizer step, and compute the differences between two runs."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import zip_longest

import torch

_MOST = 2**14
"""Evenly spaced elements kept per parameter (at most twice as many); for a miniature, all elements."""
Apart = tuple[float | None, float | None, float]
"""Relative differences of two runs in one step: of loss and gradient norm (None if one run lacks it), and ‖Δ‖ of all
weights relative to their change in the first run since its start; before the first step relative to ‖w‖."""
TOLERANCES = {"fp32": (1e-5, 1e-4, 1e-3), "fp16": (1e-3, 1e-2, 2e-1), "bf16": (1e-2, 5e-2, 5e-1)}
"""Tolerances of these differences by dtype, finest first; in fp32 only the summation order may differ."""


@dataclass
class Trace:
    """Record of a run before its first step and after each step."""

    compute_dtype: str
    reduce_dtype: str
    losses: list[float | None] = field(default_factory=list)
    gradient_norms: list[float | None] = field(default_factory=list)
    weights: list[dict[str, torch.Tensor]] = field(default_factory=list)

    def add(self, loss: float | None, gradient_norm: float | None, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Record loss and gradient norm of a step (None if unknown), and the full weights after it by name."""
        self.losses.append(loss)
        self.gradient_norms.append(gradient_norm)
        flat = ((name, weight.detach().flatten()) for name, weight in weights)
        kept = {name: w[:: max(1, len(w) // _MOST)].to("cpu", torch.float32, copy=True) for name, w in flat}
        self.weights.append(kept)


@dataclass(frozen=True)
class Comparison:
    """Comparison of two runs by step; step 0 is before the first step."""

    dtype: str
    """Dtype that determines the tolerances."""
    losses: list[tuple[float | None, float | None]]
    steps: list[Apart]
    first: int | None
    """First step whose differences exceed the tolerances."""
    largest: float
    """Largest difference relative to its tolerance."""


def compare(one: Trace, other: Trace) -> Comparison:
    """Compare two runs with tolerances of the coarsest dtype in which either computes, or both reduce gradients.

    If only one run reduces gradients in a coarser dtype, this should show as a difference.
    """
    order = list(TOLERANCES)
    reduce = min(one.reduce_dtype, other.reduce_dtype, key=order.index)
    dtype = max(one.compute_dtype, other.compute_dtype, reduce, key=order.index)
    losses = list(zip_longest(one.losses, other.losses, fillvalue=math.nan))  # nan: missing step of one run
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
        return math.inf  # a run has ended, or trained parameters differ
    ours, theirs, start = one.weights[step], other.weights[step], one.weights[0]
    apart = sum(float((ours[name] - theirs[name]).double().square().sum()) for name in ours)
    moved = sum(float((ours[name] - start[name] * bool(step)).double().square().sum()) for name in ours)
    return math.sqrt(apart / max(moved, 1e-30))
