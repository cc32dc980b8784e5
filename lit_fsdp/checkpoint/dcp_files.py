"""``torch.distributed.checkpoint`` files, written with hashes and read without trusting a pickle.

DCP describes a checkpoint in ``.metadata``, a raw pickle that its own reader would run as it is, and it unpickles
byte entries freely. Here the pickle may name nothing but DCP's own description classes, the description must agree
with the manifest, and only tensors are accepted.
"""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import pickle
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from lit_fsdp.checkpoint.disk import FileEntry, HashedFile
from lit_fsdp.checkpoint.manifest import Manifest, TensorSpec
from lit_fsdp.checkpoint.ranks import RankFailures, Ranks, reason
from lit_fsdp.errors import CheckpointError

FOLDER = "tensors"
METADATA = f"{FOLDER}/.metadata"
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


def save(folder: Path, tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None) -> dict[str, FileEntry]:
    """Write ``tensors`` as one DCP checkpoint; collective.

    Args:
        folder: Empty folder of the checkpoint; the files go to ``tensors/`` under it.
        tensors: Tensors (equal on all ranks) and DTensors by name.
        group: The ranks that save together.

    Returns:
        The files this rank wrote, by path inside ``folder``.

    Raises:
        RankFailures: On every rank when any failed.
    """
    writer = _HashingWriter(folder / FOLDER)
    with _quiet(), _own_checksums():
        try:
            dcp.save(dict(tensors), storage_writer=writer, process_group=group)
        except CheckpointException as error:
            raise _failures(error, group) from error
    return {f"{FOLDER}/{path.name}": entry for path, entry in writer.fs.entries.items()}


def load(manifest: Manifest, into: Mapping[str, torch.Tensor], description: dcp_metadata.Metadata, group: Any) -> None:
    """Read tensors in place; collective.

    Args:
        manifest: Of the checkpoint.
        into: Tensors and DTensors by name; shapes and dtypes have been compared already.
        description: From :func:`read_description`.
        group: The ranks that load together.

    Raises:
        RankFailures: On every rank when any failed.
    """
    reader = _CheckedReader(manifest.folder / FOLDER, description)
    with _quiet():
        try:
            planner = DefaultLoadPlanner(flatten_state_dict=False)
            dcp.load(dict(into), storage_reader=reader, planner=planner, process_group=group)
        except CheckpointException as error:
            raise _failures(error, group) from error


def read_description(manifest: Manifest) -> dcp_metadata.Metadata:
    """DCP's ``.metadata``, read by a restricted unpickler and compared with the manifest.

    Raises:
        CheckpointError: It names anything but DCP's description classes, has entries that are not tensors, or
            differs from the manifest in names, dtypes, shapes or files.
    """
    path = manifest.file(METADATA)
    description = unpickle_description(path)
    try:
        _check_entries(description, manifest)
        _check_places(description, manifest)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(f"{path}: damaged ({error!r}); use another checkpoint") from error
    return description


def unpickle_description(path: Path, of_others: bool = False) -> dcp_metadata.Metadata:
    """A ``.metadata`` file, read by a restricted unpickler and compared with nothing.

    Args:
        path: The file.
        of_others: It may name the folder it was written to, as DCP's own writer does; a path does nothing by itself.

    Raises:
        CheckpointError: It names anything but DCP's description classes, is something else, or is damaged.
    """
    try:
        with path.open("rb") as file:
            description = _RestrictedUnpickler(file, of_others).load()
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(f"{path}: damaged ({error!r}); use another checkpoint") from error
    if not isinstance(description, dcp_metadata.Metadata):
        raise CheckpointError(f"{path}: not the description of a checkpoint")
    return description


def read_tensor(manifest: Manifest, description: dcp_metadata.Metadata, name: str) -> torch.Tensor:
    """One whole tensor on the CPU, put together from its shards; not collective."""
    return assemble(manifest.folder / FOLDER, description, name)


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


