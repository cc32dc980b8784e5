"""One checkpoint: every rank streams its part into a hidden folder, which rank 0 describes and gives its name.

What fails on any rank before that is an error on all, and the folder goes. Nothing is a checkpoint before it has its
manifest, which is written last. The files are those of ``torch.distributed.checkpoint.HuggingFaceStorageReader``, by
which they are loaded, from any number of ranks to any other.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from lit_fsdp.checkpoint import files
from lit_fsdp.checkpoint.files import MANIFEST, FileEntry
from lit_fsdp.checkpoint.manifest import Chunk, Layout, Manifest, TensorSpec, read_manifest
from lit_fsdp.checkpoint.ranks import Ranks
from lit_fsdp.checkpoint.safetensors_file import TensorFile, file_order
from lit_fsdp.errors import CheckpointError
from lit_fsdp.host import tell_job

FULL_FILE = "tensors.safetensors"
FOLDER = "tensors"
STATE = "state.json"
_VERSIONED = ("torch", "lightning", "transformers", "safetensors", "lit_fsdp")


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What this rank brings to a checkpoint; all but the tensors is independent of live objects."""

    folder: Path
    layout: Layout
    specs: Mapping[str, TensorSpec]
    """Whole shape and dtype of every tensor."""
    tensors: Mapping[str, torch.Tensor]
    """Of the sharded layout what this rank writes, of the full one whole tensors or DTensors."""
    chunks: Mapping[str, Chunk]
    """Which part of which tensor this rank writes."""
    rank_state: Any
    in_background: bool = False
    """Whether training goes on beside."""
    state: Any = None
    """As plain JSON, like that of the rank; this and what follows is rank 0's."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """The caller's part of the manifest."""
    files: Mapping[str, bytes] = field(default_factory=dict)


def write(snapshot: Snapshot, ranks: Ranks) -> None:
    """Write one checkpoint, in place of an older one of its name, or raise on every rank and leave that; collective."""
    began, what, folder = time.monotonic(), f"writing {snapshot.folder}", snapshot.folder
    begun = ranks.run(what, lambda: (files.stage(folder) if ranks.is_first else folder, snapshot.rank_state))
    draft, rank_states = begun[0][0], [state for _, state in begun]
    try:
        parts = ranks.run(what, lambda: _write_part(snapshot, draft, rank_states, ranks))
        ranks.run(what, lambda: _commit(snapshot, draft, parts, began) if ranks.is_first else None)
    except BaseException:
        if ranks.is_first:
            files.discard(draft)
        raise


Part = tuple[dict[str, FileEntry], Mapping[str, Chunk]]


def _write_part(snapshot: Snapshot, draft: Path, rank_states: Sequence[Any], ranks: Ranks) -> Part:
    """Write and sync this rank's files."""
    chunks, found = snapshot.chunks, dict[str, FileEntry]()
    if not draft.is_dir() and (ranks.is_first or snapshot.layout == "sharded"):
        raise CheckpointError(f"{draft} is not visible here; put the run folder on a file system all nodes share")
    specs = {name: TensorSpec(snapshot.specs[name].dtype, chunk.sizes) for name, chunk in chunks.items()}

    def write_tensors(tensors: Named) -> None:
        file_name = _file_name(snapshot.layout, ranks)
        # what torch's own HuggingFaceStorageReader looks for
        sharding = json.dumps({name: {"saved_offsets": chunk.offsets} for name, chunk in chunks.items()})
        metadata = {"format": "pt", "DCP_SHARDING_INFO": sharding}
        with TensorFile(draft / file_name, specs, metadata, at_once=not snapshot.in_background) as file:
            for name, tensor in tensors:
                file.append(name, tensor)
        found[file_name] = file.entry

    if snapshot.layout == "full":
        gather_whole(snapshot.tensors, snapshot.specs, write_tensors if specs else None)
    elif specs:
        write_tensors((name, snapshot.tensors[name]) for name in file_order(specs))
    if ranks.is_first:
        state = json.dumps({"state": snapshot.state, "ranks": rank_states}, allow_nan=False)
        for name, content in {STATE: state.encode(), **snapshot.files}.items():
            found[name] = files.write_bytes(draft / name, content)
    return found, chunks


