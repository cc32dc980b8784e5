"""Stream a safetensors file tensor by tensor: its header needs only names, dtypes and shapes."""

import functools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from lit_fsdp.checkpoint.files import HashedFile
from lit_fsdp.checkpoint.manifest import Manifest, TensorSpec
from lit_fsdp.errors import CheckpointError
from lit_fsdp.models.tensor_files import CODES, SIZE_BYTES, read_header, read_rows

_HEADER_ALIGNMENT = 8
_WRITTEN_AT_ONCE = 1 << 20  # elements: hashed and copied while in the CPU cache


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """Return dtype and full shape of a tensor or DTensor."""
    return TensorSpec(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def num_bytes(spec: TensorSpec) -> int:
    """Return the data size of one tensor in bytes."""
    return math.prod(spec.shape) * getattr(torch, spec.dtype).itemsize


def file_order(specs: Mapping[str, TensorSpec]) -> list[str]:
    """Return names in data order: wide dtypes first, which keeps every tensor aligned."""
    return sorted(specs, key=lambda name: (-getattr(torch, specs[name].dtype).itemsize, name))


class TensorFile(HashedFile):
    """Writer of a safetensors file of ``specs``; its header also has the text entries ``metadata``."""

    def __init__(
        self, path: Path, specs: Mapping[str, TensorSpec], metadata: Mapping[str, str], at_once: bool = True
    ) -> None:
        self._specs, self._left = specs, file_order(specs)
        header: dict[str, Any] = {"__metadata__": dict(metadata)}
        offset = 0
        for name in self._left:
            spec = specs[name]
            if spec.dtype not in CODES:
                raise CheckpointError(f"{name}: safetensors has no dtype {spec.dtype}; cast it, or remove it")
            end = offset + num_bytes(spec)
            header[name] = {"dtype": CODES[spec.dtype], "shape": list(spec.shape), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _HEADER_ALIGNMENT)
        super().__init__(path, at_once)
        self.write(len(text).to_bytes(SIZE_BYTES, "little") + text)

    def append(self, name: str, tensor: torch.Tensor) -> None:
        """Write the next tensor in :func:`file_order`, converted to its dtype."""
        assert name == self._left.pop(0), name
        assert tensor.shape == self._specs[name].shape, name
        dtype = getattr(torch, self._specs[name].dtype)
        flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        for part in flat.split(_WRITTEN_AT_ONCE):
            self.write(part.to(dtype).view(torch.uint8).numpy())

    def __exit__(self, failure: Any, *more: Any) -> None:
        super().__exit__(failure, *more)
        assert failure or not self._left, f"not written: {self._left}"


def read_tensor(manifest: Manifest, name: str) -> torch.Tensor:
    """Read one full tensor into new CPU memory."""
    name = manifest.averages.get(name, name)
    spec = manifest.tensors[name]
    whole = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
    for chunk in manifest.chunks[name]:
        where = tuple(slice(begin, begin + size) for begin, size in zip(chunk.offsets, chunk.sizes, strict=True))
        path = manifest.file(chunk.file)
        try:
            part = read_rows(path, *_header(path, path.stat().st_mtime_ns)[name])
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            raise CheckpointError(f"{path}: not a readable safetensors file: {error}") from error
        if (part.shape, part.dtype) == (whole.shape, whole.dtype):
            return part
        whole[where].copy_(part)
    return whole


@functools.lru_cache(maxsize=128)  # files; at 400 bytes per tensor
def _header(path: Path, changed: int) -> dict[str, tuple[tuple[int, ...], str, int]]:
    """Cache :func:`read_header` by modification time: an export reads tensor by tensor, each from all files."""
    return read_header(path)