class _HashingFileSystem(filesystem.FileSystem):
    """DCP's file system, with new files hashed and synced; ``entries`` has what was written."""

    def __init__(self) -> None:
        self.entries: dict[Path, FileEntry] = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:
        assert mode == "wb", mode
        with HashedFile(Path(path)) as file:
            yield file
        assert file.entry is not None
        self.entries[Path(path)] = file.entry

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        super().rename(path, new_path)
        self.entries[Path(new_path)] = self.entries.pop(Path(path))


class _HashingWriter(dcp.FileSystemWriter):
    """DCP's writer on :class:`_HashingFileSystem`, which syncs by itself."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, sync_files=False, overwrite=False)
        self.fs: _HashingFileSystem = _HashingFileSystem()

    def storage_meta(self) -> dcp_metadata.StorageMeta:
        """Nothing: the default names the folder on this machine."""
        return dcp_metadata.StorageMeta()


class _CheckedReader(dcp.FileSystemReader):
    """DCP's reader with a description that has been read and checked before."""

    def __init__(self, path: Path, description: dcp_metadata.Metadata) -> None:
        super().__init__(path)
        self._description = description

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp_metadata.Metadata:
        return self._description


class _RestrictedUnpickler(pickle.Unpickler):
    """Unpickles DCP's description classes and refuses every other name before it is imported."""

    def __init__(self, file: BinaryIO, of_others: bool = False) -> None:
        super().__init__(file)
        self._name, self._of_others = file.name, of_others

    def find_class(self, module: str, name: str) -> Any:
        if self._of_others and module in _PATH_MODULES and name in ("PosixPath", "WindowsPath"):
            return pathlib.PurePath
        if name not in _CLASSES.get(module, ()):
            raise CheckpointError(
                f"{self._name}: refused: it names {module}.{name}, which no checkpoint description needs; "
                "do not trust this checkpoint"
            )
        return super().find_class(module, name)


def _check_entries(description: dcp_metadata.Metadata, manifest: Manifest) -> None:
    found = {}
    for name, entry in description.state_dict_metadata.items():
        if not isinstance(entry, dcp_metadata.TensorStorageMetadata):
            raise CheckpointError(f"{manifest.folder / METADATA}: refused: {name} is no tensor but pickled bytes")
        found[name] = TensorSpec(str(entry.properties.dtype).removeprefix("torch."), tuple(entry.size))
    if found != dict(manifest.tensors):
        raise CheckpointError(f"{manifest.folder / METADATA}: describes other tensors than the manifest")


def _check_places(description: dcp_metadata.Metadata, manifest: Manifest) -> None:
    for index, place in description.storage_data.items():
        if not isinstance(index, dcp_metadata.MetadataIndex) or place.transform_descriptors:
            raise CheckpointError(f"{manifest.folder / METADATA}: refused: {index} is stored in an unknown way")
        size = manifest.file(f"{FOLDER}/{place.relative_path}").stat().st_size
        if place.offset < 0 or place.length < 0 or place.offset + place.length > size:
            raise CheckpointError(f"{manifest.folder / METADATA}: {index.fqn} lies outside {place.relative_path}")


def _failures(error: CheckpointException, group: dist.ProcessGroup | None) -> BaseException:
    """What DCP collected from all ranks; on a rank that was interrupted, the interrupt itself."""
    own = error.failures.get(Ranks(group).rank)
    if own is not None and not isinstance(own[0], Exception):
        return own[0]
    return RankFailures({rank: reason(failure) for rank, (failure, _) in error.failures.items()})


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without DCP's warning that a single process is meant, which is no surprise here.

    With a process group there is no such warning, and filters must be left alone: threads share them.
    """
    if dist.is_available() and dist.is_initialized():
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)
        yield


@contextlib.contextmanager
def _own_checksums() -> Iterator[None]:
    """Without the CRC32 of torch's zip records: the manifest's sha256 says more, and is computed anyway."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)
