"""Save a checkpoint with ``torch.distributed.checkpoint``: planned jointly, written by all ranks, committed by rank 0.

DCP gathers the errors of all ranks after each phase, and calls ``finish`` on rank 0 only after every rank has written
its part. Therefore ``finish`` writes the manifest, which makes a folder a checkpoint, and then renames the folder.
"""

import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import math
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint import DefaultSavePlanner, HuggingFaceStorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from lit_fsdp.checkpoint import files
from lit_fsdp.checkpoint.files import MANIFEST, FileEntry
from lit_fsdp.checkpoint.manifest import Chunk, Layout, Manifest, TensorSpec
from lit_fsdp.checkpoint.safetensors_file import TensorFile, file_order
from lit_fsdp.checkpoint.state import local_part
from lit_fsdp.errors import CheckpointError
from lit_fsdp.host import tell_job

FULL_FILE = "tensors.safetensors"
FOLDER = "tensors"
STATE = "state.json"
_VERSIONED = ("torch", "lightning", "transformers", "safetensors", "lit_fsdp")


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """This rank's contribution to a checkpoint; everything except the tensors is independent of live objects."""

    folder: Path
    layout: Layout
    specs: Mapping[str, TensorSpec]
    """Full shape and dtype of every tensor."""
    tensors: Mapping[str, torch.Tensor]
    """Sharded layout: the parts that this rank writes; full layout: full tensors or DTensors."""
    chunks: Mapping[str, ChunkStorageMetadata]
    """Part of each tensor that this rank writes."""
    rank_state: Any
    in_background: bool = False
    """Whether training continues meanwhile."""
    state: Any = None
    """Plain JSON, like ``rank_state``; this and the following fields are set on rank 0."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """The caller's part of the manifest."""
    files: Mapping[str, bytes] = field(default_factory=dict)


