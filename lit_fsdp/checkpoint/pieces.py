"""The tensors of a checkpoint in one process, whole or in pieces of whole rows, so that little need be in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import torch

from lit_fsdp.checkpoint.manifest import Manifest
from lit_fsdp.checkpoint.safetensors_file import opened

_PIECE_BYTES = 1 << 26

BASE = "base/"
"""What begins the name of a tensor that is not in the checkpoint, but in the base of its adapters."""


class Base(Protocol):
    """The frozen weights beside which adapters were trained; see ``lit_fsdp.models.base``."""

    specs: Mapping[str, tuple[str, tuple[int, ...]]]
    """Dtype and shape by the names of plain transformers."""

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor on the CPU, in memory of its own."""


Pieces = Callable[[str], Iterator[torch.Tensor]]
"""Gives the rows of a tensor of the checkpoint in order, each piece in memory of its own, in the dtype saved."""


def open_pieces(manifest: Manifest, base: Base | None = None) -> Pieces:
    """A reader of a checkpoint of either layout, in pieces of about 64 MiB, and of its base, in whole tensors.

    No mapping of a file stays open, since it would count as this process's memory.
    """

    def pieces(name: str) -> Iterator[torch.Tensor]:
        if name.startswith(BASE):
            assert base is not None
            yield base.read(name.removeprefix(BASE))
            return
        shape, chunks = manifest.tensors[name].shape, sorted(manifest.chunks[name], key=lambda chunk: chunk.offsets)
        if not all(shape) or not shape or any(chunk.sizes[1:] != shape[1:] for chunk in chunks):
            # without rows, a number, or cut by columns
            yield read_tensor(manifest, name)
            return
        row_bytes = torch.Size(shape[1:]).numel() * getattr(torch, manifest.tensors[name].dtype).itemsize
        step = max(1, _PIECE_BYTES // row_bytes)
        for chunk in chunks:
            for start in range(0, chunk.sizes[0], step):  # a piece is held by nobody here
                yield _some_rows(manifest.file(chunk.file), name, slice(start, start + step))

    return pieces


def read_tensor(manifest: Manifest, name: str) -> torch.Tensor:
    """One whole tensor on the CPU, in memory of its own."""
    spec = manifest.tensors[name]
    whole = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
    for chunk in manifest.chunks[name]:
        where = tuple(slice(begin, begin + size) for begin, size in zip(chunk.offsets, chunk.sizes, strict=True))
        with opened(manifest.file(chunk.file)) as file:
            whole[where].copy_(file.get_tensor(name))
    return whole


def _some_rows(path: Path, name: str, rows: slice) -> torch.Tensor:
    with opened(path) as file:
        return file.get_slice(name)[rows].clone()
