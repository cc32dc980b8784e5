"""A ``torch.distributed.checkpoint`` folder of another tool: no manifest, keys flattened by DCP's planner."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp_metadata

from lit_fsdp.checkpoint import dcp_files
from lit_fsdp.checkpoint import files as disk
from lit_fsdp.checkpoint.importing.source import Moments, SourceTensor
from lit_fsdp.checkpoint.manifest import TensorSpec
from lit_fsdp.errors import CheckpointError

METADATA = ".metadata"
_SETTINGS = ("lr", "betas", "eps", "weight_decay")
_MOST_BYTES = 1 << 24


class ForeignDCP:
    """The tensors and small values of one folder by their path in the state that was saved.

    Args:
        folder: With ``.metadata``.

    Raises:
        CheckpointError: The description names anything but DCP's own classes, a file is missing or cut short, a
            path leads out of the folder, or the shards do not cover a tensor.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._description = dcp_files.unpickle_description(disk.inside(folder, METADATA))
        planner_data = self._description.planner_data
        self._keys: dict[tuple[Any, ...], str] = {}
        for key in self._description.state_dict_metadata:
            path = planner_data.get(key) if isinstance(planner_data, dict) else None
            self._keys[tuple(path) if isinstance(path, (tuple, list)) else tuple(key.split("."))] = key
        self._check_places()

    def heads(self) -> set[str]:
        """The first words of all paths."""
        return {str(path[0]) for path in self._keys}

    def tensors(self, *head: Any) -> dict[tuple[Any, ...], SourceTensor]:
        """Tensors whose path begins with ``head``, by the rest of it."""
        found = {}
        for path, key in self._keys.items():
            entry = self._description.state_dict_metadata[key]
            if path[: len(head)] == head and isinstance(entry, dcp_metadata.TensorStorageMetadata):
                spec = TensorSpec(str(entry.properties.dtype).removeprefix("torch."), tuple(entry.size))
                found[path[len(head) :]] = SourceTensor(spec, lambda key=key: self._read(key))  # type: ignore[misc]
        return found

    def value(self, *path: Any) -> Any:
        """A small plain value, or None if there is none at ``path``."""
        key = self._keys.get(path)
        if key is None or not isinstance(self._description.state_dict_metadata[key], dcp_metadata.BytesStorageMetadata):
            return None
        place = self._description.storage_data[dcp_metadata.MetadataIndex(key)]
        if place.length > _MOST_BYTES:
            raise CheckpointError(f"{self.folder}: {key} has {place.length} bytes, too many for a setting")
        with disk.inside(self.folder, place.relative_path).open("rb") as file:
            file.seek(place.offset)
            content = io.BytesIO(file.read(place.length))
        try:
            return torch.load(content, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged pickle can raise anything
            text = (str(error) or repr(error)).splitlines()[0][:200]
            raise CheckpointError(f"{self.folder}: refused: {key} is no plain value ({text})") from None

    def model(self, head: str) -> dict[str, SourceTensor]:
        """The model's tensors under ``head``, by name."""
        return {".".join(map(str, path)): tensor for path, tensor in self.tensors(head).items()}

    def moments(self, head: str) -> Moments | None:
        """The optimizer under ``head``; its parameters have names, or None if it is not there."""
        state: dict[str | int, dict[str, SourceTensor]] = {}
        for path, tensor in self.tensors(head, "state").items():
            name = path[0] if len(path) == 2 else ".".join(map(str, path[:-1]))
            state.setdefault(name, {})[str(path[-1])] = tensor
        if not state:
            return None
        groups: list[list[str | int]] = []
        settings: list[dict[str, Any]] = []
        while (params := self.value(head, "param_groups", len(groups), "params")) is not None:
            found = {key: self.value(head, "param_groups", len(groups), key) for key in _SETTINGS}
            settings.append({key: value for key, value in found.items() if value is not None})
            groups.append(list(params))
        return Moments(state, groups or [list(state)], settings)

    def _read(self, key: str) -> torch.Tensor:
        try:
            return dcp_files.assemble(self.folder, self._description, key)
        except CheckpointError:
            raise
        except Exception as error:  # torch.load of a damaged shard can raise anything
            text = (str(error) or repr(error)).splitlines()[0][:200]
            raise CheckpointError(f"{self.folder}: {key}: damaged or refused ({text})") from None

    def _check_places(self) -> None:
        for index, place in self._description.storage_data.items():
            if not isinstance(index, dcp_metadata.MetadataIndex) or getattr(place, "transform_descriptors", None):
                raise CheckpointError(f"{self.folder / METADATA}: {index} is stored in an unknown way")
            size = disk.inside(self.folder, place.relative_path).stat().st_size
            if place.offset < 0 or place.length < 0 or place.offset + place.length > size:
                raise CheckpointError(
                    f"{self.folder / place.relative_path}: {size} bytes, but {index.fqn} ends at byte "
                    f"{place.offset + place.length}; the file was cut short or is another checkpoint's"
                )
        for key, entry in self._description.state_dict_metadata.items():
            if isinstance(entry, dcp_metadata.TensorStorageMetadata):
                covered = sum(torch.Size(chunk.sizes).numel() for chunk in entry.chunks)
                places = [dcp_metadata.MetadataIndex(key, chunk.offsets) for chunk in entry.chunks]
                if covered != entry.size.numel() or any(p not in self._description.storage_data for p in places):
                    raise CheckpointError(f"{self.folder / METADATA}: the shards of {key} do not make up the tensor")
