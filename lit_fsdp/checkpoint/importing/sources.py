"""What Lightning, Accelerate and the Transformers Trainer save, recognized by its files: weights, AdamW state, step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lit_fsdp.checkpoint import files as disk
from lit_fsdp.checkpoint.importing.untrusted import METADATA, read_dcp, read_json, read_safetensors, read_torch
from lit_fsdp.checkpoint.manifest import MANIFEST
from lit_fsdp.errors import CheckpointError

_META = "meta.pt"
_LIGHTNING_HEADS = ("model", "state_dict")  # of FSDPStrategy and of ModelParallelStrategy
_TRAINER_STATE = "trainer_state.json"
_SHARDED_MODEL, _SHARDED_OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"
_MODEL_FILES = ("pytorch_model_fsdp.bin", "pytorch_model.bin", "model.safetensors", "model.safetensors.index.json")
_OPTIMIZER_FILES = ("optimizer.bin", "optimizer.pt")
_TRAINING_FILES = (_SHARDED_OPTIMIZER, *_OPTIMIZER_FILES, _TRAINER_STATE, "scheduler.bin", "scheduler.pt")
_NONE, _NUMBERED = "the source has none", "its parameters have numbers, not names"
Moments = Mapping[str, Mapping[str, torch.Tensor]]


@dataclass(frozen=True)
class Source:
    """Another tool's checkpoint."""

    path: Path
    weights: Mapping[str, torch.Tensor]
    """Parameters and persistent buffers by the source's own names."""
    moments: Moments = field(default_factory=dict)
    """State of its first optimizer by parameter and key, where it has names."""
    no_moments: str = _NONE
    """Why ``moments`` is empty."""
    step: int | None = None
    """Optimizer steps it had done; None if it does not say."""


def open_source(path: Path) -> Source:
    """Open what is at ``path``; files stay unread until their tensors are used, sharded ones are held in memory.

    Raises:
        CheckpointError: Nothing that can be imported, damaged, or not to be trusted.
    """
    if not path.exists():
        raise CheckpointError(f"{path}: does not exist")
    if path.suffix == ".safetensors":
        return Source(path, read_safetensors(path))
    if path.is_file():
        content = read_lightning_file(path)
        states = content.get("optimizer_states")
        moments, why = _named_state(states[0], path) if states else ({}, _NONE)
        return Source(path, _plain_state(content["state_dict"], path), moments, why, content.get("global_step"))
    if (path / MANIFEST).is_file():
        raise CheckpointError(f"{path}: a lit_fsdp checkpoint already; give it as --ckpt_path")
    if (path / _META).is_file():
        step = read_torch(disk.inside(path, _META)).get("global_step")
        tensors = read_dcp(path, lambda key: key[0] in _LIGHTNING_HEADS or key[:2] == ("optimizer_0", "state"))
        weights = {".".join(key[1:]): tensor for key, tensor in tensors.items() if key[0] in _LIGHTNING_HEADS}
        of_optimizer = {key[2:]: tensor for key, tensor in tensors.items() if key[0] == "optimizer_0"}
        return Source(path, weights, _by_parameter(of_optimizer), step=step)
    return _accelerate_folder(path.parent if path.name == _SHARDED_MODEL else path)


def read_lightning_file(path: Path) -> Mapping[str, Any]:
    """Return a ``.ckpt`` of any Lightning strategy that saves one file; its tensors stay there until they are used."""
    content = read_torch(path)
    if not (isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping)):
        raise CheckpointError(
            f"{path}: no Lightning checkpoint: it has no state_dict; lit-fsdp ckpt import reads what other tools save"
        )
    return content


def _accelerate_folder(folder: Path) -> Source:
    """``accelerator.save_state(folder)``, or a ``checkpoint-500`` of the Trainer."""
    sharded = folder / _SHARDED_MODEL
    file = next((folder / name for name in _MODEL_FILES if (folder / name).is_file()), None)
    if (sharded / METADATA).is_file():
        found = read_dcp(sharded, lambda key: key[0] == "model")
        weights = {".".join(key[1:]): tensor for key, tensor in found.items()}
    elif file is None:
        names = ", ".join(sorted(path.name for path in folder.iterdir())[:12]) or "nothing"
        raise CheckpointError(f"{folder}: no model of Accelerate or the Trainer in it; there is: {names}")
    elif not any((folder / name).exists() for name in _TRAINING_FILES):
        raise CheckpointError(f"{folder}: a model without training state; give it as model.name to train from it")
    else:
        path = disk.inside(folder, file.name)
        weights = _plain_state(read_torch(path), path) if file.suffix == ".bin" else read_safetensors(path)
    step, moments, why = None, {}, _NONE
    if (folder / _TRAINER_STATE).is_file():
        step = read_json(disk.inside(folder, _TRAINER_STATE)).get("global_step")
    if (folder / _SHARDED_OPTIMIZER / METADATA).is_file():
        found = read_dcp(folder / _SHARDED_OPTIMIZER, lambda key: key[:2] == ("optimizer", "state"))
        moments = _by_parameter({key[2:]: tensor for key, tensor in found.items()})
    for name in [name for name in _OPTIMIZER_FILES if (folder / name).is_file()][: 0 if moments else 1]:
        path = disk.inside(folder, name)
        moments, why = _named_state(read_torch(path), path)
    return Source(folder, weights, moments, why, step)


def _named_state(state: Any, path: Path) -> tuple[Any, str]:
    """Return ``state_dict()`` of an optimizer by the names of its parameters, or nothing and why."""
    try:
        listed = [param for group in state["param_groups"] for param in group["params"]]
        names = [name for group in state["param_groups"] for name in group.get("param_names") or group["params"]]
        by_key = dict(zip(listed, names, strict=True))
        found = {
            by_key[param]: {key: torch.as_tensor(value) for key, value in entry.items() if value is not None}
            for param, entry in state["state"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"{path}: not the state of an optimizer ({error!r})") from error
    return (found, _NONE) if all(isinstance(name, str) for name in found) else ({}, _NUMBERED)


def _by_parameter(tensors: Mapping[tuple[str, ...], torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    found: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        found.setdefault(".".join(key[:-1]), {})[key[-1]] = tensor
    return found


def _plain_state(found: Any, path: Path) -> dict[str, torch.Tensor]:
    """Return ``found`` if it is a state dict of whole tensors: no shards of one rank."""
    if not isinstance(found, Mapping) or any(type(t) not in (torch.Tensor, torch.nn.Parameter) for t in found.values()):
        raise CheckpointError(f"{path}: not the state dict of a model, whole plain tensors by name")
    return dict(found)
