"""Saving and loading of whole checkpoints, together on all ranks.

A save writes into a hidden folder beside the final one, hashes and syncs every file, writes the manifest last and
renames once; whatever goes wrong before the rename leaves nothing visible and the older checkpoints untouched.
A load reads the manifest first and trusts nothing that disagrees with it.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import importlib.metadata
import platform
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from lit_fsdp.checkpoint import dcp_files, disk, state_json
from lit_fsdp.checkpoint.disk import FileEntry
from lit_fsdp.checkpoint.manifest import (
    MANIFEST,
    Layout,
    Manifest,
    TensorSpec,
    checked_extra,
    read_manifest,
    record_metrics,
)
from lit_fsdp.checkpoint.ranks import Ranks
from lit_fsdp.checkpoint.safetensors_file import TensorFile, file_order, fill, opened, read_tensors, spec_of, write_tensors
from lit_fsdp.errors import CheckpointError

__all__ = [
    "Snapshot",
    "load_rank_state",
    "load_state",
    "load_tensors",
    "read_manifest",
    "record_metrics",
    "save_checkpoint",
    "tensor_names",
    "verify_files",
    "write_snapshot",
]

FULL_FILE = "tensors.safetensors"
_STATE = "state"
_RESERVED = (MANIFEST, FULL_FILE, f"{dcp_files.FOLDER}/", f"{_STATE}.", "rank-")
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


def save_checkpoint(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    state: Any,
    manifest: Mapping[str, Any],
    layout: Layout,
    files: Mapping[str, bytes | Path] | None = None,
    rank_state: Any = None,
) -> None:
    """Write one complete checkpoint at ``folder``, or raise on every rank and leave nothing there; collective.

    Args:
        folder: Where it becomes visible; must not exist. The same on every rank, on a file system all share.
        tensors: See :class:`Snapshot`, as for the rest.
        state: Non-tensor state.
        manifest: ``global_step`` and what else the manifest shall say.
        layout: ``sharded`` or ``full``.
        files: Small extra files, e.g. ``hf/config.json``.
        rank_state: State of this rank alone.

    Raises:
        CheckpointError: Anything that went wrong on any rank; names rank and file.
    """
    snapshot = Snapshot(
        tensors=tensors, state=state, manifest=manifest, layout=layout, files=files or {}, rank_state=rank_state
    )
    write_snapshot(Path(folder), snapshot, Ranks())


def write_snapshot(folder: Path, snapshot: Snapshot, ranks: Ranks) -> None:
    """:func:`save_checkpoint` for a snapshot and the ranks of some process group."""
    staging: Path | None = None
    with contextlib.ExitStack() as held:
        try:
            draft = _Draft(folder, snapshot, ranks)
            staging = ranks.first(f"preparing {folder}", lambda: disk.stage(folder, held))
            ranks.run(f"opening {staging}", lambda: _check_visible(staging))
            what = f"writing {folder}"
            written: dict[str, FileEntry] = {}
            for writer in (draft.write_tensors, draft.write_states):
                for entries in ranks.run(what, lambda writer=writer: writer(staging)):  # type: ignore[misc]
                    written.update(entries)
            ranks.first(what, lambda: draft.commit(staging, written))
        except BaseException:
            if staging is not None and ranks.is_first:
                disk.discard(staging)
            raise


def tensor_names(folder: Path) -> set[str]:
    """Names of all tensors in the checkpoint at ``folder``."""
    return set(read_manifest(folder).tensors)


def load_tensors(
    folder: Path, into: Mapping[str, torch.Tensor], skip: Collection[str] = (), verify: bool = True
) -> None:
    """Fill ``into`` in place from either layout, whatever ranks and sharding wrote it; collective.

    Args:
        folder: The checkpoint.
        into: Tensors and DTensors by name; a DTensor may have any mesh, with ``Shard`` and ``Replicate`` placements.
        skip: Names in the checkpoint that are left out.
        verify: Compare the hashes of the tensor files first, shared out over the ranks; sizes always are.

    Raises:
        CheckpointError: Names, shapes or dtypes differ (all are listed), a file is damaged, or reading failed.
    """
    ranks, folder = Ranks(), Path(folder)

    def prepare() -> tuple[Manifest, Any]:
        manifest = read_manifest(folder)
        _check_targets(manifest, into, set(skip))
        is_sharded = manifest.layout == "sharded"
        return manifest, dcp_files.read_description(manifest) if is_sharded else manifest.file(FULL_FILE)

    prepared: list[tuple[Manifest, Any]] = []
    ranks.run(f"reading {folder}", lambda: prepared.append(prepare()))
    manifest, source = prepared[0]
    if verify:
        names = [name for name in manifest.files if name == FULL_FILE or name.startswith(f"{dcp_files.FOLDER}/")]
        _verify(manifest, names, ranks)

    def read() -> None:
        if manifest.layout == "sharded":
            dcp_files.load(manifest, into, source, ranks.group)
            return
        with opened(source) as file, torch.no_grad():
            for name, tensor in into.items():
                fill(file, name, tensor)

    ranks.run(f"reading {folder}", read)


def load_state(folder: Path) -> Any:
    """The non-tensor state of the checkpoint at ``folder``; its files are verified.

    Raises:
        CheckpointError: No checkpoint, or a damaged file.
    """
    state = _load_state(read_manifest(folder), _STATE)
    if state is None:
        raise CheckpointError(f"{folder}: its manifest lists no {_STATE}.json")
    return state[0]


def load_rank_state(folder: Path, rank: int) -> Any:
    """What ``rank`` saved for itself, verified; None if there was no such rank or it saved nothing."""
    state = _load_state(read_manifest(folder), f"rank-{rank:05d}")
    return None if state is None else state[0]


def verify_files(folder: Path) -> None:
    """Compare size and hash of every file with the manifest, shared out over the ranks; collective.

    Raises:
        CheckpointError: On every rank; names each file that is missing or differs.
    """
    manifest = read_manifest(folder)
    _verify(manifest, manifest.files, Ranks())


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
            self._states[_STATE] = state_json.encode(snapshot.state)
            self._extra = checked_extra(snapshot.manifest)
            for name in snapshot.files:
                if disk.checked_name(name).startswith(_RESERVED):
                    raise CheckpointError(f"files: {name} is a name of the checkpoint's own; use another one")
        return hashlib.sha256(repr((str(self._folder), list(self.specs.items()))).encode()).hexdigest()

    def write_tensors(self, staging: Path) -> dict[str, FileEntry]:
        """Write this rank's part of the tensors; collective."""
        if self._snapshot.layout == "sharded":
            return dcp_files.save(staging, self._snapshot.tensors, self._ranks.group)
        entry = _write_full(staging / FULL_FILE, self._snapshot.tensors, self.specs, self._ranks.is_first)
        return {} if entry is None else {FULL_FILE: entry}

    def write_states(self, staging: Path) -> dict[str, FileEntry]:
        """Write the state of this rank; on rank 0 the common state and the extra files too."""
        written = {}
        for name, (text, tensors) in self._states.items():
            written[f"{name}.json"] = disk.write_bytes(staging / f"{name}.json", text.encode())
            specs = {key: spec_of(tensor) for key, tensor in tensors.items()}
            file = f"{name}.safetensors"
            written[file] = write_tensors(staging / file, specs, tensors.__getitem__)
        for name, content in self._snapshot.files.items() if self._ranks.is_first else ():
            is_data = isinstance(content, bytes)
            write: Callable[..., FileEntry] = disk.write_bytes if is_data else _copy_from
            written[name] = write(staging / name, content)
        return written

    def commit(self, staging: Path, written: Mapping[str, FileEntry]) -> None:
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
        disk.write_bytes(staging / MANIFEST, manifest.dumps())
        disk.publish(staging, self._folder)


