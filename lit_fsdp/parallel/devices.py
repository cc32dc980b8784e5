"""What a choice needs of the device, checked before any process starts where the device is known."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable

import torch
import torch.distributed as dist

from lit_fsdp.config.strategy import StrategyConfig
from lit_fsdp.errors import ConfigError
from lit_fsdp.host import cpu_has_bf16

_log = logging.getLogger(__name__)
_FP8_CAPABILITY = (8, 9)


def has_bf16(device_type: str) -> bool:
    """Whether this process's device has bf16 instructions; without a GPU here, those of a job are taken to."""
    if device_type == "cpu":
        return cpu_has_bf16()
    return not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False)


def settle_precision(config: StrategyConfig, device_type: str, on_all: Callable[[bool], bool]) -> StrategyConfig:
    """Decide what ``precision: auto`` is, alike on all ranks, whose machines may differ, and say so on rank 0.

    Any other mode stays, with a warning where a CPU has to emulate its bf16.

    Args:
        config: The factory's arguments.
        device_type: ``cpu`` or ``cuda``.
        on_all: Whether something holds on all ranks; collective.
    """
    given, own = config.precision_config, has_bf16(device_type)
    everywhere, on_cpu = on_all(own), device_type == "cpu"
    settled = config.on(everywhere)
    if dist.get_rank() != 0:
        return settled
    place = f"{'this' if everywhere or not own else 'another'} {'CPU' if on_cpu else 'GPU'}"
    what = "bf16 instructions (AVX512-BF16, AMX or Arm BF16)" if on_cpu else "bf16 instructions"
    if given.mode == "auto":
        found = "has" if everywhere else "has no"
        _log.info("precision auto: %s, as %s %s %s", settled.precision_config.mode, place, found, what)
    elif on_cpu and not everywhere and given.row.compute == "bf16":
        _log.warning(
            "precision %s computes in bf16, about eight times slower than fp32, as %s has no %s; set the strategy's "
            "precision to auto, or fp32", given.mode, place, what
        )  # fmt: skip
    return settled


def check_device(config: StrategyConfig, device_type: str, path: str) -> None:
    """Refuse what this kind of device cannot do.

    Args:
        config: The factory's arguments.
        device_type: ``cpu`` or ``cuda``.
        path: Where the strategy's arguments stand in the recipe.

    Raises:
        ConfigError: FSDP1's CPU offload or NCCL without an accelerator, fp8 without a GPU that multiplies in it or
            without torchao.
    """
    on_cpu = device_type == "cpu"
    if config.cpu_offload and config.engine == "fsdp1" and on_cpu:
        raise ConfigError(
            f"{path}.cpu_offload", "true with engine fsdp1 on CPU", "a GPU, or engine fsdp2", "set engine: fsdp2"
        )
    backend = config.process_group_backend
    if on_cpu and backend is not None and "nccl" in backend:
        raise ConfigError(f"{path}.process_group_backend", f"{backend} on CPU", "gloo", "drop process_group_backend")
    if not on_cpu and backend == "gloo":
        raise ConfigError(
            f"{path}.process_group_backend", "gloo on GPUs", "nccl | cpu:gloo,cuda:nccl", "drop process_group_backend"
        )
    if config.precision_config.mode != "fp8":
        return
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError(
            f"{path}.precision", "fp8 without torchao", "fp8 with torchao installed", "pip install 'lit-fsdp[fp8]'"
        )
    if on_cpu or torch.cuda.get_device_capability() < _FP8_CAPABILITY:
        found = "a CPU" if on_cpu else torch.cuda.get_device_name()
        raise ConfigError(
            f"{path}.precision", f"fp8 on {found}", "an NVIDIA Hopper GPU or newer", "set precision: mixed"
        )
