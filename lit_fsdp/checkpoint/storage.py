"""One checkpoint through ``torch.distributed.checkpoint``: planned together, written by every rank, committed by one.

DCP gathers the errors of all ranks after each phase, and calls ``finish`` on rank 0 only when every rank has written
its part. So the manifest, which makes a folder a checkpoint, is written there, and then the folder gets its name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
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
    tensors: Mapping[str, torch.Tensor]
    """Of the sharded layout what this rank holds, of the full one whole tensors or DTensors."""
    specs: Mapping[str, TensorSpec]
    """Whole shape and dtype of every tensor."""
    rank_state: Any
    """State of this rank as plain JSON."""
    in_background: bool = False
    """Whether training goes on beside."""
    chunks: Mapping[str, ChunkStorageMetadata] = field(default_factory=dict)
    """In the sharded layout: which part of the whole each of this rank's tensors is."""
    state: Any = None
    """Common state as plain JSON; this and what follows is rank 0's."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """The caller's part of the manifest."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Extra files by path."""


class Planner(DefaultSavePlanner):
    """Plans what this rank holds; of what several ranks hold alike, DCP lets one write each part."""

    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__(flatten_state_dict=False)
        self._snapshot = snapshot

    def create_local_plan(self) -> SavePlan:
        """One item per part; none in the full layout, which rank 0 gathers and writes alone."""
        specs = self._snapshot.specs
        self.plan = SavePlan([_item(name, specs[name], chunk) for name, chunk in self._snapshot.chunks.items()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """This rank's part of a tensor."""
        return self._snapshot.tensors[index.fqn]


class Writer(StorageWriter):
    """Streams this rank's part to a hidden folder; on rank 0 it begins and commits the whole."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._draft: Path | None = None
        self._began = time.monotonic()
        self._is_first = True
        self._rank_states: list[Any] = []

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing: a writer serves one save."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learn whether this is rank 0."""
        self._is_first = is_coordinator

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Send this rank's state along: rank 0 writes that of all into one file."""
        return dataclasses.replace(plan, storage_data=self._snapshot.rank_state)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the hidden folder, on rank 0, and tell every rank its name."""
        self._rank_states = [plan.storage_data for plan in plans]
        self._draft = files.stage(self._snapshot.folder)
        return [dataclasses.replace(p, storage_data=(rank, self._draft.name)) for rank, p in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write and sync this rank's files."""
        rank, name = plan.storage_data
        draft = self._snapshot.folder.with_name(name)
        if not draft.is_dir() and (self._is_first or self._snapshot.layout == "sharded"):
            raise CheckpointError(f"{draft} is not visible here; put the run folder on a file system all nodes share")
        found: list[WriteResult] = []
        if self._snapshot.layout == "full":
            self._write_full(draft, found)
        elif plan.items:
            self._write_parts(draft, f"{FOLDER}/rank-{rank:05d}.safetensors", plan, planner, found)
        if self._is_first:
            state = json.dumps({"state": self._snapshot.state, "ranks": self._rank_states}, allow_nan=False)
            for name, content in {STATE: state.encode(), **self._snapshot.files}.items():
                found.append(_result(name, files.write_bytes(draft / name, content), []))
        future: Future[list[WriteResult]] = Future()
        future.set_result(found)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest and make the folder visible, on rank 0 after all ranks have written."""
        assert self._draft is not None
        snapshot, extra = self._snapshot, dict(self._snapshot.extra)
        written: dict[str, FileEntry] = {}
        chunks: dict[str, list[Chunk]] = {name: [] for name in snapshot.specs}
        for result in (result for of_rank in results for result in of_rank):
            name = result.index.fqn
            entry, parts = result.storage_data
            written[name] = entry
            for tensor, offsets, sizes in parts:
                chunks[tensor].append(Chunk(name, offsets, sizes))
        manifest = Manifest(
            folder=snapshot.folder,
            layout=snapshot.layout,
            global_step=extra.pop("global_step"),
            metrics=extra.pop("metrics"),
            world_size=len(results),
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            versions=versions(),
            tensors=snapshot.specs,
            chunks={name: tuple(parts) for name, parts in chunks.items()},
            files=dict(sorted(written.items())),
            extra={**extra, "save_seconds": round(time.monotonic() - self._began, 3)},  # all ranks' files are synced
        )
        files.write_bytes(self._draft / MANIFEST, manifest.dumps())
        files.publish(self._draft, snapshot.folder)
        tell_job("saved")

    def discard(self) -> None:
        """Remove what an unfinished save has written; on rank 0."""
        if self._draft is not None:
            files.discard(self._draft)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """A folder is given to the constructor."""
        return False

    def _write_parts(
        self, draft: Path, name: str, plan: SavePlan, planner: SavePlanner, found: list[WriteResult]
    ) -> None:
        parts, specs, offsets = {}, {}, {}
        for item in plan.items:
            data = cast(TensorWriteData, item.tensor_data)
            key, spec = item.index.fqn, self._snapshot.specs[item.index.fqn]
            parts[key] = item
            specs[key] = TensorSpec(spec.dtype, tuple(data.chunk.sizes))
            offsets[key] = tuple(data.chunk.offsets)
        # what torch's own HuggingFaceStorageReader looks for
        sharding = json.dumps({key: {"saved_offsets": offset} for key, offset in offsets.items()})
        metadata = {"format": "pt", "DCP_SHARDING_INFO": sharding}
        with TensorFile(draft / name, specs, metadata, at_once=not self._snapshot.in_background) as file:
            for key in file_order(specs):
                file.append(key, [cast(torch.Tensor, planner.resolve_data(parts[key]))])
        found.append(_result(name, file.entry, [(key, offsets[key], specs[key].shape) for key in specs]))

    def _write_full(self, draft: Path, found: list[WriteResult]) -> None:
        tensors = self._snapshot.tensors
        specs = {name: self._snapshot.specs[name] for name in tensors}
        at_once = not self._snapshot.in_background

        def write(wholes: Wholes) -> None:
            with TensorFile(draft / FULL_FILE, specs, at_once=at_once) as file:
                for name, tensor in wholes:
                    file.append(name, [tensor])
            parts = [(name, (0,) * len(spec.shape), spec.shape) for name, spec in specs.items()]
            found.append(_result(FULL_FILE, file.entry, parts))

        gather_whole(tensors, specs, write if self._is_first and tensors else None)


class Reader(HuggingFaceStorageReader):
    """Reads slices of safetensors files; where they lie is known from the manifest, so nothing is unpickled."""

    def __init__(self, manifest: Manifest) -> None:
        super().__init__(str(manifest.folder))
        self._metadata = _described(manifest)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The description that was made from the manifest."""
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's slices; a damaged header is a CheckpointError."""
        try:
            return super().read_data(plan, planner)
        except SafetensorError as error:  # which cannot be pickled, as DCP does for the other ranks
            raise CheckpointError(f"{self.path}: not a whole safetensors file ({error})") from None


def _described(manifest: Manifest) -> Metadata:
    """DCP's description of the tensors, whose files are there and have their sizes."""
    files = {chunk.file for chunks in manifest.chunks.values() for chunk in chunks}
    places = {name: SimpleNamespace(relative_path=str(manifest.file(name))) for name in files}  # all that is read
    tensors: dict[str, Any] = {}
    storage: dict[MetadataIndex, Any] = {}
    for name, spec in manifest.tensors.items():
        parts = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in manifest.chunks[name]]
        properties = TensorProperties(dtype=getattr(torch, spec.dtype))
        tensors[name] = TensorStorageMetadata(properties, torch.Size(spec.shape), parts)
        storage.update({MetadataIndex(name, c.offsets): places[c.file] for c in manifest.chunks[name]})
    return Metadata(tensors, storage_data=storage)


Wholes = Iterator[tuple[str, torch.Tensor]]


def gather_whole(
    tensors: Mapping[str, torch.Tensor], specs: Mapping[str, TensorSpec], take: Callable[[Wholes], None] | None
) -> None:
    """Give ``take`` whole tensors, made one after the other in :func:`file_order`; collective with DTensors.

    ``take`` is None on ranks that only help to gather. Its failure must not leave these waiting in a collective, so the
    rest is gathered and dropped. A rank that cannot even begin one for want of memory would: see :func:`make_room`.
    """
    named = ((name, tensors[name]) for name in file_order(specs))
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


def parts_of(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, ChunkStorageMetadata]]:
    """What this rank holds of tensors and DTensors, and which parts of the whole that is; empty parts are left out."""
    parts, chunks = {}, {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, DTensor):
            parts[name] = tensor.detach()
            chunks[name] = ChunkStorageMetadata(torch.Size((0,) * tensor.dim()), tensor.shape)
            continue
        local = tensor.to_local().detach()
        if local.numel() or not tensor.numel():
            (chunks[name],) = tensor.__create_chunk_list__()
            parts[name] = local
    return parts, chunks


def _item(name: str, spec: TensorSpec, chunk: ChunkStorageMetadata) -> WriteItem:
    properties = TensorProperties(dtype=getattr(torch, spec.dtype))
    data = TensorWriteData(chunk, properties, torch.Size(spec.shape))
    return WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def _result(name: str, entry: FileEntry, parts: list[Any]) -> WriteResult:
    return WriteResult(MetadataIndex(name), entry.num_bytes, (entry, parts))


def versions() -> dict[str, str]:
    """Of python and the packages that a run rests on."""
    found = {"python": platform.python_version()}
    for package in _VERSIONED:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
