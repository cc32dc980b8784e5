"""Write and read a safetensors file tensor by tensor: its header needs only names, dtypes and shapes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from lit_fsdp.checkpoint.files import HashedFile
from lit_fsdp.checkpoint.manifest import Manifest, TensorSpec
from lit_fsdp.errors import CheckpointError

_CODES = {
    "bool": "BOOL", "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64",
    "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
    "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64", "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
_DTYPES = {code: getattr(torch, name) for name, code in _CODES.items()}
_HEADER_ALIGNMENT = 8
_SIZE_BYTES = 8
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
    """Writer of a safetensors file of ``specs``; ``metadata`` are text entries of its header."""

    def __init__(
        self, path: Path, specs: Mapping[str, TensorSpec], metadata: Mapping[str, str], at_once: bool = True
    ) -> None:
        self._specs, self._left = specs, file_order(specs)
        header: dict[str, Any] = {"__metadata__": dict(metadata)}
        offset = 0
        for name in self._left:
            spec = specs[name]
            if spec.dtype not in _CODES:
                raise CheckpointError(f"{name}: safetensors has no dtype {spec.dtype}; cast it, or remove it")
            end = offset + num_bytes(spec)
            header[name] = {"dtype": _CODES[spec.dtype], "shape": list(spec.shape), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _HEADER_ALIGNMENT)
        super().__init__(path, at_once)
        self.write(len(text).to_bytes(_SIZE_BYTES, "little") + text)

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


def read_header(path: Path) -> dict[str, tuple[tuple[int, ...], str, int]]:
    """Shape, dtype as safetensors writes it, and first byte in the file of every tensor.

    Raises:
        SafetensorError, OSError: The file is damaged, truncated or missing.
    """
    with safe_open(path, framework="pt"):  # checks the whole header and the size of the file
        pass
    with path.open("rb") as file:
        size = int.from_bytes(file.read(_SIZE_BYTES), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    begin = _SIZE_BYTES + size
    return {
        name: (tuple(entry["shape"]), entry["dtype"], begin + entry["data_offsets"][0])
        for name, entry in header.items()
    }


def read_rows(path: Path, dtype: str, shape: tuple[int, ...], start: int, rows: slice | None = None) -> torch.Tensor:
    """Read the ``rows`` in dim 0, by default all, of a tensor of :func:`read_header` into new CPU memory.

    ``safe_open`` reads the header of all tensors each time, which takes 20 s for a file of 4,000, and a mapped file
    counts as memory of the process.

    Raises:
        ValueError: torch has no such dtype, or the file ends early.
    """
    if dtype not in _DTYPES:
        raise ValueError(f"its dtype {dtype} is none of {', '.join(_DTYPES)}")
    begin, end, _ = (rows or slice(None)).indices(shape[0]) if shape else (0, 1, 1)
    tensor = torch.empty((max(0, end - begin), *shape[1:]) if shape else (), dtype=_DTYPES[dtype])
    data: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    with path.open("rb") as file:
        file.seek(start + begin * math.prod(shape[1:]) * tensor.itemsize)
        if file.readinto(data) != tensor.nbytes:
            raise ValueError("the file ends before the tensor does")
    return tensor


def read_tensor(manifest: Manifest, name: str) -> torch.Tensor:
    """Read one full tensor into new CPU memory."""
    name = manifest.averages.get(name, name)
    spec = manifest.tensors[name]
    whole = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
    for chunk in manifest.chunks[name]:
        where = tuple(slice(begin, begin + size) for begin, size in zip(chunk.offsets, chunk.sizes, strict=True))
        path = manifest.file(chunk.file)
        try:
            with safe_open(path, framework="pt") as file:
                whole[where].copy_(file.get_tensor(name))
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{path}: not a readable safetensors file: {error}") from error
    return whole
