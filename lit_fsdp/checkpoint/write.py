"""How one checkpoint is written: everything into a hidden folder, the manifest last, then one rename.

Whatever goes wrong before the rename leaves nothing visible and the older checkpoints untouched, also the one of the
same name.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from lit_fsdp.checkpoint import dcp_files, disk, staging
from lit_fsdp.checkpoint.disk import FileEntry
from lit_fsdp.checkpoint.manifest import MANIFEST, Manifest, TensorSpec
from lit_fsdp.checkpoint.ranks import Ranks
from lit_fsdp.checkpoint.safetensors_file import TensorFile, file_order, spec_of, write_tensors
from lit_fsdp.checkpoint.snapshot import FULL_FILE, Part, Snapshot, agreed, take
from lit_fsdp.errors import CheckpointError
from lit_fsdp.host import tell_job

_VERSIONED = ("torch", "lightning", "transformers", "safetensors", "lit_fsdp")


def write_snapshot(folder: Path, snapshot: Snapshot, ranks: Ranks) -> None:
    """:func:`save_checkpoint` for a snapshot and the ranks of some process group."""
    write_part(folder, agreed(folder, lambda: take(snapshot, ranks.rank), ranks), ranks)


def write_part(folder: Path, part: Part, ranks: Ranks) -> None:
    """Write what all ranks have agreed on; collective.

    Raises:
        CheckpointError: On every rank; ``folder`` is as it was.
    """
    draft = _Draft(folder, part, ranks)
    place: Path | None = None
    with contextlib.ExitStack() as held:
        try:
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
    """A checkpoint on its way to the disk."""

    def __init__(self, folder: Path, part: Part, ranks: Ranks) -> None:
        self._folder, self._part, self._ranks = folder, part, ranks
        self._began = time.monotonic()

    def write_tensors(self, place: Path) -> dict[str, FileEntry]:
        """Write this rank's part of the tensors; collective."""
        part = self._part
        if part.layout == "sharded":
            return dcp_files.save(place, part.tensors, self._ranks.group)
        entry = _write_full(place / FULL_FILE, part.tensors, part.specs, self._ranks.is_first)
        return {} if entry is None else {FULL_FILE: entry}

    def write_states(self, place: Path) -> dict[str, FileEntry]:
        """Write the state of this rank; on rank 0 the common state and the extra files too."""
        written = {}
        for name, (text, tensors) in self._part.states.items():
            written[f"{name}.json"] = disk.write_bytes(place / f"{name}.json", text.encode())
            specs = {key: spec_of(tensor) for key, tensor in tensors.items()}
            file = f"{name}.safetensors"
            written[file] = write_tensors(place / file, specs, tensors.__getitem__)
        for name, content in self._part.files.items():
            is_data = isinstance(content, bytes)
            write: Callable[..., FileEntry] = disk.write_bytes if is_data else _copy_from
            written[name] = write(place / name, content)
        return written

    def commit(self, place: Path, written: Mapping[str, FileEntry]) -> None:
        """Write the manifest and make the folder visible; on rank 0."""
        extra = dict(self._part.extra)
        manifest = Manifest(
            folder=self._folder,
            layout=self._part.layout,
            global_step=extra.pop("global_step"),
            metrics=extra.pop("metrics"),
            world_size=self._ranks.size,
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            versions=_versions(),
            tensors=self._part.specs,
            files=dict(sorted(written.items())),
            extra={**extra, "save_seconds": round(time.monotonic() - self._began, 3)},  # all ranks' files are synced
        )
        disk.write_bytes(place / MANIFEST, manifest.dumps())
        staging.publish(place, self._folder)
        tell_job("saved")


def _copy_from(target: Path, source: Path) -> FileEntry:
    return disk.copy_file(Path(source), target)


def _check_visible(place: Path) -> None:
    if not place.is_dir():
        raise CheckpointError(f"{place} is not visible here; put the run folder on a file system all nodes share")


def _write_full(
    path: Path, tensors: Mapping[str, torch.Tensor], specs: Mapping[str, TensorSpec], is_writer: bool
) -> FileEntry | None:
    """Gather one tensor after the other and write it on rank 0; nothing is left to gather where they are all there.

    A failure there must not leave the others waiting in a collective, so the rest is gathered and dropped.
    """
    if not is_writer and not tensors:
        return None
    failure: BaseException | None = None
    file: TensorFile | None = None
    for name in [None, *file_order(specs)]:
        tensor: torch.Tensor | None = None
        try:
            tensor = tensors[name] if name is not None else None
        except Exception as error:  # an import reads each tensor only now
            failure = failure or error
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