class Planner(DefaultSavePlanner):
    """Plan the writes of this rank."""

    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__(flatten_state_dict=False)
        self._snapshot = snapshot

    def create_local_plan(self) -> SavePlan:
        """Create one item per part."""
        items = []
        for name, chunk in self._snapshot.chunks.items():
            spec = self._snapshot.specs[name]
            data = TensorWriteData(chunk, _properties(spec), torch.Size(spec.shape))
            items.append(WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return the plans unchanged after checking that their parts cover every tensor; the manifest describes them.

        DCP's check compares each part with all parts of the same start along the longest dim: all of a wide matrix.
        """
        found: dict[str, dict[tuple[int, ...], int]] = {name: {} for name in self._snapshot.specs}
        for item in (item for plan in all_plans for item in plan.items):
            part = cast(TensorWriteData, item.tensor_data).chunk
            found[item.index.fqn][tuple(part.offsets)] = part.sizes.numel()  # parts with the same start count once
        for name, parts in found.items():
            if sum(parts.values()) != math.prod(self._snapshot.specs[name].shape):
                raise CheckpointError(f"{name}: the parts of the ranks do not cover the tensor")
        return all_plans, Metadata({})


class Writer(StorageWriter):
    """Stream this rank's part to a hidden folder; rank 0 also creates the folder and commits the checkpoint."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._draft: Path | None = None
        self._began = time.monotonic()
        self._rank_states: list[Any] = []

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing: a writer is used for one save."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the rank is in the plan."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Attach this rank's state: rank 0 writes the states of all ranks to one file."""
        return dataclasses.replace(plan, storage_data=self._snapshot.rank_state)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Create the hidden folder on rank 0, and send its name to every rank."""
        self._rank_states = [plan.storage_data for plan in plans]
        self._draft = files.stage(self._snapshot.folder)
        return [dataclasses.replace(p, storage_data=(rank, self._draft.name)) for rank, p in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write and sync this rank's files."""
        rank, name = plan.storage_data
        draft = self._snapshot.folder.with_name(name)
        if not draft.is_dir() and (rank == 0 or self._snapshot.layout == "sharded"):
            raise CheckpointError(f"{draft} is not visible here; put the run folder on a shared file system")
        found = self._write_tensors(draft, rank, plan)
        if rank == 0:
            state = json.dumps({"state": self._snapshot.state, "ranks": self._rank_states}, allow_nan=False)
            for name, content in {STATE: state.encode(), **self._snapshot.files}.items():
                found.append(_result(name, files.write_bytes(draft / name, content), {}))
        future: Future[list[WriteResult]] = Future()
        future.set_result(found)
        return future

    def _write_tensors(self, draft: Path, rank: int, plan: SavePlan) -> list[WriteResult]:
        snapshot, found = self._snapshot, list[WriteResult]()
        name = FULL_FILE if snapshot.layout == "full" else f"{FOLDER}/rank-{rank:05d}.safetensors"
        chunks = {}
        for item in plan.items:
            part = cast(TensorWriteData, item.tensor_data).chunk
            chunks[item.index.fqn] = Chunk(name, tuple(part.offsets), tuple(part.sizes))
        specs = {key: TensorSpec(snapshot.specs[key].dtype, chunk.sizes) for key, chunk in chunks.items()}

        def write(tensors: Named) -> None:
            # required by torch's HuggingFaceStorageReader
            sharding = json.dumps({key: {"saved_offsets": chunk.offsets} for key, chunk in chunks.items()})
            metadata = {"format": "pt", "DCP_SHARDING_INFO": sharding}
            with TensorFile(draft / name, specs, metadata, at_once=not snapshot.in_background) as file:
                for key, tensor in tensors:
                    file.append(key, tensor)
            found.append(_result(name, file.entry, chunks))

        if snapshot.layout == "full":
            gather_whole(snapshot.tensors, snapshot.specs, write if specs else None)
        elif specs:
            write((key, snapshot.tensors[key]) for key in file_order(specs))
        return found

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest and make the folder visible, on rank 0 after all ranks have written their files."""
        assert self._draft is not None
        snapshot, extra = self._snapshot, dict(self._snapshot.extra)
        written: dict[str, FileEntry] = {}
        chunks: dict[str, list[Chunk]] = {name: [] for name in snapshot.specs}
        for result in (result for of_rank in results for result in of_rank):
            written[result.index.fqn], parts = result.storage_data
            for tensor, chunk in parts.items():
                chunks[tensor].append(chunk)
        manifest = Manifest(
            folder=snapshot.folder,
            layout=snapshot.layout,
            global_step=extra.pop("global_step"),
            metrics=extra.pop("metrics"),
            world_size=len(results),
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            versions=versions(),
            tensors=snapshot.specs,
            chunks={name: tuple(found) for name, found in chunks.items()},
            files=dict(sorted(written.items())),
            extra={**extra, "save_seconds": round(time.monotonic() - self._began, 3)},  # all ranks' files are synced
        )
        files.write_bytes(self._draft / MANIFEST, manifest.dumps())
        files.publish(self._draft, snapshot.folder)
        tell_job("saved")

    def discard(self) -> None:
        """Delete the files of an unfinished save, on rank 0."""
        if self._draft is not None:
            files.discard(self._draft)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Return False: the constructor takes the folder."""
        return False


class Reader(HuggingFaceStorageReader):
    """Read slices of safetensors files; their location comes from the manifest, so nothing is unpickled."""

    def __init__(self, manifest: Manifest) -> None:
        super().__init__(str(manifest.folder))
        self._manifest, self._metadata = manifest, _described(manifest)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata built from the manifest."""
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's slices after checking file sizes; CheckpointError for a damaged header."""
        for name in {self.storage_data[item.storage_index].name for item in plan.items}:
            self._manifest.file(name)
        try:
            return super().read_data(plan, planner)
        except SafetensorError as error:  # cannot be pickled, which DCP needs to send it to other ranks
            raise CheckpointError(f"{self.path}: incomplete or invalid safetensors file ({error})") from None


def _described(manifest: Manifest) -> Metadata:
    """Build the DCP metadata of the tensors without opening files, because each rank reads few of them."""
    names = {chunk.file for chunks in manifest.chunks.values() for chunk in chunks}
    places = {name: SimpleNamespace(name=name, relative_path=str(manifest.folder / name)) for name in names}
    tensors: dict[str, Any] = {}
    storage: dict[MetadataIndex, Any] = {}
    for name, spec in manifest.tensors.items():
        parts = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in manifest.chunks[name]]
        tensors[name] = TensorStorageMetadata(_properties(spec), torch.Size(spec.shape), parts)
        storage.update({MetadataIndex(name, c.offsets): places[c.file] for c in manifest.chunks[name]})
    return Metadata(tensors, storage_data=storage)