def _commit(snapshot: Snapshot, draft: Path, parts: Sequence[Part], began: float) -> None:
    """Write the manifest and make the folder visible, on rank 0 after all ranks have written."""
    extra = dict(snapshot.extra)
    manifest = Manifest(
        folder=snapshot.folder,
        layout=snapshot.layout,
        global_step=extra.pop("global_step"),
        metrics={},
        world_size=len(parts),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        versions=versions(),
        tensors=snapshot.specs,
        chunks={name: tuple(own[name] for _, own in parts if name in own) for name in snapshot.specs},
        files=dict(sorted(entry for found, _ in parts for entry in found.items())),
        extra={**extra, "save_seconds": round(time.monotonic() - began, 3)},  # all ranks' files are synced
    )
    files.write_bytes(draft / MANIFEST, manifest.dumps())
    read_manifest(draft)  # what nobody could read is not published
    files.publish(draft, snapshot.folder)
    tell_job("saved")


Named = Iterator[tuple[str, torch.Tensor]]


def gather_whole(
    tensors: Mapping[str, torch.Tensor], specs: Mapping[str, TensorSpec], take: Callable[[Named], None] | None
) -> None:
    """Give ``take`` whole tensors, made one after the other in :func:`file_order`; collective with DTensors.

    ``take`` is None on ranks that only help to gather. Its failure must not leave these waiting in a collective, so the
    rest is gathered and dropped.
    """
    named = ((name, tensors[name]) for name in file_order(specs) if name in tensors)
    wholes = ((name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor) for name, tensor in named)
    try:
        if take is not None:
            take(wholes)
    finally:
        for _ in wholes:
            pass


def make_room(tensors: Mapping[str, torch.Tensor]) -> None:
    """Fail now, before other ranks wait for this one in :func:`gather_whole`, where the largest tensor has no room."""
    largest = max((t for t in tensors.values() if isinstance(t, DTensor)), key=lambda t: t.nbytes, default=None)
    if largest is not None:
        torch.empty(largest.nbytes, dtype=torch.uint8, device=largest.device)  # and given back at once


def parts_of(
    tensors: Mapping[str, torch.Tensor], layout: Layout, ranks: Ranks
) -> tuple[Mapping[str, torch.Tensor], dict[str, Chunk]]:
    """What this rank brings of tensors and DTensors, and which part of each it writes; empty parts are left out.

    What several ranks hold alike is written by one of them, in turn from the largest tensor on.
    """
    file = _file_name(layout, ranks)
    if layout == "full":
        return tensors, {n: Chunk(file, (0,) * t.dim(), tuple(t.shape)) for n, t in tensors.items() if ranks.is_first}
    parts: dict[str, torch.Tensor] = {}
    chunks: dict[str, Chunk] = {}
    for turn, name in enumerate(sorted(tensors, key=lambda name: (-tensors[name].nbytes, name))):
        tensor = tensors[name]
        local, offsets = tensor, (0,) * tensor.dim()
        is_mine = turn % ranks.size == ranks.rank
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            places = zip(tensor.placements, mesh.shape, mesh.get_coordinate() or (), strict=False)
            is_mine = all(turn % size == place for placement, size, place in places if placement.is_replicate())
            local, offsets = tensor.to_local(), tuple(tensor.__create_chunk_list__()[0].offsets)
        if is_mine and (local.numel() or not tensor.numel()):
            parts[name], chunks[name] = local.detach(), Chunk(file, offsets, tuple(local.shape))
    return parts, chunks


def _file_name(layout: Layout, ranks: Ranks) -> str:
    return FULL_FILE if layout == "full" else f"{FOLDER}/rank-{ranks.rank:05d}.safetensors"


def versions() -> dict[str, str]:
    """Of python and the packages that a run rests on."""
    found = {"python": platform.python_version()}
    for package in _VERSIONED:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
