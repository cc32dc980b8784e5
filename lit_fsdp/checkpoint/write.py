"""How one checkpoint is written: everything into a hidden folder, the manifest last, then one rename.

Whatever goes wrong before the rename leaves nothing visible and the older checkpoints untouched.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import importlib.metadata
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from lit_fsdp.checkpoint import dcp_files, disk, staging, state_json
from lit_fsdp.checkpoint.disk import FileEntry
from lit_fsdp.checkpoint.manifest import MANIFEST, Layout, Manifest, TensorSpec, checked_extra
from lit_fsdp.checkpoint.ranks import Ranks
from lit_fsdp.checkpoint.safetensors_file import TensorFile, file_order, spec_of, write_tensors
from lit_fsdp.errors import CheckpointError

FULL_FILE = "tensors.safetensors"
STATE = "state"
_RESERVED = (MANIFEST, FULL_FILE, f"{dcp_files.FOLDER}/", f"{STATE}.", "rank-")
_VERSIONED = ("torch", "lightning", "transformers", "safetensors", "lit_fsdp")


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


def write_snapshot(folder: Path, snapshot: Snapshot, ranks: Ranks) -> None:
    """:func:`save_checkpoint` for a snapshot and the ranks of some process group."""
    place: Path | None = None
    with contextlib.ExitStack() as held:
        try:
            draft = _Draft(folder, snapshot, ranks)
            place = ranks.first(f"preparing {folder}", lambda: staging.stage(folder, held))
            ranks.run(f"opening {place}", lambda: _check_visible(place))
            what = f"writing {folder}"
            written: dict[str, FileEntry] = {}
            for writer in (draft.write_tensors, draft.write_states):
                for entries in ranks.run(what, lambda writer=writer: writer(place)):  # type: ignore[misc]
                    written.update(entries)
            ranks.first(what, lambda: draft.commit(place, written))
        except BaseException:
            if place is not None and ranks.is_first:
                staging.discard(place)
            raise


class _Draft:
    """A checkpoint on its way to the disk; everything that can be refused is refused by the constructor.

    Raises:
        CheckpointError: On every rank.
    """

    def __init__(self, folder: Path, snapshot: Snapshot, ranks: Ranks) -> None:
        self._folder, self._snapshot, self._ranks = folder, snapshot, ranks
        self._states: dict[str, tuple[str, dict[str, torch.Tensor]]] = {}
        self._extra: dict[str, Any] = {}
        digests = ranks.run(f"checking what to save at {folder}", self._check)
        if len(set(digests)) > 1:
            raise CheckpointError(f"{folder}: the ranks do not hold the same tensor names, shapes and dtypes to save")

    def _check(self) -> str:
        snapshot, rank = self._snapshot, self._ranks.rank
        if snapshot.layout not in ("sharded", "full"):
            raise CheckpointError(f"layout: got {snapshot.layout!r}, allowed: sharded, full")
        for name, tensor in snapshot.tensors.items():
            if not isinstance(tensor, torch.Tensor) or tensor.is_meta:
                kind = "on the meta device" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
                raise CheckpointError(f"{name}: {kind}, but only tensors with data can be saved as tensors")
        self.specs = {name: spec_of(tensor) for name, tensor in snapshot.tensors.items()}
        if snapshot.rank_state is not None:
            self._states[f"rank-{rank:05d}"] = state_json.encode(snapshot.rank_state)
        if self._ranks.is_first:
            self._states[STATE] = state_json.encode(snapshot.state)
            self._extra = checked_extra(snapshot.manifest)
            for name in snapshot.files:
                if disk.checked_name(name).startswith(_RESERVED):
                    raise CheckpointError(f"files: {name} is a name of the checkpoint's own; use another one")
        return hashlib.sha256(
            repr((str(self._folder), snapshot.layout, sorted(self.specs.items(), key=str))).encode()
        ).hexdigest()

    def write_tensors(self, place: Path) -> dict[str, FileEntry]:
        """Write this rank's part of the tensors; collective."""
        if self._snapshot.layout == "sharded":
            return dcp_files.save(place, self._snapshot.tensors, self._ranks.group)
        entry = _write_full(place / FULL_FILE, self._snapshot.tensors, self.specs, self._ranks.is_first)
        return {} if entry is None else {FULL_FILE: entry}

    def write_states(self, place: Path) -> dict[str, FileEntry]:
        """Write the state of this rank; on rank 0 the common state and the extra files too."""
        written = {}
        for name, (text, tensors) in self._states.items():
            written[f"{name}.json"] = disk.write_bytes(place / f"{name}.json", text.encode())
            specs = {key: spec_of(tensor) for key, tensor in tensors.items()}
            file = f"{name}.safetensors"
            written[file] = write_tensors(place / file, specs, tensors.__getitem__)
        for name, content in self._snapshot.files.items() if self._ranks.is_first else ():
            is_data = isinstance(content, bytes)
            write: Callable[..., FileEntry] = disk.write_bytes if is_data else _copy_from
            written[name] = write(place / name, content)
        return written

    def commit(self, place: Path, written: Mapping[str, FileEntry]) -> None:
        """Write the manifest and make the folder visible; on rank 0."""
        extra = dict(self._extra)
        manifest = Manifest(
            folder=self._folder,
            layout=self._snapshot.layout,
            global_step=extra.pop("global_step"),
            metrics=extra.pop("metrics"),
            world_size=self._ranks.size,
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            versions=_versions(),
            tensors=self.specs,
            files=dict(sorted(written.items())),
            extra=extra,
        )
        disk.write_bytes(place / MANIFEST, manifest.dumps())
        staging.publish(place, self._folder)


def _copy_from(target: Path, source: Path) -> FileEntry:
    return disk.copy_file(Path(source), target)


def _check_visible(place: Path) -> None:
    if not place.is_dir():
        raise CheckpointError(f"{place} is not visible here; put the run folder on a file system all nodes share")


def _write_full(
    path: Path, tensors: Mapping[str, torch.Tensor], specs: Mapping[str, TensorSpec], is_writer: bool
) -> FileEntry | None:
    """Gather one tensor after the other and write it on rank 0.

    A failure there must not leave the others waiting in a collective, so the rest is gathered and dropped.
    """
    failure: BaseException | None = None
    file: TensorFile | None = None
    for name in [None, *file_order(specs)]:
        tensor = tensors[name] if name is not None else None
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if not is_writer or failure is not None:
            continue
        try:
            if name is None:
                file = TensorFile(path, specs)
            elif file is not None and whole is not None:
                file.append(name, whole)
        except BaseException as error:
            failure = error
    if failure is not None:
        if file is not None:
            file.abandon()
        raise failure
    return file.close() if file is not None else None


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _VERSIONED:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
