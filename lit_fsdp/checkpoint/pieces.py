"""The tensors of a checkpoint, read in pieces of whole rows, so that a large one need not be in memory at once."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint import metadata as dcp_metadata

from lit_fsdp.checkpoint import dcp_files
from lit_fsdp.checkpoint.manifest import Manifest, TensorSpec
from lit_fsdp.checkpoint.safetensors_file import num_bytes, opened
from lit_fsdp.checkpoint.snapshot import FULL_FILE

_PIECE_BYTES = 1 << 26

Pieces = Callable[[str], Iterator[torch.Tensor]]
"""Gives the rows of a tensor of the checkpoint in order, each piece in memory of its own, in the dtype saved."""


def open_pieces(manifest: Manifest) -> Pieces:
    """A reader of a checkpoint of either layout, in one process.

    A piece of the sharded layout is what one rank saved of the tensor, of the full layout about 64 MiB. Only these
    bytes of a file are read, and no mapping of a file stays open, since it would count as this process's memory.

    Raises:
        CheckpointError: The description of the shards is damaged or disagrees with the manifest.
    """
    if manifest.layout == "sharded":
        description = dcp_files.read_description(manifest)
        return lambda name: _saved_by_ranks(manifest, description, name)
    path = manifest.file(FULL_FILE)
    return lambda name: _rows_of_file(path, name, manifest.tensors[name])


def _rows_of_file(path: Path, name: str, spec: TensorSpec) -> Iterator[torch.Tensor]:
    if not spec.shape:
        with opened(path) as file:
            whole = file.get_tensor(name).clone()
        yield whole
        return
    rows = max(1, _PIECE_BYTES // max(1, num_bytes(spec) // max(1, spec.shape[0])))
    for start in range(0, spec.shape[0], rows):
        yield _some_rows(path, name, slice(start, start + rows))


def _some_rows(path: Path, name: str, rows: slice) -> torch.Tensor:
    with opened(path) as file:
        return file.get_slice(name)[rows].clone()


def _saved_by_ranks(manifest: Manifest, description: dcp_metadata.Metadata, name: str) -> Iterator[torch.Tensor]:
    entry = cast(dcp_metadata.TensorStorageMetadata, description.state_dict_metadata[name])
    chunks = sorted(entry.chunks, key=lambda chunk: tuple(chunk.offsets))
    end = 0
    for chunk in chunks:
        if len(chunks) > 1 and (tuple(chunk.sizes[1:]) != tuple(entry.size[1:]) or chunk.offsets[0] != end):
            yield dcp_files.read_tensor(manifest, description, name)  # cut in another way than our engines do
            return
        end = chunk.offsets[0] + chunk.sizes[0] if entry.size else 1
    for chunk in chunks:
        place = description.storage_data[dcp_metadata.MetadataIndex(name, chunk.offsets)]
        yield _shard(manifest.folder / dcp_files.FOLDER / place.relative_path, place.offset, place.length)


def _shard(path: Path, offset: int, length: int) -> torch.Tensor:
    with path.open("rb", buffering=0) as file:
        return torch.load(cast(Any, _Part(file, offset, length)), map_location="cpu", weights_only=True)


class _Part(io.RawIOBase):
    """A range of an open file as a file of its own; torch reads from it straight into its tensors."""

    def __init__(self, file: Any, offset: int, length: int) -> None:
        self._file, self._start, self._length, self._position = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        self._position = max(0, origin + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        self._file.seek(self._start + self._position)
        count = self._file.readinto(view[: max(0, self._length - self._position)])
        self._position += count
        return count
