"""Import checkpoints of Lightning, Accelerate and the HF Trainer: no pickle is trusted, tensors are matched by name."""

import importlib.metadata
import json
import os
import pathlib
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from lit_fsdp.checkpoint import files as disk
from lit_fsdp.checkpoint.store import save_checkpoint
from lit_fsdp.errors import CheckpointError

IMPORTED = "lit_fsdp.imported"
"""State key that tells a resume to fill in everything that only the run knows."""
_PREFIX = "model."
_ADAMW = {"exp_avg", "exp_avg_sq", "step"}
_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:_forward_module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_dp_wrapped_module)\."
)
_META = "meta.pt"
_LIGHTNING_HEADS = ("model", "state_dict")  # of FSDPStrategy and of ModelParallelStrategy
_TRAINER_STATE = "trainer_state.json"
_SHARDED_MODEL, _SHARDED_OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"
_MODEL_FILES = ("pytorch_model_fsdp.bin", "pytorch_model.bin", "model.safetensors", "model.safetensors.index.json")
_OPTIMIZER_FILES = ("optimizer.bin", "optimizer.pt")
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
"""All classes that DCP metadata may reference, besides the path that it was written to."""


@dataclass(frozen=True)
class Source:
    """Checkpoint of another tool."""

    path: Path
    weights: Mapping[str, torch.Tensor]
    moments: Mapping[Any, Mapping[str, torch.Tensor]] = field(default_factory=dict)
    """State of its first optimizer by parameter name (or index, without names) and key."""
    step: int | None = None
    """Completed optimizer steps, if known."""


def import_checkpoint(
    source: Source,
    out: Path,
    shapes: Mapping[str, tuple[int, ...]],
    ties: Mapping[str, str],
    files: Mapping[str, bytes | Path],
    entry: Mapping[str, Any],
    prefix: str | None = None,
    allow_surplus: bool = False,
) -> str:
    """Write the weights, and the AdamW state if its parameters have names, of ``source`` as a checkpoint folder.

    Everything else (data order, random state, learning rate, counters) comes from the run. The mapping ``shapes`` has
    parameters and buffers of the model, tied ones once; the mapping ``ties`` has their further names; the mapping
    ``entry`` has the remaining model entries of the manifest. Returns a readable summary.

    Raises:
        CheckpointError: The source does not fit the model, or ``out`` exists.
    """
    if os.path.lexists(out):
        raise CheckpointError(f"{out} already exists and is never overwritten; remove it or choose another folder")
    clean = {name: _WRAPPERS.sub("", name) for name in source.weights}
    if prefix is None:
        longest = max(shapes, key=len)
        found = sorted(name.removesuffix(longest) for name in clean.values() if f".{name}".endswith(f".{longest}"))
        if len(found) > 1:
            text = f"{len(found)} times, under {', '.join(map(repr, found))}; select one with --prefix {found[-1]}"
            raise CheckpointError(f"{source.path}: contains the model {text}")
        prefix = found[0] if found else ""
    wanted = {f"{prefix}{name}": ties.get(name, name) for name in (*shapes, *ties)}
    weights: dict[str, torch.Tensor] = {}
    surplus = []
    for original, name in clean.items():
        stored, tensor = wanted.get(name), source.weights[original]
        if stored is None:
            surplus.append(original)
        elif stored in weights and not torch.equal(weights[stored], tensor):
            text = f"{original} and {stored} differ, but this model ties them"
            raise CheckpointError(f"{source.path}: {text}; is tie_word_embeddings wrong in the config of --model?")
        else:
            weights[stored] = tensor
    lines = [f"missing in the source: {prefix}{name}" for name in shapes if name not in weights]
    if not allow_surplus:
        of_adapter = "not supported beside adapters; merge them with peft first, and train the merged model"
        why = of_adapter if entry.get("adapter") else "not in the model (--allow-surplus ignores it)"
        lines += [f"{why}: {name}" for name in surplus]
    for name, tensor in weights.items():
        if tensor.shape != tuple(shapes[name]):
            lines.append(f"{name}: {list(tensor.shape)} in the source, {list(shapes[name])} in the model")
    if lines:
        raise CheckpointError("\n  ".join([f"{source.path}: does not fit the model of --model:", *lines]))
    moments = _moments(source, wanted, weights)
    steps = (int(state["step"]) for state in moments.values())
    step = max(steps, default=0) if source.step is None else source.step
    tensors = {f"model/{_PREFIX}{name}": weights[name].detach() for name in shapes}
    for name, moment in moments.items():  # in the dtype of the weight, as in a run
        for key, value in moment.items():
            kept = value.float().reshape(()) if key == "step" else value.to(weights[name].dtype)
            tensors[f"optim/{_PREFIX}{name}/{key}"] = kept
    save_checkpoint(
        out,
        tensors=tensors,
        state={
            IMPORTED: True,
            "epoch": 0,
            "global_step": step,
            "pytorch-lightning_version": importlib.metadata.version("lightning"),
            "callbacks": {},
            "optimizer_states": [{"param_groups": []}] if moments else [],  # empty: the recipe's settings apply
            "lr_schedulers": [{"last_epoch": step, "_step_count": step + 1, "lr_lambdas": []}],
        },
        manifest={
            "global_step": step,
            "epoch": 0,
            "tied": {_PREFIX + again: _PREFIX + first for again, first in ties.items()},
            "model": {**entry, "prefix": _PREFIX, "tied": dict(ties)},
        },
        layout="full",
        files=files,
    )
    what = f"{len(weights)} weights, AdamW state of {len(moments)} of them; the others start with new state"
    return "\n".join([f"{out}: step {step}, {what}", *(f"  left out: {name}" for name in surplus)])


