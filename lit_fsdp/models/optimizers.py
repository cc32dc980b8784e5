"""The optimizer that a recipe names: what it is given, what it keeps of each parameter, and where it cannot be."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lit_fsdp.config.model import ADAMW, OptimConfig
from lit_fsdp.errors import ConfigError, require

_FIELD = "model.optim"
_QMAP_BYTES = 256 * 4
_SMALLEST = 4096
"""Elements below which torchao keeps a moment as it is."""


def optimizer_class(optim: OptimConfig) -> type[torch.optim.Optimizer]:
    """The class of ``model.optim``, which takes the arguments that the recipe gives it.

    Raises:
        ConfigError: It cannot be imported, is no optimizer, or has no such argument.
    """
    path = optim.optimizer
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        fix = "pip install 'lit-fsdp[optim8bit]'" if module.partition(".")[0] == "torchao" else ""
        raise ConfigError(f"{_FIELD}.class_path", path, f"a class that can be imported ({error})", fix) from error
    is_optimizer = isinstance(found, type) and issubclass(found, torch.optim.Optimizer)
    require(is_optimizer, f"{_FIELD}.class_path", path, "a subclass of torch.optim.Optimizer")
    known = inspect.signature(found).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    names = [name for name in known if name not in ("params", "lr", "weight_decay")]
    for key in optim.optimizer_args or {}:
        near = difflib.get_close_matches(key, names, n=1)
        fix, given = f"write {near[0]}" if near else f"drop {key}", f"no argument of {path}"
        require(takes_any or key in known, f"{_FIELD}.init_args.{key}", given, f"one of {', '.join(names)}", fix)
    return found


def hidden_matrices(model: Any) -> set[str]:
    """Names of the matrices between embedding and head, which Muon takes."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    outer = {id(param) for module in ends if module is not None for param in module.parameters()}
    return {name for name, param in model.named_parameters() if param.ndim == 2 and id(param) not in outer}


def state_bytes(optim: OptimConfig, model: nn.Module, itemsize: int) -> tuple[Callable[[nn.Parameter, int], int], str]:
    """What an optimizer keeps of a parameter between steps, without step counters, by its class, which is not imported.

    Args:
        optim: The ``model.optim`` section.
        model: Whose parameters are meant.
        itemsize: Bytes of an element of them at rest.

    Returns:
        Bytes on a rank, of a parameter and its elements there; and the class they are of, AdamW for one not known here.
    """
    path, args = optim.optimizer, optim.optimizer_args or {}
    plain = lambda tensors: lambda param, count: tensors * count * itemsize  # noqa: E731
    if path == "torch.optim.SGD":
        return plain(1 if args.get("momentum") else 0), path
    if path.startswith("lit_fsdp.") and path.endswith(".MuonWithAdamW"):
        hidden = {id(model.get_parameter(name)) for name in hidden_matrices(model)}
        return lambda param, count: (1 if id(param) in hidden else 2) * count * itemsize, path
    if path in ("torchao.optim.AdamW8bit", "torchao.optim.Adam8bit"):
        block, tensors = int(args.get("block_size", 256)), 3 if args.get("amsgrad") else 2

        def packed(param: nn.Parameter, count: int) -> int:
            as_codes = count + count // block * 4 + _QMAP_BYTES
            return tensors * (as_codes if is_packed(count, block) else count * itemsize)

        return packed, path
    return plain(3 if args.get("amsgrad") else 2), path if path == "torch.optim.Adam" else ADAMW


def is_packed(count: int, block_size: int) -> bool:
    """Whether torchao keeps the moments of so many elements as codes of 8 bits."""
    return count >= _SMALLEST and count % block_size == 0
