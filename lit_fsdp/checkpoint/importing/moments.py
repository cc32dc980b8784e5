"""The source's optimizer state under our names, or the reason why it cannot be taken over.

Plain torch numbers parameters and does not say which is which; they are told apart by the order of the source's own
parameter groups and by shape, and where that leaves a choice nothing is taken over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from lit_fsdp.checkpoint.importing.names import Matched, Target, cleaned
from lit_fsdp.checkpoint.importing.source import Moments, Source, SourceTensor
from lit_fsdp.checkpoint.manifest import TensorSpec

KEYS = ("exp_avg", "exp_avg_sq")
STEP = "step"
_STEP_SPEC = TensorSpec("float32", ())


@dataclass(frozen=True)
class Taken:
    """What becomes of the source's optimizer."""

    state: Mapping[str, Mapping[str, SourceTensor]]
    """By parameter of the target and key; empty if it is dropped."""
    num_dropped: int
    """Parameters whose state is in the source and not taken over."""
    num_fresh: int
    """Parameters that begin with zero moments, because the source's optimizer never stepped them."""
    why: str
    """How parameters were told apart, or why the state is dropped."""


def take_moments(source: Source, matched: Matched, target: Target) -> Taken:
    """The source's AdamW state by parameter of ``target``."""
    moments = source.moments
    if moments is None:
        return Taken({}, 0, 0, "the source has none")
    total = len(moments.state)
    named, how = _named(moments, source, matched, target)
    if not any(named.values()):
        return Taken({}, total, 0, how)
    state: dict[str, Mapping[str, SourceTensor]] = {}
    for name, entry in named.items():
        problem = _problem(name, entry, matched) if entry else None
        if problem:
            return Taken({}, total, 0, problem)
        state[name] = entry or _zeros(matched.weights[name].spec)
    fresh = sum(not entry for entry in named.values())
    return Taken(state, total - len(named) + fresh, fresh, how)


def common_step(taken: Taken) -> int | None:
    """The number of steps the optimizer has counted, if all parameters that were ever stepped agree."""
    counts = {int(entry[STEP].read()) for entry in taken.state.values()} - {0}
    return counts.pop() if len(counts) == 1 else None


def _named(
    moments: Moments, source: Source, matched: Matched, target: Target
) -> tuple[dict[str, Mapping[str, SourceTensor]], str]:
    """State by name in the target, and how it was found out; nothing and the reason where it was not.

    A parameter that the optimizer lists and never stepped has an empty state; one it does not list was frozen.
    """
    listed = [param for group in moments.groups for param in group]
    by_name = {name: to for name, to in _names(matched, target).items() if to in target.parameters}
    if all(isinstance(param, str) for param in moments.state):
        found = {}
        for param in dict.fromkeys([*listed, *moments.state]):
            name = by_name.get(cleaned(str(param), matched.prefix))
            if name is not None:
                found[name] = moments.state.get(param, {})
        lost = [str(p) for p in moments.state if cleaned(str(p), matched.prefix) not in by_name]
        if lost and not matched.surplus:
            return {}, f"its parameters have other names than its weights: {', '.join(lost[:4])}"
        return found, "by name"
    order = _order(moments, listed, source, matched, target)
    if isinstance(order, str):
        return {}, order
    chosen = {by: moments.state.get(n, {}) for n, by in order.items() if by in target.parameters}
    return chosen, "by name" if moments.names else "by the order of its parameter groups, and all shapes agree"


def _names(matched: Matched, target: Target) -> dict[str, str]:
    """Names in the target by every name, tied or not, that a source may use without its prefix."""
    return {**{name: name for name in target.shapes}, **target.ties}


