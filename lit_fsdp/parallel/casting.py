"""The parts of a precision choice that the engines leave to us: dtypes at rest, buffers, outputs, norms in fp32."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast all floating-point parameters (buffers stay) to their storage dtype in place; ties are kept."""
    done: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is None or not param.is_floating_point() or param.dtype == dtype:
                continue
            if id(param) not in done:
                done[id(param)] = nn.Parameter(param.detach().to(dtype), param.requires_grad)
            setattr(module, name, done[id(param)])  # an LSTM keeps a second list of them


def cast_buffers(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast all floating-point buffers in place, once: rotary frequencies lose positions in bf16, so it is a choice."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(dtype)


def cast_inputs(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast every floating-point tensor that ``module.forward`` is given, in plain containers."""

    def hook(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        return _cast(args, dtype), _cast(kwargs, dtype)

    module.register_forward_pre_hook(hook, with_kwargs=True)


def without_autocast(module: nn.Module, device_type: str) -> None:
    """Let ``module.forward`` choose its dtypes by its weights alone, whatever autocast is on around it."""
    entered: list[Any] = []

    def enter(_module: nn.Module, _args: Any) -> None:
        entered.append(torch.autocast(device_type, enabled=False))
        entered[-1].__enter__()

    def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
        if entered:
            entered.pop().__exit__(None, None, None)

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)


def cast_outputs(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast every floating-point tensor that ``module.forward`` returns, in plain containers and model outputs."""

    def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
        return _cast(output, dtype)

    module.register_forward_hook(hook)


def _cast(values: Any, dtype: torch.dtype) -> Any:
    return tree_map(lambda x: x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x, values)


def output_module(root: nn.Module) -> nn.Module:
    """The innermost module that holds all parameters of ``root`` and has a forward: its outputs are the model's."""
    found = root
    while True:
        total = {id(p) for p in found.parameters()}
        inside = [c for c in found.children() if {id(p) for p in c.parameters()} == total]
        own = any(True for _ in found.parameters(recurse=False))
        if own or len(inside) != 1 or type(inside[0]).forward is nn.Module.forward or _has_head(found):
            return found
        found = inside[0]


def norm_modules(model: nn.Module) -> list[nn.Module]:
    """Normalisation layers with weights of their own: LayerNorm, RMSNorm and classes named after them."""
    found = [m for m in model.modules() if "norm" in type(m).__name__.lower()]
    return [m for m in found if any(True for _ in m.parameters(recurse=False)) and not list(m.children())]


def _has_head(module: nn.Module) -> bool:
    """A transformers model with tied head: the parameters are all inside its body, its outputs are not."""
    get_head = getattr(module, "get_output_embeddings", None)
    return get_head is not None and get_head() is not None
