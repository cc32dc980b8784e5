"""What Accelerate's ``save_state`` and the Transformers Trainer write, with FSDP 1, FSDP 2 or without either."""

from __future__ import annotations

from pathlib import Path

from lit_fsdp.checkpoint import files as disk
from lit_fsdp.checkpoint.importing.foreign_dcp import METADATA, ForeignDCP
from lit_fsdp.checkpoint.importing.lightning_source import numbered_or_named
from lit_fsdp.checkpoint.importing.safe_files import (
    plain_state,
    read_json,
    read_torch,
    safetensors_state,
    safetensors_tensors,
)
from lit_fsdp.checkpoint.importing.source import Moments, Source, SourceTensor
from lit_fsdp.errors import CheckpointError

SHARDED_MODEL, SHARDED_OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"
_MODEL_FILES = ("pytorch_model_fsdp.bin", "pytorch_model.bin")
_OPTIMIZER_FILES = ("optimizer.bin", "optimizer.pt")
_TRAINER_STATE = "trainer_state.json"
_SIGNS = (SHARDED_OPTIMIZER, *_OPTIMIZER_FILES, _TRAINER_STATE, "scheduler.bin", "scheduler.pt")


def has_weights(folder: Path) -> bool:
    """Whether ``folder`` holds a model in a form that Accelerate writes."""
    names = ("model.safetensors", "model.safetensors.index.json", *_MODEL_FILES)
    return (folder / SHARDED_MODEL / METADATA).is_file() or any((folder / name).is_file() for name in names)


def has_training_state(folder: Path) -> bool:
    """Whether there is more than a model in ``folder``."""
    return (folder / SHARDED_MODEL).is_dir() or any((folder / name).exists() for name in _SIGNS)


def open_accelerate_folder(folder: Path) -> Source:
    """``accelerator.save_state(folder)``, a Trainer's ``checkpoint-500``, or its ``pytorch_model_fsdp_0`` itself.

    Raises:
        CheckpointError: It is something else, damaged, or in a form that only the same ranks can read.
    """
    if (folder / METADATA).is_file() and folder.name == SHARDED_MODEL:
        folder = folder.parent
    kind, weights = _weights(folder)
    step = None
    if (folder / _TRAINER_STATE).is_file():
        step = read_json(disk.inside(folder, _TRAINER_STATE)).get("global_step")
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise CheckpointError(f"{folder / _TRAINER_STATE}: its global_step is {step!r}")
        kind += " by the Transformers Trainer"
    return Source(kind, weights, _moments(folder), step, f"{_TRAINER_STATE}: global_step")


def open_weights_file(path: Path) -> Source:
    """One file of weights, ``.safetensors`` or ``.bin``.

    Raises:
        CheckpointError: It is something else, or damaged.
    """
    if path.suffix == ".safetensors":
        return Source("a safetensors file", safetensors_tensors(path), None, None)
    return Source("a file of weights", plain_state(read_torch(path), str(path)), None, None)


def _weights(folder: Path) -> tuple[str, dict[str, SourceTensor]]:
    if (folder / SHARDED_MODEL / METADATA).is_file():
        stored = ForeignDCP(folder / SHARDED_MODEL)
        weights = stored.model("model")
        if not weights:
            raise CheckpointError(f"{folder / SHARDED_MODEL}: holds no model")
        return "a sharded Accelerate checkpoint", weights
    for name in _MODEL_FILES:
        if (folder / name).is_file():
            path = disk.inside(folder, name)
            return f"an Accelerate checkpoint ({name})", plain_state(read_torch(path), str(path))
    found = safetensors_state(folder, "model.safetensors")
    if found is not None:
        return "an Accelerate checkpoint (safetensors)", found
    ranks = sorted(path.name for path in folder.glob("pytorch_model_fsdp*_rank*.bin"))
    if ranks:
        raise CheckpointError(
            f"{folder}: {ranks[0]} and others hold what each rank had, which only the same ranks can put together; "
            "load it there and save it with SHARDED_STATE_DICT or FULL_STATE_DICT"
        )
    names = ", ".join(sorted(path.name for path in folder.iterdir())[:12])
    raise CheckpointError(f"{folder}: no model of Accelerate or the Trainer in it; there is: {names or 'nothing'}")


def _moments(folder: Path) -> Moments | None:
    if (folder / SHARDED_OPTIMIZER / METADATA).is_file():
        return ForeignDCP(folder / SHARDED_OPTIMIZER).moments("optimizer")
    for name in _OPTIMIZER_FILES:
        if (folder / name).is_file():
            path = disk.inside(folder, name)
            return numbered_or_named(read_torch(path), str(path))
    return None
