"""Another tool's checkpoint held against a model, name by name, and written as a folder of ours."""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from lit_fsdp.checkpoint.importing.sources import Source
from lit_fsdp.checkpoint.store import save_checkpoint
from lit_fsdp.errors import CheckpointError

IMPORTED = "lit_fsdp.imported"
"""Key of the state that tells a resume to fill in what only the run knows."""
_PREFIX = "model."
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_ADAMW = {"exp_avg", "exp_avg_sq", "step"}
_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:_forward_module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_dp_wrapped_module)\."
)
_COMPUTED = re.compile(r"rotary_emb\.inv_freq$|(?:^|\.)position_ids$")


@dataclass(frozen=True, kw_only=True)
class Target:
    """The transformers model that a source is held against."""

    shapes: Mapping[str, tuple[int, ...]]
    """Shape of every parameter and persistent buffer by name; a tied one once."""
    ties: Mapping[str, str] = field(default_factory=dict)
    """Every further name of a tied parameter, and the name it is stored under."""
    files: Mapping[str, bytes | Path] = field(default_factory=dict)
    """Config and tokenizer under ``hf/``, so that the result can be exported."""
    entry: Mapping[str, Any] = field(default_factory=dict)
    """What else the manifest says of the model."""


@dataclass(frozen=True, kw_only=True)
class ImportReport:
    """What an import wrote, and what it did not."""

    folder: str
    num_tensors: int
    """Weights written; a tied one once."""
    prefix: str
    """What was taken off the source's names."""
    surplus: list[str]
    """Tensors of the source that were left out."""
    step: int
    num_moments: int
    """Parameters whose AdamW state was written; the others begin afresh."""
    no_moments: str
    """Why that is none, if it is."""

    def __str__(self) -> str:
        moments = f"not imported: {self.no_moments}; it begins afresh"
        if self.num_moments:
            moments = f"AdamW state of {self.num_moments} of {self.num_tensors} tensors"
        lines = [
            f"{self.folder}: {self.num_tensors} tensors",
            f"  step:      {self.step}",
            f"  names:     {f'without {self.prefix!r}' if self.prefix else 'as they were'}",
            f"  optimizer: {moments}",
            *(f"  left out:  {name}" for name in self.surplus),
        ]
        return "\n".join(lines)


def import_checkpoint(
    source: Source,
    out: Path,
    target: Target,
    prefix: str | None = None,
    allow_surplus: bool = False,
    step: int | None = None,
    dtype: Literal["bf16", "fp32"] | None = None,
) -> ImportReport:
    """Write the weights, and where its parameters have names the AdamW state, of ``source`` as a checkpoint folder.

    The order of data, random state, learning rate and counters of batches are the run's own, from its recipe and the
    step. The options are those of ``lit-fsdp ckpt import``.

    Raises:
        CheckpointError: The source does not fit the model, or ``out`` exists.
    """
    if os.path.lexists(out):
        raise CheckpointError(f"{out} exists already and is never overwritten; remove it or choose another folder")
    names, prefix = _names(source, target, prefix)
    weights = _weights(source, target, names)
    surplus = sorted(name for name in source.weights if name not in names and not _COMPUTED.search(name))
    _check_fit(source, target, weights, [] if allow_surplus else surplus, prefix)
    moments, why = _moments(source, target, weights, prefix)
    counted = max((int(entry["step"]) for entry in moments.values()), default=0)
    step = next(one for one in (step, source.step, counted) if one is not None)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        kept = _DTYPES[dtype] if dtype and weight.is_floating_point() else weight.dtype
        tensors[f"model/{_PREFIX}{name}"] = weight.detach().to(kept)
        for key, value in moments.get(name, {}).items():  # moments in the dtype of their weight, as a run keeps them
            is_step = key == "step"
            tensors[f"optim/{_PREFIX}{name}/{key}"] = value.float().reshape(()) if is_step else value.to(kept)
    save_checkpoint(
        out,
        tensors=tensors,
        state={
            IMPORTED: True,
            "epoch": 0,
            "global_step": step,
            "pytorch-lightning_version": importlib.metadata.version("lightning"),
            "callbacks": {},
            "optimizer_states": [{"param_groups": []}] if moments else [],  # empty: the recipe's settings hold
            "lr_schedulers": [{"last_epoch": step, "_step_count": step + 1, "lr_lambdas": []}],
        },
        manifest={
            "global_step": step,
            "epoch": 0,
            "tied": {_PREFIX + again: _PREFIX + first for again, first in target.ties.items()},
            "model": {**target.entry, "prefix": _PREFIX, "tied": dict(target.ties)},
        },
        layout="full",
        files=target.files,
    )
    return ImportReport(
        folder=str(out),
        num_tensors=len(weights),
        prefix=prefix,
        surplus=surplus,
        step=step,
        num_moments=len(moments),
        no_moments=why,
    )


