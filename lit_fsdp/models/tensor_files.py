"""Read the tensors of a safetensors file one at a time; its header is read once."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

CODES = {
    "bool": "BOOL", "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64",
    "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
    "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64", "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
"""Name of each torch dtype in a header."""
SIZE_BYTES = 8
"""Length of the number in front of a header, which is its size."""
_DTYPES = {code: getattr(torch, name) for name, code in CODES.items()}


def read_header(path: Path) -> dict[str, tuple[tuple[int, ...], str, int]]:
    """Shape, dtype as safetensors writes it, and first byte in the file of every tensor.

    Raises:
        SafetensorError, OSError: The file is damaged, truncated or missing.
    """
    with safe_open(path, framework="pt"):  # checks the whole header and the size of the file
        pass
    with path.open("rb") as file:
        size = int.from_bytes(file.read(SIZE_BYTES), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    begin = SIZE_BYTES + size
    return {
        name: (tuple(entry["shape"]), entry["dtype"], begin + entry["data_offsets"][0])
        for name, entry in header.items()
    }


def read_rows(path: Path, shape: tuple[int, ...], dtype: str, start: int, rows: slice | None = None) -> torch.Tensor:
    """Read the ``rows`` in dim 0, by default all, of a tensor of :func:`read_header` into new CPU memory.

    The function ``safe_open`` reads the header of all tensors each time, which takes 20 s for a file of 4,000, and a
    mapped file counts as memory of the process.

    Raises:
        ValueError: torch has no such dtype, or the file ends early.
    """
    if dtype not in _DTYPES:
        raise ValueError(f"its dtype {dtype} is none of {', '.join(_DTYPES)}")
    begin, end, _ = (rows or slice(None)).indices(shape[0]) if shape else (0, 1, 1)
    of_rows = (max(0, end - begin), *shape[1:]) if shape else ()
    tensor = torch.empty(of_rows, dtype=_DTYPES[dtype], device="cpu")
    data: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    with path.open("rb") as file:
        file.seek(start + begin * math.prod(shape[1:]) * tensor.itemsize)
        if file.readinto(data) != tensor.nbytes:
            raise ValueError("the file ends before the tensor does")
    return tensor
