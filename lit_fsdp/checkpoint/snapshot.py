"""What one checkpoint consists of, and how a rank takes its part: what training changes later cannot leak in."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lit_fsdp.checkpoint import dcp_files, disk, state_json
from lit_fsdp.checkpoint.manifest import MANIFEST, Layout, TensorSpec, checked_extra
from lit_fsdp.checkpoint.ranks import Ranks
from lit_fsdp.checkpoint.safetensors_file import spec_of
from lit_fsdp.errors import CheckpointError

FULL_FILE = "tensors.safetensors"
STATE = "state"
_RESERVED = (MANIFEST, FULL_FILE, f"{dcp_files.FOLDER}/", f"{STATE}.", "rank-")


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Everything one checkpoint consists of, as this rank sees it."""

    tensors: Mapping[str, torch.Tensor]
    """Tensors (equal on all ranks) and DTensors by name; the same names on every rank."""
    state: Any
    """Non-tensor state, saved by rank 0; see :func:`lit_fsdp.checkpoint.state_json.encode`."""
    manifest: Mapping[str, Any]
    """``global_step``, perhaps ``metrics``, and free JSON keys; rank 0's is written."""
    layout: Layout
    """One file per rank (sharded) or one in all (full)."""
    files: Mapping[str, bytes | Path] = field(default_factory=dict)
    """Small files by path inside the checkpoint (content, or a file to copy); rank 0's are written."""
    rank_state: Any = None
    """State of this rank alone, e.g. its random generators."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """What this rank will write; all but the tensors is independent of the live objects it was taken from."""

    tensors: Mapping[str, torch.Tensor]
    """As in the snapshot, or copies; may be empty on ranks that write none of them (``full``)."""
    specs: Mapping[str, TensorSpec]
    """Whole shape and dtype of every tensor."""
    layout: Layout
    """``sharded`` or ``full``."""
    states: Mapping[str, tuple[str, dict[str, torch.Tensor]]]
    """JSON text and tensors by name of the file."""
    extra: Mapping[str, Any]
    """The caller's part of the manifest; empty but on rank 0."""
    files: Mapping[str, bytes | Path]
    """Extra files; empty but on rank 0."""


def take(snapshot: Snapshot, rank: int) -> Part:
    """This rank's part of ``snapshot``; everything that can be refused is refused here.

    Raises:
        CheckpointError: A layout, tensor, state, manifest or file name that cannot be saved.
    """
    if snapshot.layout not in ("sharded", "full"):
        raise CheckpointError(f"layout: got {snapshot.layout!r}, allowed: sharded, full")
    for name, tensor in snapshot.tensors.items():
        if not isinstance(tensor, torch.Tensor) or tensor.is_meta:
            kind = "on the meta device" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise CheckpointError(f"{name}: {kind}, but only tensors with data can be saved as tensors")
    states: dict[str, tuple[str, dict[str, torch.Tensor]]] = {}
    if snapshot.rank_state is not None:
        states[f"rank-{rank:05d}"] = state_json.encode(snapshot.rank_state)
    extra: dict[str, Any] = {}
    if rank == 0:
        states[STATE] = state_json.encode(snapshot.state)
        extra = checked_extra(snapshot.manifest)
        for name in snapshot.files:
            if disk.checked_name(name).startswith(_RESERVED):
                raise CheckpointError(f"files: {name} is a name of the checkpoint's own; use another one")
    return Part(
        tensors=snapshot.tensors,
        specs={name: spec_of(tensor) for name, tensor in snapshot.tensors.items()},
        layout=snapshot.layout,
        states=states,
        extra=extra,
        files=snapshot.files if rank == 0 else {},
    )


def agreed(folder: Path, part: Callable[[], Part], ranks: Ranks) -> Part:
    """This rank's part, once every rank could take its own and all hold the same tensors; collective.

    Raises:
        CheckpointError: On every rank: one could not, or names, shapes, dtypes or the folder differ.
    """
    taken: list[Part] = []

    def digest() -> str:
        taken.append(part())
        specs = sorted(taken[0].specs.items(), key=str)
        return hashlib.sha256(repr((str(folder), taken[0].layout, specs)).encode()).hexdigest()

    if len(set(ranks.run(f"checking what to save at {folder}", digest))) > 1:
        raise CheckpointError(f"{folder}: the ranks do not hold the same tensor names, shapes and dtypes to save")
    return taken[0]