Named = Iterator[tuple[str, torch.Tensor]]


def gather_whole(
    tensors: Mapping[str, torch.Tensor], specs: Mapping[str, TensorSpec], take: Callable[[Named], None] | None
) -> None:
    """Pass full tensors to ``take``, gathered one at a time in :func:`file_order`; collective with DTensors.

    The argument ``take`` is None on ranks that only take part in the gather. If it fails, the remaining tensors are
    still gathered, so that these ranks do not wait in a collective.
    """
    named = ((name, tensors[name]) for name in file_order(specs) if name in tensors)
    wholes = ((name, whole_tensor(tensor)) for name, tensor in named)
    try:
        if take is not None:
            take(wholes)
    finally:
        for _ in wholes:
            pass


def whole_tensor(tensor: Any) -> torch.Tensor:
    """Return the full tensor; a DTensor is gathered on the device, because NCCL needs device shards; collective."""
    is_split = isinstance(tensor, DTensor)
    return tensor.to(tensor.device_mesh.device_type).full_tensor() if is_split else tensor


def make_room(tensors: Mapping[str, torch.Tensor]) -> None:
    """Fail early, before other ranks wait in :func:`gather_whole`, if the largest tensor does not fit in memory."""
    largest = max((t for t in tensors.values() if isinstance(t, DTensor)), key=lambda t: t.nbytes, default=None)
    if largest is not None:
        torch.empty(largest.nbytes, dtype=torch.uint8, device=largest.device_mesh.device_type)  # freed at once


def parts_of(
    tensors: Mapping[str, torch.Tensor], layout: Layout, rank: int, num_ranks: int
) -> tuple[Mapping[str, torch.Tensor], dict[str, ChunkStorageMetadata]]:
    """Return the tensors and DTensors of this rank, and the part of each that it writes, without empty parts.

    If several ranks have the same part, the rank with the fewest assigned bytes copies and writes it.
    """
    chunks = {}
    if layout == "full":
        if rank == 0:
            chunks = {name: _whole(tensor) for name, tensor in tensors.items()}
        return tensors, chunks
    parts = {}
    taken: dict[tuple[int, ...], list[int]] = {}
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].nbytes, item[0])):  # balances best
        local = local_part(tensor)
        if not local.numel() and tensor.numel():
            continue
        ranks = _holders(tensor) if isinstance(tensor, DTensor) else tuple(range(num_ranks))
        sizes = taken.setdefault(ranks, [0] * len(ranks))  # the same on all of these
        least = sizes.index(min(sizes))
        sizes[least] += local.nbytes
        if ranks[least] == rank:
            parts[name] = local.detach()
            chunks[name] = tensor.__create_chunk_list__()[0] if isinstance(tensor, DTensor) else _whole(tensor)
    return parts, chunks


def _holders(tensor: DTensor) -> tuple[int, ...]:
    """Return the ranks with the same part of a DTensor as this rank, which must have a part."""
    at: Any = tensor.device_mesh.get_coordinate()
    alike = (slice(None) if kind.is_replicate() else i for kind, i in zip(tensor.placements, at, strict=True))
    return tuple(tensor.device_mesh.mesh[tuple(alike)].flatten().tolist())


def _whole(tensor: torch.Tensor) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size((0,) * tensor.dim()), tensor.shape)


def _properties(spec: TensorSpec) -> TensorProperties:
    return TensorProperties(dtype=getattr(torch, spec.dtype))


def _result(name: str, entry: FileEntry, parts: Mapping[str, Chunk]) -> WriteResult:
    return WriteResult(MetadataIndex(name), entry.num_bytes, (entry, parts))


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that a run depends on."""
    found = {"python": platform.python_version()}
    for package in _VERSIONED:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
