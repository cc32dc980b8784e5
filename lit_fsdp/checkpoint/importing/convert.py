"""From another tool's checkpoint to a folder of ours, one tensor in memory at a time."""

from __future__ import annotations

import importlib.metadata
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from lit_fsdp.checkpoint import staging
from lit_fsdp.checkpoint.importing import accelerate_source, foreign_dcp, lightning_source
from lit_fsdp.checkpoint.importing.moments import STEP, Taken, common_step, take_moments
from lit_fsdp.checkpoint.importing.names import Matched, Target, match
from lit_fsdp.checkpoint.importing.safe_files import read_torch
from lit_fsdp.checkpoint.importing.source import Source, SourceTensor
from lit_fsdp.checkpoint.manifest import MANIFEST, TensorSpec
from lit_fsdp.checkpoint.store import save_checkpoint
from lit_fsdp.errors import CheckpointError

Kind = Literal["auto", "lightning", "accelerate"]
IMPORTED = "lit_fsdp.imported"
"""Key of the state that tells a resume to fill in what only the run knows."""
_PREFIX = "model."
_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What the user decides about an import."""

    kind: Kind = "auto"
    """Whose checkpoint it is."""
    prefix: str | None = None
    """What stands before every name of the model in the source; None finds it."""
    allow_surplus: bool = False
    """Leave out what has no place in the model."""
    step: int | None = None
    """Optimizer steps done; None takes it from the source."""
    dtype: Literal["bf16", "fp32"] | None = None
    """Dtype of floating-point weights and moments; None keeps the source's."""


@dataclass(frozen=True, kw_only=True)
class ImportReport:
    """What an import wrote, and what it did not."""

    folder: Path
    """The checkpoint."""
    kind: str
    """What the source was."""
    num_tensors: int
    """Weights written; a tied one once."""
    num_params: int
    """Elements in them."""
    prefix: str
    """What was taken off the source's names."""
    surplus: list[str]
    """Tensors of the source that were left out."""
    step: int
    """Optimizer steps done, where a run goes on."""
    step_from: str
    """Why that is the step."""
    optimizer: Taken
    """What became of the optimizer."""
    settings: list[dict[str, Any]]
    """The source's learning rates and so on; a run takes its own from its recipe."""
    notes: list[str]
    """What else there is to know."""

    def record(self) -> dict[str, Any]:
        """The report as plain JSON."""
        moments = self.optimizer
        optimizer = {
            "imported": len(moments.state) - moments.num_fresh,
            "zeros": moments.num_fresh,
            "dropped": moments.num_dropped,
            "why": moments.why,
        }
        plain = {name: value for name, value in vars(self).items() if name not in ("folder", "optimizer")}
        return {"folder": str(self.folder), **plain, "optimizer": optimizer}

    def __str__(self) -> str:
        moments = self.optimizer
        lines = [
            f"{self.folder}: {self.num_tensors} tensors, {self.num_params / 1e6:.1f}M parameters, from {self.kind}",
            f"  step:      {self.step} ({self.step_from})",
            f"  names:     {f'without {self.prefix!r}' if self.prefix else 'as they were'}",
        ]
        if moments.state:
            taken = len(moments.state) - moments.num_fresh
            lines.append(f"  optimizer: moments of {taken} parameters, told apart {moments.why}")
            if moments.num_fresh:
                lines.append(f"             {moments.num_fresh} parameters had none and begin at zero")
            if moments.num_dropped:
                lines.append(f"             NOT imported: the state of {moments.num_dropped} others")
        elif moments.num_dropped:
            lines.append(f"  optimizer: NOT imported: the state of {moments.num_dropped} parameters: {moments.why}")
        else:
            lines.append(f"  optimizer: none: {moments.why}; it begins afresh")
        lines += [f"  recipe:    the source had {setting}" for setting in _written(self.settings)]
        lines += [f"  left out:  {name}" for name in self.surplus]
        lines += [f"  note:      {note}" for note in self.notes]
        return "\n".join(lines)


