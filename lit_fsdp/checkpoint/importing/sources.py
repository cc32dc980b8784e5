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
_LIGHTNING_HEADS = {"model": "FSDPStrategy", "state_dict": "ModelParallelStrategy"}
_TRAINER_STATE = "trainer_state.json"
_SHARDED_MODEL, _SHARDED_OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"
_MODEL_FILES = ("pytorch_model_fsdp.bin", "pytorch_model.bin", "model.safetensors", "model.safetensors.index.json")
_OPTIMIZER_FILES = ("optimizer.bin", "optimizer.pt")
_TRAINING_FILES = (_SHARDED_OPTIMIZER, *_OPTIMIZER_FILES, _TRAINER_STATE, "scheduler.bin", "scheduler.pt")
_NUMBERED = "its parameters have numbers, not names"


@dataclass(frozen=True, kw_only=True)
class Source:
    """Another tool's checkpoint."""

    path: Path
    """Where it is."""
    kind: str
    """What it is, in words."""
    weights: Mapping[str, torch.Tensor]
    """Parameters and persistent buffers by the source's own names."""
    moments: Mapping[str, Mapping[str, torch.Tensor]] = field(default_factory=dict)
    """State of its first optimizer by parameter and key, where it has names."""
    no_moments: str = "the source has none"
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
    if path.is_file():
        if path.suffix == ".safetensors":
            return Source(path=path, kind="a safetensors file", weights=read_safetensors(path))
        content = read_torch(path)
        if isinstance(content, Mapping) and "state_dict" in content:
            return _lightning_file(path, content)
        return Source(path=path, kind="a file of weights", weights=_plain_state(content, path))
    if (path / MANIFEST).is_file():
        raise CheckpointError(f"{path}: a lit_fsdp checkpoint already; give it as --ckpt_path")
    if (path / _META).is_file():
        return _lightning_folder(path)
    return _accelerate_folder(path.parent if path.name == _SHARDED_MODEL else path)


def read_lightning_file(path: Path) -> Mapping[str, Any]:
    """Return a ``.ckpt`` of any Lightning strategy that saves one file; its tensors stay there until they are used.

    Raises:
        CheckpointError: It is something else, damaged, or holds more than tensors and plain data.
    """
    content = read_torch(path)
    if not (isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping)):
        raise CheckpointError(
            f"{path}: no Lightning checkpoint: it has no state_dict; lit-fsdp ckpt import reads what other tools save"
        )
    return content


def _lightning_file(path: Path, content: Mapping[str, Any]) -> Source:
    states = content.get("optimizer_states") or []
    moments, why = _named_state(states[0], path) if states else ({}, "the source has none")
    return Source(
        path=path,
        kind="a Lightning checkpoint file",
        weights=_plain_state(content["state_dict"], path),
        moments=moments,
        no_moments=why,
        step=_step(content, path),
    )


def _lightning_folder(folder: Path) -> Source:
    path = disk.inside(folder, _META)
    content = read_torch(path)
    tensors = read_dcp(folder, lambda path: path[0] in _LIGHTNING_HEADS or path[:2] == ("optimizer_0", "state"))
    head = next((head for head in _LIGHTNING_HEADS if any(path[0] == head for path in tensors)), None)
    if head is None:
        raise CheckpointError(f"{folder}: holds no model")
    return Source(
        path=folder,
        kind=f"a sharded Lightning checkpoint ({_LIGHTNING_HEADS[head]})",
        weights={".".join(path[1:]): tensor for path, tensor in tensors.items() if path[0] == head},
        moments=_by_parameter({path[2:]: tensor for path, tensor in tensors.items() if path[0] == "optimizer_0"}),
        step=_step(content, path),
    )


def _accelerate_folder(folder: Path) -> Source:
    """``accelerator.save_state(folder)``, or a ``checkpoint-500`` of the Trainer."""
    sharded = folder / _SHARDED_MODEL
    file = next((folder / name for name in _MODEL_FILES if (folder / name).is_file()), None)
    if (sharded / METADATA).is_file():
        found = read_dcp(sharded, lambda path: path[0] == "model")
        kind, weights = "a sharded Accelerate checkpoint", {".".join(path[1:]): t for path, t in found.items()}
    elif file is None:
        names = ", ".join(sorted(path.name for path in folder.iterdir())[:12]) or "nothing"
        raise CheckpointError(f"{folder}: no model of Accelerate or the Trainer in it; there is: {names}")
    elif not any((folder / name).exists() for name in _TRAINING_FILES):
        raise CheckpointError(f"{folder}: a model without training state; give it as model.name to train from it")
    else:
        path = disk.inside(folder, file.name)
        kind = f"an Accelerate checkpoint ({file.name})"
        weights = _plain_state(read_torch(path), path) if file.suffix == ".bin" else read_safetensors(path)
    step = None
    if (folder / _TRAINER_STATE).is_file():
        path = disk.inside(folder, _TRAINER_STATE)
        step, kind = _step(read_json(path), path), f"{kind} by the Transformers Trainer"
    moments, why = _accelerate_moments(folder)
    return Source(path=folder, kind=kind, weights=weights, moments=moments, no_moments=why, step=step)


def _accelerate_moments(folder: Path) -> tuple[Mapping[str, Mapping[str, torch.Tensor]], str]:
    if (folder / _SHARDED_OPTIMIZER / METADATA).is_file():
        found = read_dcp(folder / _SHARDED_OPTIMIZER, lambda path: path[:2] == ("optimizer", "state"))
        return _by_parameter({path[2:]: tensor for path, tensor in found.items()}), "the source has none"
    for name in _OPTIMIZER_FILES:
        if (folder / name).is_file():
            path = disk.inside(folder, name)
            return _named_state(read_torch(path), path)
    return {}, "the source has none"


def _named_state(state: Any, path: Path) -> tuple[Mapping[str, Mapping[str, torch.Tensor]], str]:
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
    return (found, "the source has none") if all(isinstance(name, str) for name in found) else ({}, _NUMBERED)


def _by_parameter(tensors: Mapping[tuple[str, ...], torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    found: dict[str, dict[str, torch.Tensor]] = {}
    for path, tensor in tensors.items():
        found.setdefault(".".join(path[:-1]), {})[path[-1]] = tensor
    return found


def _plain_state(found: Any, path: Path) -> dict[str, torch.Tensor]:
    """Return ``found`` if it is a state dict of whole tensors: no shards of one rank, no quantized ones."""
    if not isinstance(found, Mapping) or not found:
        raise CheckpointError(f"{path}: no tensors by name")
    plain = (torch.Tensor, torch.nn.Parameter)
    odd = [str(n) for n, value in found.items() if type(value) not in plain or value.is_quantized or value.is_meta]
    if odd:
        raise CheckpointError(f"{path}: not the state dict of a model; no whole plain tensors: {', '.join(odd[:8])}")
    return dict(found)


def _step(content: Any, path: Path) -> int:
    step = content.get("global_step") if isinstance(content, Mapping) else None
    if type(step) is not int or step < 0:
        raise CheckpointError(f"{path}: its global_step is {step!r}")
    return step
