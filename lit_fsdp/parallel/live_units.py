"""FSDP units that are there already, on either engine: what a module wrapped itself in ``configure_model``."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from lit_fsdp.errors import ConfigError

_WRAPPER = "_fsdp_wrapped_module"


@dataclass(frozen=True)
class LiveUnits:
    """Units inside a module, read back from the live modules."""

    modules: dict[str, nn.Module]
    """The wrapped modules themselves (FSDP1: not the wrappers) by the name they had before wrapping."""
    num_elements: dict[int, int]
    """Unsharded elements by ``id`` of a parameter, where the parameter itself holds this rank's part only."""


def units_already_wrapped(module: nn.Module) -> list[str]:
    """Names of the modules inside ``module`` that FSDP1 or FSDP2 wraps already, ``module`` itself left out."""
    found = {clean_name(name) for name, inner in module.named_modules() if _is_unit(inner)}
    return sorted(found - {""})


def engines_already_there(module: nn.Module) -> set[str]:
    """``fsdp1`` and ``fsdp2``, as far as ``module`` or something in it is wrapped by them."""
    classes = {"fsdp1": FullyShardedDataParallel, "fsdp2": FSDPModule}
    return {engine for engine, cls in classes.items() if any(isinstance(m, cls) for m in module.modules())}


def read_live_units(module: nn.Module, path: str) -> LiveUnits:
    """The units inside ``module`` and the unsharded sizes of their parameters.

    Raises:
        ConfigError: Nothing is wrapped, ``module`` itself is, both engines are used, or FSDP1 flattened parameters
            away (``use_orig_params=False``).
    """
    engines = engines_already_there(module)
    fix = "wrap the blocks in configure_model, by fully_shard (fsdp2) or FullyShardedDataParallel (fsdp1)"
    if not units_already_wrapped(module):
        raise ConfigError(path, "manual, but nothing in the model is wrapped", "a module that wraps its parts", fix)
    if _is_unit(module):
        raise ConfigError(path, "manual, and the LightningModule itself is wrapped", "its parts only", "leave the root")
    if len(engines) > 1:
        raise ConfigError(path, "manual with units of both engines", "units of one engine", "use one of the two")
    modules: dict[str, nn.Module] = {}
    num_elements: dict[int, int] = {}
    for name, inner in module.named_modules():
        if isinstance(inner, FullyShardedDataParallel):
            modules[clean_name(name)] = inner.module
            num_elements.update(_flattened(inner, path))
        elif _is_unit(inner):
            modules[clean_name(name)] = inner
    return LiveUnits(modules, num_elements)


def clean_name(name: str) -> str:
    """A module's or a parameter's path without the wrappers that FSDP1 puts into it."""
    return ".".join(part for part in name.split(".") if part != _WRAPPER)


def class_name(module: nn.Module) -> str:
    """The name of a module's own class; ``fully_shard`` puts a derived one in its place."""
    return (type(module).__bases__[-1] if isinstance(module, FSDPModule) else type(module)).__name__


def _is_unit(module: nn.Module) -> bool:
    return isinstance(module, (FullyShardedDataParallel, FSDPModule))


def _flattened(unit: FullyShardedDataParallel, path: str) -> dict[int, int]:
    """Elements of each original parameter of an FSDP1 unit, of which this rank's views may hold none."""
    handle = unit._handle
    if handle is None:
        return {}
    flat = handle.flat_param
    if flat._params is None:
        raise ConfigError(
            path, "manual with use_orig_params=False", "use_orig_params=True", "pass use_orig_params=True when wrapping"
        )
    return {id(param): count for param, count in zip(flat._params, flat._numels, strict=True)}