def _moments(
    source: Source, wanted: Mapping[str, str], weights: Mapping[str, torch.Tensor]
) -> dict[str, Mapping[str, torch.Tensor]]:
    """Return the AdamW state by model name; empty unless every entry fits its parameter."""
    found: dict[str, Mapping[str, torch.Tensor]] = {}
    for original, entry in source.moments.items():
        name = wanted.get(_WRAPPERS.sub("", str(original)))
        if name is None or not entry:  # numbered or ignored; without steps
            continue
        if set(entry) != _ADAMW or any(entry[key].shape != weights[name].shape for key in _ADAMW - {"step"}):
            return {}
        found[name] = entry
    return found


def open_source(path: Path) -> Source:
    """Open the checkpoint at ``path``; files are read when their tensors are used, sharded files are kept in memory.

    Raises:
        CheckpointError: The checkpoint is not supported, damaged, or unsafe.
    """
    if path.is_file() and path.suffix != ".safetensors":
        content = read_lightning_file(path)
        states = content.get("optimizer_states")
        moments = _named_state(states[0], path) if states else {}
        return Source(path, _plain_state(content["state_dict"], path), moments, content.get("global_step"))
    if path.is_file():
        return Source(path, read_safetensors(path))
    if (path / _META).is_file():
        step = read_torch(disk.inside(path, _META)).get("global_step")
        tensors = read_dcp(path, lambda key: key[0] in _LIGHTNING_HEADS or key[:2] == ("optimizer_0", "state"))
        weights = {".".join(key[1:]): tensor for key, tensor in tensors.items() if key[0] in _LIGHTNING_HEADS}
        of_optimizer = {key[2:]: tensor for key, tensor in tensors.items() if key[0] == "optimizer_0"}
        return Source(path, weights, _by_parameter(of_optimizer), step)
    return _accelerate_folder(path)


def read_lightning_file(path: Path) -> Mapping[str, Any]:
    """Read a ``.ckpt`` of any Lightning strategy that saves one file; tensors are memory-mapped."""
    content = read_torch(path)
    if not (isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping)):
        raise CheckpointError(f"{path}: not a Lightning checkpoint: it has no state_dict")
    return content


def _accelerate_folder(folder: Path) -> Source:
    """Open a folder of ``accelerator.save_state(folder)``, or a ``checkpoint-500`` of the HF Trainer."""
    if not folder.exists():
        raise CheckpointError(f"{folder} does not exist")
    there = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    file = next((folder / name for name in _MODEL_FILES if name in there), None)
    if _SHARDED_MODEL in there:
        found = read_dcp(folder / _SHARDED_MODEL, lambda key: key[0] == "model")
        weights = {".".join(key[1:]): tensor for key, tensor in found.items()}
    elif file is None or not there & {*_OPTIMIZER_FILES, _SHARDED_OPTIMIZER, _TRAINER_STATE}:
        text = f"not a checkpoint of Lightning, Accelerate or the Trainer: {', '.join(sorted(there)[:12]) or 'empty'}"
        raise CheckpointError(f"{folder}: {text}; use a model without training state as model.name")
    else:
        path = disk.inside(folder, file.name)
        weights = _plain_state(read_torch(path), path) if file.suffix == ".bin" else read_safetensors(path)
    moments: Mapping[Any, Mapping[str, torch.Tensor]] = {}
    optimizer = next((disk.inside(folder, name) for name in _OPTIMIZER_FILES if name in there), None)
    if _SHARDED_OPTIMIZER in there:
        found = read_dcp(folder / _SHARDED_OPTIMIZER, lambda key: key[:2] == ("optimizer", "state"))
        moments = _by_parameter({key[2:]: tensor for key, tensor in found.items()})
    elif optimizer is not None:
        moments = _named_state(read_torch(optimizer), optimizer)
    return Source(folder, weights, moments, trainer_step(folder))


