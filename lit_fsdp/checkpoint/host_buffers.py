"""One set of host memory for the copies that are written while training goes on."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lit_fsdp.checkpoint.manifest import TensorSpec
from lit_fsdp.checkpoint.safetensors_file import num_bytes

_ALIGNMENT_BYTES = 64
_BLOCK_BYTES = 1 << 28

Shape = tuple[torch.dtype, tuple[int, ...]]


class HostBuffers:
    """Tensors in host memory, made at the first use and used again while names, shapes and dtypes stay the same.

    Memory is taken in blocks of 256 MiB (a larger tensor has one of its own), because CUDA's pinned memory comes in
    powers of two. Each tensor has a storage of exactly its size all the same: DCP copies a tensor that has not.

    Args:
        pinned: Page-locked, for copies off a CUDA device that the host does not wait for.
    """

    def __init__(self, pinned: bool) -> None:
        self.pinned = pinned
        self._shapes: dict[str, Shape] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._blocks: list[torch.Tensor] = []

    @property
    def num_bytes(self) -> int:
        """Bytes held now."""
        return sum(block.nbytes for block in self._blocks)

    def fit(self, shapes: Mapping[str, Shape]) -> dict[str, torch.Tensor]:
        """One tensor per name; their content is lost with the next call.

        Args:
            shapes: Dtype and shape by name. If they differ from the last ones, that memory is given back first.
        """
        if self._shapes != dict(shapes):
            self.clear()
            self._allocate(shapes)
            self._shapes = dict(shapes)
        return dict(self._tensors)

    def clear(self) -> None:
        """Give all memory back."""
        self._shapes, self._tensors, self._blocks = {}, {}, []

    def _allocate(self, shapes: Mapping[str, Shape]) -> None:
        for names, size in plan_blocks({name: _num_bytes(shape) for name, shape in shapes.items()}):
            block = torch.empty(size, dtype=torch.uint8, pin_memory=self.pinned)
            self._blocks.append(block)
            for name, offset in names.items():
                dtype, shape = shapes[name]
                count = _num_bytes(shapes[name]) // dtype.itemsize
                flat = torch.frombuffer(block.numpy(), dtype=dtype, count=count, offset=offset)
                self._tensors[name] = flat.view(shape)
        for name, (dtype, shape) in shapes.items():
            if name not in self._tensors:  # without elements
                self._tensors[name] = torch.empty(shape, dtype=dtype)


def plan_blocks(sizes: Mapping[str, int]) -> list[tuple[dict[str, int], int]]:
    """How tensors are laid out in blocks: offsets by name, and the bytes of each block; empty tensors take nothing.

    Args:
        sizes: Bytes by name.
    """
    blocks: list[tuple[dict[str, int], int]] = []
    offsets: dict[str, int] = {}
    used = 0
    for name, size in sorted(sizes.items(), key=lambda item: -item[1]):
        if not size:
            continue
        if offsets and used + size > _BLOCK_BYTES:
            blocks.append((offsets, used))
            offsets, used = {}, 0
        offsets[name] = used
        used = -(-(used + size) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return [*blocks, (offsets, used)] if offsets else blocks


def planned_bytes(tensors: Mapping[str, TensorSpec], sharded: Collection[str], shards: int, pinned: bool) -> int:
    """Bytes of :class:`HostBuffers` on the rank with the largest part.

    Args:
        tensors: Everything a checkpoint holds, as a whole.
        sharded: Names of those that are split by rows.
        shards: Over how many ranks.
        pinned: CUDA rounds each block up to a power of two.
    """
    sizes = {}
    for name, spec in tensors.items():
        if name in sharded and spec.shape:
            spec = TensorSpec(spec.dtype, (-(-spec.shape[0] // shards), *spec.shape[1:]))
        sizes[name] = num_bytes(spec)
    blocks = [size for _, size in plan_blocks(sizes)]
    return sum(1 << (size - 1).bit_length() if pinned else size for size in blocks)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor or DTensor."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def shape_of(tensor: torch.Tensor) -> Shape:
    """Dtype and shape of a plain tensor, as :meth:`HostBuffers.fit` takes them."""
    return tensor.dtype, tuple(tensor.shape)


def in_place_of(tensor: torch.Tensor, host: torch.Tensor) -> torch.Tensor:
    """``host``, the copy of this rank's part, with the sharding of ``tensor``."""
    if not isinstance(tensor, DTensor):
        return host
    return DTensor.from_local(
        host,
        host_mesh(tensor.device_mesh) if tensor.device_mesh.device_type != "cpu" else tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def host_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The same ranks as a mesh of CPUs, over the groups that are there: tensors of a mesh must be on its device."""
    groups: Any = mesh.get_all_groups()
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], "cpu")
    names = mesh.mesh_dim_names or tuple(f"axis_{index}" for index in range(len(groups)))
    return DeviceMesh.from_group(groups, "cpu", mesh.mesh, mesh_dim_names=names)


def _num_bytes(shape: Shape) -> int:
    return torch.Size(shape[1]).numel() * shape[0].itemsize
