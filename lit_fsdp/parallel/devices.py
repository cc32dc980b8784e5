"""What a choice needs of the device, checked before any process starts where the device is known."""

from __future__ import annotations

import importlib.util

import torch

from lit_fsdp.config.sharding import StrategyConfig
from lit_fsdp.errors import ConfigError

_FP8_CAPABILITY = (8, 9)


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
