"""One safetensors file, written tensor by tensor and read slice by slice.

The header needs only names, dtypes and shapes, so the data can be streamed: no more than one tensor is in memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from lit_fsdp.checkpoint.files import FileEntry, HashedFile
from lit_fsdp.checkpoint.manifest import Manifest, TensorSpec
from lit_fsdp.errors import CheckpointError

_CODES = {
    "bool": "BOOL", "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64",
    "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
    "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64", "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
_HEADER_ALIGNMENT = 8
_WRITTEN_AT_ONCE = 1 << 20  # elements: hashed and copied while they are in the processor's cache


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """Dtype and whole shape of a tensor or DTensor."""
    return TensorSpec(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def num_bytes(spec: TensorSpec) -> int:
    """Bytes of the data of one tensor."""
    return math.prod(spec.shape) * getattr(torch, spec.dtype).itemsize


def file_order(specs: Mapping[str, TensorSpec]) -> list[str]:
    """Names in the order of their data: wide dtypes first, which keeps every tensor aligned."""
    return sorted(specs, key=lambda name: (-getattr(torch, specs[name].dtype).itemsize, name))


class TensorFile:
    """A safetensors file of ``specs`` in the making, complete and synced after its ``with`` block.

    ``metadata`` are text entries of the header. A dtype that safetensors does not know is a CheckpointError; for the
    rest see :class:`lit_fsdp.checkpoint.files.HashedFile`.
    """

    def __init__(
        self,
        path: Path,
        specs: Mapping[str, TensorSpec],
        metadata: Mapping[str, str] | None = None,
        at_once: bool = True,
    ) -> None:
        self._specs, self._left = specs, file_order(specs)
        header: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "pt"})}
        offset = 0
        for name in self._left:
            spec = specs[name]
            if spec.dtype not in _CODES:
                raise CheckpointError(f"{name}: safetensors has no dtype {spec.dtype}; cast it, or leave it out")
            end = offset + num_bytes(spec)
            header[name] = {"dtype": _CODES[spec.dtype], "shape": list(spec.shape), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _HEADER_ALIGNMENT)
        self._file = HashedFile(path, at_once)
        self._file.write(len(text).to_bytes(8, "little") + text)

    def append(self, name: str, tensor: torch.Tensor) -> None:
        """Write the next tensor in :func:`file_order`, converted to its dtype."""
        assert name == self._left.pop(0), name
        assert tensor.numel() == math.prod(self._specs[name].shape), name
        dtype = getattr(torch, self._specs[name].dtype)
        flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        for part in flat.split(_WRITTEN_AT_ONCE):
            self._file.write(part.to(dtype).view(torch.uint8).numpy())

    @property
    def entry(self) -> FileEntry:
        """What was written."""
        return self._file.entry

    def __enter__(self) -> Self:
        return self

    def __exit__(self, failure: Any, *more: Any) -> None:
        self._file.__exit__(failure)
        assert failure or not self._left, f"not written: {self._left}"


def opened(path: Path) -> Any:
    """``safetensors.safe_open`` for torch on the CPU, with a CheckpointError for what is not safetensors."""
    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not a readable safetensors file: {error}") from error


def read_tensor(manifest: Manifest, name: str) -> torch.Tensor:
    """One whole tensor on the CPU, in memory of its own."""
    spec = manifest.tensors[name]
    whole = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
    for chunk in manifest.chunks[name]:
        where = tuple(slice(begin, begin + size) for begin, size in zip(chunk.offsets, chunk.sizes, strict=True))
        with opened(manifest.file(chunk.file)) as file:
            whole[where].copy_(file.get_tensor(name))
    return whole