def trainer_step(folder: Path) -> int | None:
    """Completed steps of a checkpoint of the Trainer; None for other folders."""
    is_there = (folder / _TRAINER_STATE).is_file()
    return read_json(disk.inside(folder, _TRAINER_STATE)).get("global_step") if is_there else None


def _named_state(state: Any, path: Path) -> dict[Any, dict[str, torch.Tensor]]:
    """Return the ``state_dict()`` of an optimizer by parameter name, or by index if parameters have no names."""
    try:
        names = {
            param: name
            for group in state["param_groups"]
            for param, name in zip(group["params"], group.get("param_names") or group["params"], strict=True)
        }
        return {
            names[param]: {key: torch.as_tensor(value) for key, value in entry.items() if value is not None}
            for param, entry in state["state"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"{path}: invalid optimizer state ({error!r})") from error


def _by_parameter(tensors: Mapping[tuple[str, ...], torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    found: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        found.setdefault(".".join(key[:-1]), {})[key[-1]] = tensor
    return found


def _plain_state(found: Any, path: Path) -> dict[str, torch.Tensor]:
    """Return ``found`` if it is a state dict of full tensors, not shards."""
    if not isinstance(found, Mapping) or any(type(t) not in (torch.Tensor, torch.nn.Parameter) for t in found.values()):
        raise CheckpointError(f"{path}: not a model state dict of full plain tensors by name")
    return dict(found)


def read_torch(path: Path) -> Any:
    """Read tensors and plain data of a ``torch.save`` file; tensors are memory-mapped."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:  # torch's text advises to trust the file
        named = str(error).partition("GLOBAL ")[2].split()
        what = f"it contains {named[0]}, which is neither a tensor nor plain data" if named else "it is not plain data"
        fix = "save it again without that object (often in save_hyperparameters or a callback's state)"
        raise CheckpointError(f"{path}: rejected: {what}; none of its code was run; {fix}") from None
    except Exception as error:  # a damaged file can raise anything
        if isinstance(error, RuntimeError) and not zipfile.is_zipfile(path):  # torch names an option of torch.save
            text = "damaged, or not a file of torch.save in its zip format (the default since torch 1.6)"
            raise CheckpointError(f"{path}: {text}") from None
        raise _damaged(path, error) from None


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file."""
    try:
        return {**json.loads(path.read_bytes())}
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a JSON object ({error})") from error


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """Memory-map the tensors of a safetensors file, or of all files in an index."""
    if path.suffix == ".json":
        files = read_json(path).get("weight_map", {})
        paths = [disk.inside(path.parent, file) for file in sorted(set(files.values()), key=str)]
        return {name: tensor for one in paths for name, tensor in read_safetensors(one).items()}
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not a readable safetensors file: {error}") from error


def read_dcp(folder: Path, wanted: Callable[[tuple[str, ...]], bool]) -> dict[tuple[str, ...], torch.Tensor]:
    """Read the wanted tensors of a ``torch.distributed.checkpoint`` folder, by their path in the saved state."""
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
        for key in tensors:  # DCP does not detect regions without a shard
            shards = [dcp_metadata.MetadataIndex(key, chunk.offsets) for chunk in entries[key].chunks]
            if sum(chunk.sizes.numel() for chunk in entries[key].chunks) != tensors[key].numel():
                raise CheckpointError(f"{path}: the shards of {key} do not cover the tensor")
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
    """DCP reader with safely loaded metadata; the base class would unpickle it without restrictions."""

    def __init__(self, path: Path, description: dcp_metadata.Metadata) -> None:
        super().__init__(path)
        self._description = description

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp_metadata.Metadata:
        return self._description


class _DescriptionUnpickler(pickle.Unpickler):
    """Unpickler that rejects all names except those of DCP metadata, before they are imported."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("pathlib", "pathlib._local") and name in ("PosixPath", "WindowsPath"):
            return pathlib.PurePath
        if name not in _CLASSES.get(module, ()):
            raise CheckpointError(f"rejected: {_METADATA} contains {module}.{name}, which tensor metadata never needs")
        return super().find_class(module, name)


def _damaged(path: Path, error: BaseException) -> CheckpointError:
    text = (str(error).strip() or repr(error)).splitlines()[0][:200]
    return CheckpointError(f"{path}: damaged, or its content does not match its file name ({text})")
