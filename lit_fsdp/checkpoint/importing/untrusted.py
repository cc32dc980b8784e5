"""Files of other tools, opened so that nothing in them can run: torch.save, safetensors, and DCP folders."""

from __future__ import annotations

import json
import pathlib
import pickle
import warnings
from collections.abc import Callable
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
from lit_fsdp.errors import CheckpointError

METADATA = ".metadata"
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
    path = disk.inside(folder, METADATA)
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
            raise CheckpointError(f"refused: {METADATA} names {module}.{name}, which no description of tensors needs")
        return super().find_class(module, name)


def _damaged(path: Path, error: BaseException) -> CheckpointError:
    text = (str(error).strip() or repr(error)).splitlines()[0][:200]
    return CheckpointError(f"{path}: damaged, or not what its name says ({text})")