def _names(source: Source, target: Target, prefix: str | None) -> tuple[dict[str, str], str]:
    """Return the name in the model by name in the source, and the prefix; found by most matches if it is None."""
    clean = {name: _WRAPPERS.sub("", name) for name in source.weights}
    wanted = {*target.shapes, *target.ties}
    if prefix is None:
        starts = [(name, match.end()) for name in clean.values() for match in re.finditer(r"^|\.", name)]
        votes = Counter(name[:start] for name, start in starts if name[start:] in wanted)
        best = sorted(prefix for prefix, count in votes.items() if count == max(votes.values()))
        if len(best) > 1:
            raise CheckpointError(
                f"{source.path}: holds the model {len(best)} times, under {', '.join(map(repr, best))}; "
                f"say which one with --prefix {best[-1]}"
            )
        prefix = best[0] if best else ""
    inner = {name: one.removeprefix(prefix) for name, one in clean.items() if one.startswith(prefix)}
    return {name: one for name, one in inner.items() if one in wanted}, prefix


def _weights(source: Source, target: Target, names: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Return the weights by name in the model; copies of one that is tied must be equal, as one of them is kept."""
    found: dict[str, torch.Tensor] = {}
    for original, name in names.items():
        stored = target.ties.get(name, name)
        tensor = source.weights[original]
        if stored in found and not torch.equal(found[stored], tensor):
            raise CheckpointError(
                f"{source.path}: {original} is not the other copy of {stored}, but this model ties them; is "
                "tie_word_embeddings wrong in the config given as --model?"
            )
        found[stored] = tensor
    return {name: found[name] for name in target.shapes if name in found}


def _check_fit(
    source: Source, target: Target, weights: Mapping[str, torch.Tensor], surplus: list[str], prefix: str
) -> None:
    lines = [f"missing in the source: {prefix}{name}" for name in target.shapes if name not in weights]
    lines += [f"no place in the model: {name}" for name in surplus]
    for name, tensor in weights.items():
        if tensor.shape != tuple(target.shapes[name]):
            lines.append(f"{name}: {list(tensor.shape)} in the source, {list(target.shapes[name])} in the model")
    if lines:
        advice = "; --allow-surplus leaves out what has no place" if surplus else ""
        text = "".join(f"\n  {line}" for line in lines)
        raise CheckpointError(f"{source.path}: does not fit the model given as --model{advice}:{text}")


def _moments(
    source: Source, target: Target, weights: Mapping[str, torch.Tensor], prefix: str
) -> tuple[dict[str, Mapping[str, torch.Tensor]], str]:
    """Return the AdamW state by name in the model, or nothing and why; it is taken whole or not at all."""
    found: dict[str, Mapping[str, torch.Tensor]] = {}
    for original, entry in source.moments.items():
        inner = _WRAPPERS.sub("", original).removeprefix(prefix)
        name = target.ties.get(inner, inner)
        if name not in weights or not entry:  # of what was left out; never stepped
            continue
        if set(entry) != _ADAMW or any(entry[key].shape != weights[name].shape for key in _ADAMW - {"step"}):
            held = ", ".join(f"{key} {list(value.shape)}" for key, value in entry.items())
            return {}, f"it is not AdamW's for {name} {list(weights[name].shape)}: {held}"
        found[name] = entry
    return found, source.no_moments if not source.moments else "none of its parameters is the model's"
