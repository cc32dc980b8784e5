"""What Lightning's own strategies write: one ``.ckpt`` file, or a DCP folder with ``meta.pt`` beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lit_fsdp.checkpoint import files as disk
from lit_fsdp.checkpoint.importing.foreign_dcp import ForeignDCP
from lit_fsdp.checkpoint.importing.safe_files import plain_state, read_torch
from lit_fsdp.checkpoint.importing.source import Moments, Source, SourceTensor, from_memory
from lit_fsdp.errors import CheckpointError

META = "meta.pt"
_IMPORT = "lit-fsdp ckpt import reads what other tools have saved"
_MODEL_HEADS = ("model", "state_dict")  # FSDPStrategy, ModelParallelStrategy
_SETTINGS = ("lr", "betas", "eps", "weight_decay")


def is_lightning(content: Any) -> bool:
    """Whether what a torch file held is a Lightning checkpoint."""
    return isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping)


def read_lightning_file(path: Path) -> Mapping[str, Any]:
    """A ``.ckpt`` of any strategy that saves one file; its tensors stay there until they are used.

    Raises:
        CheckpointError: It is something else, damaged, or holds more than tensors and plain data.
    """
    content = read_torch(path)
    if not is_lightning(content):
        raise CheckpointError(f"{path}: no Lightning checkpoint: it has no state_dict; {_IMPORT}")
    return content


def open_lightning_file(path: Path, content: Any) -> Source:
    """A ``.ckpt`` of any strategy that saves one file.

    Args:
        path: For errors.
        content: From :func:`~lit_fsdp.checkpoint.importing.safe_files.read_torch`.

    Raises:
        CheckpointError: It is something else.
    """
    if not is_lightning(content):
        raise CheckpointError(f"{path}: no Lightning checkpoint: it has no state_dict")
    states = content.get("optimizer_states") or []
    notes = _notes(len(states))
    weights = plain_state(content["state_dict"], f"{path}: state_dict")
    moments = numbered_or_named(states[0], f"{path}: optimizer_states[0]") if states else None
    return Source("a Lightning checkpoint file", weights, moments, _step(content, path), "global_step", notes)


def open_lightning_folder(folder: Path) -> Source:
    """A sharded checkpoint of FSDPStrategy or ModelParallelStrategy.

    Raises:
        CheckpointError: It is something else, or damaged.
    """
    content = read_torch(disk.inside(folder, META))
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{folder / META}: not what Lightning puts there")
    stored = ForeignDCP(folder)
    heads = stored.heads()
    head = next((head for head in _MODEL_HEADS if head in heads), None)
    if head is None:
        raise CheckpointError(f"{folder}: holds no model, only {', '.join(sorted(heads)) or 'nothing'}")
    optimizers = sum(head.startswith("optimizer_") for head in heads)
    kind = {"model": "FSDPStrategy", "state_dict": "ModelParallelStrategy"}[head]
    words = f"a sharded Lightning checkpoint ({kind})"
    step = _step(content, folder / META)
    return Source(
        words, stored.model(head), stored.moments("optimizer_0"), step, f"{META}: global_step", _notes(optimizers)
    )


def numbered_or_named(state: Any, what: str) -> Moments | None:
    """An optimizer's ``state_dict()``; None if no step was taken yet.

    Raises:
        CheckpointError: It is something else.
    """
    try:
        groups = [list(group["params"]) for group in state["param_groups"]]
        settings = [{key: group[key] for key in _SETTINGS if key in group} for group in state["param_groups"]]
        names = [name for group in state["param_groups"] for name in group.get("param_names") or ()]
        entries = {
            param: {key: _tensor(f"{what}: {param}.{key}", value) for key, value in entry.items() if value is not None}
            for param, entry in state["state"].items()
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{what}: not the state of an optimizer ({error!r})") from error
    if not any(entries.values()):
        return None
    return Moments(entries, groups, settings, names or None)


def _tensor(what: str, value: Any) -> SourceTensor:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return from_memory(what, torch.tensor(float(value)) if is_number else value)


def _step(content: Mapping[str, Any], where: Path) -> int:
    step = content.get("global_step")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise CheckpointError(f"{where}: its global_step is {step!r}, so it is no Lightning checkpoint")
    return step


def _notes(num_optimizers: int) -> tuple[str, ...]:
    return () if num_optimizers < 2 else (f"{num_optimizers} optimizers: only the first is looked at",)
