"""``torch.distributed.checkpoint`` folders of other tools, read without trusting a pickle.

DCP describes a checkpoint in ``.metadata``, a raw pickle that its own reader would run as it is. Here the pickle may
name nothing but DCP's own description classes.
"""

from __future__ import annotations

import io
import pathlib
import pickle
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint import metadata as dcp_metadata

from lit_fsdp.errors import CheckpointError

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
_PATH_MODULES = ("pathlib", "pathlib._local")  # the second in Python 3.13


def unpickle_description(path: Path) -> dcp_metadata.Metadata:
    """A ``.metadata`` file, read by a restricted unpickler and compared with nothing.

    It may name the folder it was written to, as DCP's own writer does: a path does nothing by itself.

    Raises:
        CheckpointError: It names anything but DCP's description classes, is something else, or is damaged.
    """
    try:
        with path.open("rb") as file:
            description = _RestrictedUnpickler(file).load()
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(f"{path}: damaged ({error!r}); use another checkpoint") from error
    if not isinstance(description, dcp_metadata.Metadata):
        raise CheckpointError(f"{path}: not the description of a checkpoint")
    return description


def assemble(folder: Path, description: dcp_metadata.Metadata, name: str) -> torch.Tensor:
    """One whole tensor on the CPU from the shards in ``folder``, whose places have been checked; not collective."""
    entry = cast(dcp_metadata.TensorStorageMetadata, description.state_dict_metadata[name])
    whole = torch.empty(entry.size, dtype=entry.properties.dtype)
    for chunk in entry.chunks:
        place = description.storage_data[dcp_metadata.MetadataIndex(name, chunk.offsets)]
        with (folder / place.relative_path).open("rb") as file:
            file.seek(place.offset)
            content = io.BytesIO(file.read(place.length))
        shard = torch.load(content, map_location="cpu", weights_only=True)
        where = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
        whole[where].copy_(shard)
    return whole


class _RestrictedUnpickler(pickle.Unpickler):
    """Unpickles DCP's description classes and refuses every other name before it is imported."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._name = file.name

    def find_class(self, module: str, name: str) -> Any:
        if module in _PATH_MODULES and name in ("PosixPath", "WindowsPath"):
            return pathlib.PurePath
        if name not in _CLASSES.get(module, ()):
            raise CheckpointError(
                f"{self._name}: refused: it names {module}.{name}, which no checkpoint description needs; "
                "do not trust this checkpoint"
            )
        return super().find_class(module, name)
