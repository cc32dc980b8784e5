"""Checkpoints of other tools as checkpoints of ours: read without trusting a pickle, matched name by name.

What Lightning, Accelerate and the Transformers Trainer save is recognized by its files: weights, AdamW state, step.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import pathlib
import pickle
import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from lit_fsdp.checkpoint import files as disk
from lit_fsdp.checkpoint.files import MANIFEST
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
_META = "meta.pt"
_LIGHTNING_HEADS = ("model", "state_dict")  # of FSDPStrategy and of ModelParallelStrategy
_TRAINER_STATE = "trainer_state.json"
_SHARDED_MODEL, _SHARDED_OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"
_MODEL_FILES = ("pytorch_model_fsdp.bin", "pytorch_model.bin", "model.safetensors", "model.safetensors.index.json")
_OPTIMIZER_FILES = ("optimizer.bin", "optimizer.pt")
_TRAINING_FILES = (_SHARDED_OPTIMIZER, *_OPTIMIZER_FILES, _TRAINER_STATE, "scheduler.bin", "scheduler.pt")
_NONE, _NUMBERED = "the source has none", "its parameters have numbers, not names"
Moments = Mapping[str, Mapping[str, torch.Tensor]]
_METADATA = ".metadata"
_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "collections": {"OrderedDict"},
}  # fmt: skip
"""All that a description of DCP names, beside the path that it was written to."""


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
    if (sharded / _METADATA).is_file():
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
    if (folder / _SHARDED_OPTIMIZER / _METADATA).is_file():
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


def read_torch(path: Path) -> Any:
    """Return the tensors and plain data of a file of ``torch.save``; tensors stay there until they are used."""
    try:
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap can only be used" not in str(error):  # torch's format before 1.6 cannot be mapped
                raise
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        # torch's own text goes on with the advice to trust the file
        named = str(error).partition("GLOBAL ")[2].split()
        what = f"it names {named[0]}, which is neither a tensor nor plain data" if named else "it is no plain data"
        raise CheckpointError(
            f"{path}: refused: {what}; nothing of it was run. If you trust where it comes from, save it again there "
            "without that object (in Lightning often in save_hyperparameters or in the state of a callback)"
        ) from None
    except Exception as error:  # a damaged file can raise anything
        raise _damaged(path, error) from None


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object, or raise CheckpointError."""
    try:
        return {**json.loads(path.read_bytes())}
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a JSON object ({error})") from error


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file, or of all files that an index beside them names; mapped, not read."""
    if path.suffix == ".json":
        files = read_json(path).get("weight_map", {})
        paths = [disk.inside(path.parent, file) for file in sorted(set(files.values()), key=str)]
        return {name: tensor for one in paths for name, tensor in read_safetensors(one).items()}
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not a readable safetensors file: {error}") from error


def read_dcp(folder: Path, wanted: Callable[[tuple[str, ...]], bool]) -> dict[tuple[str, ...], torch.Tensor]:
    """Return wanted tensors of a ``torch.distributed.checkpoint`` folder by their path in the state that was saved.

    Raises:
        CheckpointError: The description names anything but DCP's own classes, a path leads out of the folder, a file
            is missing or damaged, or the shards do not make up a tensor.
    """
    path = disk.inside(folder, _METADATA)
    try:
        with path.open("rb") as file:
            description = _DescriptionUnpickler(file).load()
        entries, places, saved = description.state_dict_metadata, description.storage_data, description.planner_data
        paths = {key: tuple(map(str, (saved or {}).get(key) or key.split("."))) for key in entries}
        tensors = {
            key: torch.empty(entry.size, dtype=entry.properties.dtype)
            for key, entry in entries.items()
            if isinstance(entry, dcp_metadata.TensorStorageMetadata) and wanted(paths[key])
        }
        for key in tensors:  # DCP leaves what no shard covers as it is
            shards = [dcp_metadata.MetadataIndex(key, chunk.offsets) for chunk in entries[key].chunks]
            if sum(chunk.sizes.numel() for chunk in entries[key].chunks) != tensors[key].numel():
                raise CheckpointError(f"{path}: the shards of {key} do not make up the tensor")
            for shard in shards:
                disk.inside(folder, places[shard].relative_path)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            planner = DefaultLoadPlanner(flatten_state_dict=False)
            dcp.load(dict(tensors), storage_reader=_Reader(folder, description), planner=planner, no_dist=True)
    except CheckpointError:
        raise
    except CheckpointException as error:
        raise _damaged(folder, error.failures[0][0]) from None
    except Exception as error:  # a damaged pickle or shard can raise anything
        raise _damaged(folder, error) from None
    return {paths[key]: tensor for key, tensor in tensors.items()}


class _Reader(dcp.FileSystemReader):
    """DCP's reader, which would unpickle its description freely, with one that has been read."""

    def __init__(self, path: Path, description: dcp_metadata.Metadata) -> None:
        super().__init__(path)
        self._description = description

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp_metadata.Metadata:
        return self._description


class _DescriptionUnpickler(pickle.Unpickler):
    """Refuses every name but those of DCP's description before it is imported."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("pathlib", "pathlib._local") and name in ("PosixPath", "WindowsPath"):
            return pathlib.PurePath
        if name not in _CLASSES.get(module, ()):
            raise CheckpointError(f"refused: {_METADATA} names {module}.{name}, which no description of tensors needs")
        return super().find_class(module, name)


def _damaged(path: Path, error: BaseException) -> CheckpointError:
    text = (str(error).strip() or repr(error)).splitlines()[0][:200]
    return CheckpointError(f"{path}: damaged, or not what its name says ({text})")