def import_checkpoint(path: Path, out: Path, target: Target, choices: Choices) -> ImportReport:
    """Write the weights, and where they are there the AdamW moments, of ``path`` as a checkpoint folder.

    Nothing of the source is run or changed. The order of data, random state, learning rate and counters of batches
    are the run's own, from its recipe and the step.

    Args:
        path: A file or folder that Lightning, Accelerate or the Transformers Trainer wrote.
        out: Must not exist.
        target: The model it is for.
        choices: What the user says about it.

    Raises:
        CheckpointError: The source is none, damaged, not to be trusted, or does not fit the model.
    """
    path, out = Path(path), Path(out)
    staging.refuse_existing(out)
    source = open_source(path, choices.kind)
    matched = match(source, target, choices.prefix, choices.allow_surplus, str(path))
    taken = take_moments(source, matched, target)
    step, step_from = _step(source, taken, choices.step)
    notes = list(source.notes)
    tensors = _tensors(matched, taken, choices.dtype, notes)
    names = {_PREFIX + name for name in target.parameters if name in taken.state}
    groups: list[dict[str, Any]] = [{"param_groups": []}] if taken.state else []  # empty: the recipe's settings hold
    state = {
        IMPORTED: True,
        "epoch": 0,
        "global_step": step,
        "pytorch-lightning_version": importlib.metadata.version("lightning"),
        "callbacks": {},
        "optimizer_states": groups,
        "lr_schedulers": [{"last_epoch": step, "_step_count": step + 1, "lr_lambdas": []}],
    }
    manifest = {
        "global_step": step,
        "epoch": 0,
        "tied": {_PREFIX + again: _PREFIX + first for again, first in target.ties.items()},
        "model": {**target.entry, "prefix": _PREFIX, "tied": dict(target.ties)},
        "imported": {"from": source.kind, "optimizer": len(names)},
    }
    save_checkpoint(
        out, {name: tensor.read() for name, tensor in tensors.items()}, state, manifest, "full", target.files
    )
    return ImportReport(
        folder=out,
        kind=source.kind,
        num_tensors=len(matched.weights),
        num_params=sum(torch.Size(tensor.spec.shape).numel() for tensor in matched.weights.values()),
        prefix=matched.prefix,
        surplus=matched.surplus,
        step=step,
        step_from=step_from,
        optimizer=taken,
        settings=[dict(setting) for setting in (source.moments.settings if source.moments else ())],
        notes=notes,
    )


def open_source(path: Path, kind: Kind) -> Source:
    """What is at ``path``, opened.

    Raises:
        CheckpointError: Nothing that can be imported, or something else than ``kind``.
    """
    if not os.path.lexists(path):
        raise CheckpointError(f"{path}: does not exist")
    if path.is_file():
        if path.suffix == ".safetensors" and kind != "lightning":
            return accelerate_source.open_weights_file(path)
        content = read_torch(path)
        if kind == "lightning" or (kind == "auto" and lightning_source.is_lightning(content)):
            return lightning_source.open_lightning_file(path, content)
        return accelerate_source.open_weights_file(path)
    if (path / MANIFEST).is_file():
        raise CheckpointError(f"{path}: a lit_fsdp checkpoint already; give it as --ckpt_path")
    if kind == "lightning" or (kind == "auto" and (path / lightning_source.META).is_file()):
        return lightning_source.open_lightning_folder(path)
    inner = path.name == accelerate_source.SHARDED_MODEL and (path / foreign_dcp.METADATA).is_file()
    if kind == "auto" and not inner:
        if accelerate_source.has_weights(path) and not accelerate_source.has_training_state(path):
            raise CheckpointError(
                f"{path}: a model without training state; give it as model.name to train from it, or import it as it "
                "is with --kind accelerate"
            )
        if (path / foreign_dcp.METADATA).is_file():
            raise CheckpointError(
                f"{path}: a torch DCP folder without Lightning's {lightning_source.META}; the folder above "
                f"{accelerate_source.SHARDED_MODEL} is what Accelerate writes"
            )
    return accelerate_source.open_accelerate_folder(path)


def _step(source: Source, taken: Taken, given: int | None) -> tuple[int, str]:
    if given is not None:
        return given, "as given with --step"
    if source.step is not None:
        return source.step, source.step_from
    counted = common_step(taken)
    if counted is not None:
        return counted, "as the optimizer has counted"
    return 0, "the source does not say; --step N sets it"


def _tensors(matched: Matched, taken: Taken, dtype: str | None, notes: list[str]) -> dict[str, SourceTensor]:
    """Everything under our names; moments in the dtype of their weight, as this project keeps them."""
    tensors: dict[str, SourceTensor] = {}
    changed = 0
    for name, weight in matched.weights.items():
        is_float = getattr(torch, weight.spec.dtype).is_floating_point
        kept = _DTYPES[dtype] if dtype is not None and is_float else weight.spec.dtype
        tensors[f"model/{_PREFIX}{name}"] = _cast(weight, kept)
        for key, tensor in taken.state.get(name, {}).items():
            as_dtype = "float32" if key == STEP else kept
            changed += key != STEP and tensor.spec.dtype != as_dtype
            flat = _cast(tensor, as_dtype)
            if key == STEP:
                flat = SourceTensor(TensorSpec(as_dtype, ()), lambda flat=flat: flat.read().reshape(()))  # type: ignore[misc]
            tensors[f"optim/{_PREFIX}{name}/{key}"] = flat
    if changed:
        notes.append(f"{changed} moments had another dtype than what their weights are kept in, and were cast to it")
    return tensors


def _cast(tensor: SourceTensor, dtype: str) -> SourceTensor:
    if tensor.spec.dtype == dtype:
        return tensor
    return SourceTensor(TensorSpec(dtype, tensor.spec.shape), lambda: tensor.read().to(getattr(torch, dtype)))


def _written(settings: list[dict[str, Any]]) -> list[str]:
    """Each group's settings in words."""
    return [", ".join(f"{key} {value}" for key, value in setting.items()) for setting in settings if setting]