def _order(
    moments: Moments, listed: Sequence[str | int], source: Source, matched: Matched, target: Target
) -> dict[str | int, str] | str:
    """Name in the target (or empty) of every number, or why it cannot be told."""
    if moments.names is not None and len(moments.names) == len(listed):
        every = _names(matched, target)
        return {n: every.get(cleaned(name, matched.prefix), "") for n, name in zip(listed, moments.names, strict=True)}
    shapes = {n: entry["exp_avg"].spec.shape for n, entry in moments.state.items() if "exp_avg" in entry}
    model: list[tuple[str, tuple[int, ...]]] = []  # name in the target and shape, in the source's order
    for original, tensor in source.weights.items():
        name = matched.source_names.get(original, "")
        is_parameter = name in target.parameters if name else original in matched.surplus
        if is_parameter and name not in [known for known, _ in model if known]:
            model.append((name, tensor.spec.shape))
    if len(listed) != len(model) and matched.surplus:  # what is surplus may be no parameter
        model = [(name, shape) for name, shape in model if name]
    if len(listed) != len(model):
        return (
            f"it numbers {len(listed)} parameters and the model has {len(model)}, so it cannot be told which is which"
        )
    if set(listed) != set(range(len(listed))):
        return "its parameters are not numbered from 0"
    candidates = [
        found for found in (_in_model_order(listed, model, shapes), _by_shape(moments, model, shapes)) if found
    ]
    if not candidates:
        return "the shapes of its state do not fit the order of the model's parameters"
    if any(other != candidates[0] for other in candidates):
        return "its parameter groups hold equal shapes, so it cannot be told which state is whose"
    return candidates[0]


def _in_model_order(
    listed: Sequence[str | int],
    model: Sequence[tuple[str, tuple[int, ...]]],
    shapes: Mapping[str | int, tuple[int, ...]],
) -> dict[str | int, str] | None:
    """Number n is the n-th parameter of the model: one group, or FSDP's numbering for several."""
    if any(shapes.get(n, shape) != shape for n, (_, shape) in enumerate(model)):
        return None
    return {n: name for n, (name, _) in enumerate(model)} if len(listed) == len(model) else None


def _by_shape(
    moments: Moments, model: Sequence[tuple[str, tuple[int, ...]]], shapes: Mapping[str | int, tuple[int, ...]]
) -> dict[str | int, str] | None:
    """Groups without a shape in common (matrices, then vectors), each in the order of the model."""
    listed = [param for group in moments.groups for param in group]
    if len(moments.groups) < 2 or listed != list(range(len(listed))) or len(shapes) < len(listed):
        return None
    kinds = [{shapes[param] for param in group} for group in moments.groups]
    if sum(len(kind) for kind in kinds) != len(set().union(*kinds)):
        return None
    found: dict[str | int, str] = {}
    for group, kind in zip(moments.groups, kinds, strict=True):
        members = [(name, shape) for name, shape in model if shape in kind]
        if [shape for _, shape in members] != [shapes[param] for param in group]:
            return None
        found.update({param: name for param, (name, _) in zip(group, members, strict=True)})
    return found


def _problem(name: str, entry: Mapping[str, SourceTensor], matched: Matched) -> str | None:
    if set(entry) != {*KEYS, STEP}:
        return (
            f"it is not AdamW's: {name} has {', '.join(sorted(entry)) or 'nothing'}, not exp_avg, exp_avg_sq and step"
        )
    shape = matched.weights[name].spec.shape
    for key in KEYS:
        if entry[key].spec.shape != shape:
            return f"{key} of {name} has the shape {list(entry[key].spec.shape)}, its weight {list(shape)}"
    if torch.Size(entry[STEP].spec.shape).numel() != 1:
        return f"step of {name} is not one number"
    return None


def _zeros(spec: TensorSpec) -> dict[str, SourceTensor]:
    blank = SourceTensor(spec, lambda: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)))
    make_step: Callable[[], torch.Tensor] = lambda: torch.zeros(())  # noqa: E731
    return {"exp_avg": blank, "exp_avg_sq": blank, STEP: SourceTensor(_STEP_SPEC, make_step)}
