"""What an import reads: the tensors of another tool's checkpoint, each read only when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lit_fsdp.checkpoint.manifest import TensorSpec
from lit_fsdp.checkpoint.safetensors_file import spec_of
from lit_fsdp.errors import CheckpointError


@dataclass(frozen=True)
class SourceTensor:
    """One whole tensor of the source."""

    spec: TensorSpec
    """Its dtype and shape, known without reading it."""
    read: Callable[[], torch.Tensor]
    """Reads it to the CPU."""


@dataclass(frozen=True)
class Moments:
    """The state of the source's first optimizer."""

    state: Mapping[str | int, Mapping[str, SourceTensor]]
    """Tensors by parameter (its name, or its number in ``groups``) and key (``exp_avg``)."""
    groups: Sequence[Sequence[str | int]]
    """The parameters of each parameter group, in the source's order."""
    settings: Sequence[Mapping[str, Any]] = ()
    """Learning rate, betas and so on of each group, as far as they are known."""
    names: Sequence[str] | None = None
    """Names of the parameters in the order of their numbers, where the source says so."""


@dataclass(frozen=True)
class Source:
    """Another tool's checkpoint, opened."""

    kind: str
    """What it is, in words."""
    weights: Mapping[str, SourceTensor]
    """Parameters and persistent buffers by the source's own names, in its order."""
    moments: Moments | None
    """State of its optimizer."""
    step: int | None
    """Optimizer steps it had done; None if it does not say."""
    step_from: str = ""
    """Where ``step`` stands."""
    notes: Sequence[str] = field(default_factory=tuple)
    """What a reader should know of it, e.g. why there is no optimizer."""


def from_memory(name: str, value: Any) -> SourceTensor:
    """A tensor that is there already, perhaps mapped from a file.

    Raises:
        CheckpointError: No plain dense tensor with data: a shard of one rank, a quantized or a meta tensor.
    """
    plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
    if not plain or value.is_quantized or value.is_meta:
        kind = type(value).__name__
        raise CheckpointError(
            f"{name}: a {kind} and no whole plain tensor; save a full or a DCP-sharded checkpoint and import that"
        )
    return SourceTensor(spec_of(value), lambda: value.detach())