def _copy_from(target: Path, source: Path) -> FileEntry:
    return disk.copy_file(Path(source), target)


def _check_visible(staging: Path) -> None:
    if not staging.is_dir():
        raise CheckpointError(f"{staging} is not visible here; put the run folder on a file system all nodes share")


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


def _check_targets(manifest: Manifest, into: Mapping[str, torch.Tensor], skip: set[str]) -> None:
    wanted = {name: spec_of(tensor) for name, tensor in into.items()}
    saved = {name: spec for name, spec in manifest.tensors.items() if name not in skip or name in wanted}
    lines = [f"missing in the checkpoint: {name}" for name in sorted(set(wanted) - set(saved))]
    lines += [f"only in the checkpoint: {name}" for name in sorted(set(saved) - set(wanted))]
    for name in sorted(set(saved) & set(wanted)):
        if saved[name] != wanted[name]:
            lines.append(f"{name}: {saved[name]} in the checkpoint, {wanted[name]} here")
        elif into[name].is_meta:
            lines.append(f"{name}: on the meta device here, so there is nothing to load into")
    if lines:
        raise CheckpointError(f"{manifest.folder}: does not fit:\n" + "\n".join(f"  {line}" for line in lines))


def _verify(manifest: Manifest, names: Iterable[str], ranks: Ranks) -> None:
    """Hash the files, the largest first to the rank with the least to do."""
    load = [0] * ranks.size
    mine = []
    for name in sorted(names, key=lambda n: (-manifest.files[n].num_bytes, n)):
        rank = load.index(min(load))
        load[rank] += manifest.files[name].num_bytes
        if rank == ranks.rank:
            mine.append(name)

    def check() -> None:
        problems = []
        for name in mine:
            try:
                _verified(manifest, name)
            except CheckpointError as error:
                problems.append(str(error))
        if problems:
            raise CheckpointError("\n".join(problems))

    ranks.run(f"verifying {manifest.folder}", check)


def _verified(manifest: Manifest, name: str) -> Path:
    path = manifest.file(name)
    if disk.hash_file(path) != manifest.files[name].sha256:
        raise CheckpointError(f"{path}: sha256 differs from the manifest; this checkpoint is damaged, use another one")
    return path


def _load_state(manifest: Manifest, name: str) -> tuple[Any] | None:
    if f"{name}.json" not in manifest.files:
        return None
    text = _verified(manifest, f"{name}.json").read_bytes()
    tensors = read_tensors(_verified(manifest, f"{name}.safetensors"))
    return (state_json.decode(text, tensors),)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _VERSIONED:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
