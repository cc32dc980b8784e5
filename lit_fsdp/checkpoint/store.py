"""Saving and loading of whole checkpoints, together on all ranks.

A load reads the manifest first and trusts nothing that disagrees with it. How a save is made safe stands in
:mod:`lit_fsdp.checkpoint.write`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from lit_fsdp.checkpoint import dcp_files, disk, state_json
from lit_fsdp.checkpoint.manifest import Layout, Manifest, read_manifest, record_metrics
from lit_fsdp.checkpoint.ranks import Ranks
from lit_fsdp.checkpoint.safetensors_file import fill, opened, read_tensors, spec_of
from lit_fsdp.checkpoint.snapshot import FULL_FILE, STATE, Snapshot
from lit_fsdp.checkpoint.sound import differences_on_all, shared_differences
from lit_fsdp.checkpoint.verify import Difference, describe, file_differences
from lit_fsdp.checkpoint.write import write_snapshot
from lit_fsdp.errors import CheckpointError

__all__ = [
    "load_rank_state",
    "load_state",
    "load_tensors",
    "load_weights",
    "read_manifest",
    "record_metrics",
    "save_checkpoint",
    "tensor_names",
    "verify_files",
]

Module = TypeVar("Module", bound=nn.Module)


def save_checkpoint(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    state: Any,
    manifest: Mapping[str, Any],
    layout: Layout,
    files: Mapping[str, bytes | Path] | None = None,
    rank_state: Any = None,
) -> None:
    """Write one complete checkpoint at ``folder``, or raise on every rank and leave it as it was; collective.

    Args:
        folder: Where it becomes visible, in place of an older one. The same on every rank, on a file system all share.
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
        _refuse(folder, shared_differences(manifest, _tensor_files(manifest), ranks))

    def read() -> None:
        if manifest.layout == "sharded":
            dcp_files.load(manifest, into, source, ranks.group)
            return
        with opened(source) as file, torch.no_grad():
            for name, tensor in into.items():
                fill(file, name, tensor)

    ranks.run(f"reading {folder}", read)


def load_weights(module: Module, path: Path | str) -> Module:
    """Load the model of a checkpoint into a module of this process alone, whatever engine, ranks and layout wrote it.

    It is what ``load_from_checkpoint`` is for Lightning's own files: no Trainer and no process group are needed, and
    none is used. Values are cast to the module's dtypes. A module that builds its layers in ``configure_model`` builds
    them now; with ``strict_loading = False`` what the checkpoint lacks stays as it is.

    Args:
        module: Made with the arguments of the training, e.g. ``MyModule(width=64)``.
        path: A checkpoint, e.g. ``RUN/checkpoints/step-00000050``.

    Returns:
        ``module``.

    Raises:
        CheckpointError: No checkpoint, or a damaged one.
        RuntimeError: Names or shapes differ; all are listed.
    """
    state = whole_model(path)
    configure: Any = getattr(module, "configure_model", None)
    if configure is not None and state.keys() - module.state_dict().keys():
        configure()
    on_meta = any(param.is_meta for param in module.parameters())
    module.load_state_dict(state, strict=getattr(module, "strict_loading", True), assign=on_meta)
    return module


def whole_model(path: Path | str) -> dict[str, torch.Tensor]:
    """The verified model tensors of a checkpoint under the module's own names, tied ones under each of theirs.

    Raises:
        CheckpointError: No checkpoint, or a damaged one.
    """
    manifest = read_manifest(path)
    _refuse(manifest.folder, file_differences(manifest, _tensor_files(manifest)))
    names = [name for name in manifest.tensors if name.startswith("model/")]
    if manifest.layout == "sharded":
        description = dcp_files.read_description(manifest)
        found = {name: dcp_files.read_tensor(manifest, description, name) for name in names}
    else:
        with opened(manifest.file(FULL_FILE)) as file:
            found = {name: file.get_tensor(name) for name in names}
    state = {name.removeprefix("model/"): tensor for name, tensor in found.items()}
    return state | {again: state[first] for again, first in manifest.extra.get("tied", {}).items()}


def load_state(folder: Path) -> Any:
    """The non-tensor state of the checkpoint at ``folder``; its files are verified.

    Raises:
        CheckpointError: No checkpoint, or a damaged file.
    """
    state = _load_state(read_manifest(folder), STATE)
    if state is None:
        raise CheckpointError(f"{folder}: its manifest lists no {STATE}.json")
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
    _refuse(Path(folder), differences_on_all(Path(folder), Ranks()))


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


def _tensor_files(manifest: Manifest) -> list[str]:
    return [name for name in manifest.files if name == FULL_FILE or name.startswith(f"{dcp_files.FOLDER}/")]


def _refuse(folder: Path, differences: Sequence[Difference]) -> None:
    if differences:
        raise CheckpointError(f"{describe(folder, differences)}\n  use another checkpoint")


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
