"""Fill a model built on meta with real tensors, so that no rank stores more than its shards and one module."""

import logging
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from lit_fsdp.config.model import OptimConfig
from lit_fsdp.errors import require
from lit_fsdp.host import is_first_process, return_freed_memory, size_words
from lit_fsdp.metrics.hardware import host_bytes, is_accelerator, swap_bytes
from lit_fsdp.models.optimizers import state_bytes
from lit_fsdp.models.weights import seeded
from lit_fsdp.parallel.units import tied_names

_log = logging.getLogger(__name__)
QUIET_SECONDS = 15.0
"""After which a wait or a load is logged."""
_TRIM_BYTES = 32 * 2**20
Reader = Callable[[str, nn.Module, str, slice | None], torch.Tensor]
"""Reads a parameter or buffer, or only rows of it, on the CPU, given module name, module, attribute and rows."""


class Materializer:
    """Fills the meta tensors of a model module by module; created before sharding, to record names and ties."""

    def __init__(self, model: nn.Module, read: Reader, device: torch.device) -> None:
        self.names = {module: name for name, module in model.named_modules()}
        self.read, self.device = read, device
        self.first_name = tied_names(model)
        self._tied: dict[str, nn.Parameter] = {}
        self._read_bytes = 0
        self._num_params = sum(1 for _ in model.parameters())
        self._num_filled, self._told = 0, time.monotonic()

    def fill_all(self) -> None:
        """:meth:`fill` every module."""
        for module in self.names:
            self.fill(module)

    def fill(self, module: nn.Module) -> None:
        """Replace the module's own meta parameters and buffers by real tensors; DTensors get this rank's rows."""
        if self._read_bytes > _TRIM_BYTES:  # copies of rows, FSDP1's gathered units
            return_freed_memory()
            self._read_bytes = 0
        name = self.names[module]
        if hasattr(module, "quant_state"):  # quantizing needs several copies of the layer on a CPU
            self._read_bytes += _TRIM_BYTES
        for attribute, param in list(module._parameters.items()):
            if param is None or not param.is_meta:
                continue
            full_name = f"{name}.{attribute}" if name else attribute
            first = self.first_name.get(full_name, full_name)
            filled = self._tied[first] if first in self._tied else self._parameter(name, module, attribute, param)
            if first in self.first_name.values():
                self._tied[first] = filled
            self._tell()
            setattr(module, attribute, filled)  # not by _parameters: an LSTM keeps a second list of parameters
        for attribute, buffer in list(module._buffers.items()):
            if buffer is not None and buffer.is_meta:
                module._buffers[attribute] = self.read(name, module, attribute, None).to(self.device)

    def _tell(self) -> None:
        """Log the progress of the first rank, which may take minutes."""
        self._num_filled += 1
        if time.monotonic() - self._told > QUIET_SECONDS:
            self._told = time.monotonic()
            if is_first_process():
                _log.info("loading weights: %d of %d parameters", self._num_filled, self._num_params)

    @torch.no_grad()
    def _parameter(self, name: str, module: nn.Module, attribute: str, param: nn.Parameter) -> nn.Parameter:
        if not isinstance(param, DTensor):
            data = self.read(name, module, attribute, None).to(self.device, param.dtype)
            self._read_bytes += data.nbytes
            return nn.Parameter(data.clone() if data.storage_offset() else data, param.requires_grad)
        filled: Any = torch.empty_like(param, device=self.device)
        local = filled.to_local()
        shape, offset = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
        self._read_bytes += local.nbytes
        if local.numel() or hasattr(module, "quant_state"):  # reading also sets quant_state, needed to unpack
            local.copy_(self.read(name, module, attribute, slice(offset[0], offset[0] + shape[0])))
        return nn.Parameter(filled, param.requires_grad)


def check_memory(
    model: nn.Module, num_shards: int, device: torch.device, num_local: int, optim: OptimConfig | None
) -> None:
    """Refuse to load a model on meta whose state alone does not fit in the memory of ``device``.

    Counts one rank's part, of ``num_shards``, of the parameters and, for training with ``optim``, of their gradients
    and of the state of a known optimizer. The ``num_local`` ranks of a host share its memory and swap space.

    Raises:
        ConfigError: The state is larger than the memory.
    """
    params = list(model.parameters())
    kinds, needed = "parameters", sum(p.nbytes for p in params)
    if optim is not None:
        trained = [p for p in params if p.requires_grad]
        kinds, needed = "parameters and gradients", needed + sum(p.nbytes for p in trained)
        kept, known_as = state_bytes(optim, model, trained[0].element_size() if trained else 0)
        if known_as == optim.optimizer:
            kinds = "parameters, gradients and optimizer state"
            needed += sum(kept(p, p.numel()) for p in trained)
    memory, where = (host_bytes() + swap_bytes()) / num_local, "of this host"
    where += f", divided by its {num_local} ranks" * (num_local > 1)
    if is_accelerator(device):
        properties = getattr(torch.get_device_module(device), "get_device_properties", None)  # not of MPS
        memory, where = properties(device).total_memory if properties else math.inf, f"of {device}"
    given = f"a model with at least {size_words(needed / num_shards)} of {kinds} per rank"
    fix = "run lit-fsdp plan --savings with this recipe for options that save memory; or use more ranks"
    require(needed <= memory * num_shards, "model", given, f"{size_words(memory)}, the memory {where}", fix)


def has_meta(module: nn.Module) -> bool:
    """Whether any tensor is still on meta, such as after an error during setup, which must not be hidden."""
    return any(tensor.is_meta for tensors in (module.parameters(), module.buffers()) for tensor in tensors)


def reset_parameters_reader(seed: int) -> Reader:
    """A reader for user modules on meta: calls each module's ``reset_parameters``, seeded by its name."""

    def read(module_name: str, module: nn.Module, attribute: str, rows: slice | None) -> torch.Tensor:
        reset = getattr(type(module), "reset_parameters", None)
        if reset is None:
            where = f"{module_name or 'the root'} ({type(module).__name__})"
            raise RuntimeError(f"{where} is on meta and has no reset_parameters(); build it on the CPU, or add one")
        real = _emptied(module, "cpu")
        with seeded(seed, module_name):
            reset(real)
        tensor = getattr(real, attribute).detach()
        return tensor if rows is None else tensor[rows]

    return read


def _emptied(module: nn.Module, device: str) -> nn.Module:
    """A copy with empty tensors; its children are on meta, so that a recursive reset does not change live modules."""
    copy = object.__new__(type(module))
    copy.__dict__.update(module.__dict__)
    copy.__dict__["_parameters"] = {k: _empty(v, device) for k, v in module._parameters.items()}
    copy.__dict__["_buffers"] = {k: _empty(v, device) for k, v in module._buffers.items()}
    copy.__dict__["_modules"] = {k: None if v is None else _emptied(v, "meta") for k, v in module._modules.items()}
    return copy


def _empty(tensor: torch.Tensor | None, device: str) -> torch.Tensor | None:
    if tensor is None:
        return None
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
