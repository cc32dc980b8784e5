"""peft's LoRA linear layer as one autograd function, which computes base and adapter and saves the input once.

peft casts the input to the adapter's dtype and back, scales and adds, and autograd records each step. Modules, names,
units, merges and saves stay those of peft; calls that the function does not support run peft's own forward.

Shapes: N rows of inputs, I inputs, O outputs, R the rank.
"""

import functools
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lit_fsdp.models.quantize import is_nf4, multiply, unpacked

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def apply_one_function(layer: Any) -> None:
    """Make a ``lora.Linear`` or ``lora.Linear4bit`` of peft compute in one function where the result is the same."""
    layer.forward = functools.partial(_forward, layer)  # unlike a closure, it survives copies and pickles


def _forward(layer: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    parts = None if args or kwargs else _parts(layer, x)
    return type(layer).forward(layer, x, *args, **kwargs) if parts is None else _Adapted.apply(x, *parts)


def _parts(layer: Any, x: torch.Tensor) -> tuple[Any, ...] | None:
    """The remaining arguments of :class:`_Adapted`, or None where peft's forward must run."""
    if not torch.is_grad_enabled():  # nothing to save, and logits are bit-equal to peft's
        return None
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    if len(names) != 1 or layer.disable_adapters or layer.merged or names[0] in layer.lora_variant:
        return None
    base, first, second = layer.base_layer, layer.lora_A[names[0]], layer.lora_B[names[0]]
    dropout = layer.lora_dropout[names[0]]
    is_quantized = is_nf4(base)
    # a layer that is its own FSDP unit must be called to be gathered: it has another class or hooks
    fits = (is_quantized or type(base) is nn.Linear) and type(first) is type(second) is nn.Linear
    drops = type(dropout) is not nn.Identity and (type(dropout) is not nn.Dropout or (dropout.p and dropout.training))
    if not fits or drops or second.bias is not None or not all(map(_is_plain, (base, first, second, dropout))):
        return None
    kind, weights = x.device.type, [first.weight, second.weight, *([] if is_quantized else [base.weight])]
    is_autocast = kind != "meta" and torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if is_autocast else x.dtype
    if not is_autocast and any(weight.dtype != dtype for weight in weights):
        return None
    if is_quantized and (torch.compiler.is_compiling() or not x.dtype == dtype == (base.compute_dtype or dtype)):
        return None
    state = base.quant_state if is_quantized else None
    return base.weight, base.bias, first.weight, second.weight, layer.scaling[names[0]], dtype, state


def _is_plain(module: Any) -> bool:
    own = module.__dict__
    has_own_forward = "forward" in own and not getattr(own["forward"], "only_has_shapes", False)
    return not has_own_forward and not any(own[hooks] for hooks in _HOOKS)


class _Adapted(torch.autograd.Function):
    """``x @ weight.T + bias + scale * x @ first.T @ second.T``, computed in ``dtype``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *parts: Any) -> torch.Tensor:
        weight_OI, bias_O, first_RI, second_OR, scale, dtype, state = parts
        x_NI, bias = x.reshape(-1, x.shape[-1]).to(dtype), None if bias_O is None else bias_O.to(dtype)
        out_NO = multiply(x_NI, weight_OI, bias, state) if state else F.linear(x_NI, weight_OI.to(dtype), bias)
        inner_NR = x_NI.mm(first_RI.to(dtype).t())
        factors = (inner_NR, second_OR.to(dtype).t())
        # selective checkpointing keeps products by operator, so they must not change in place
        if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
            out_NO = torch.addmm(out_NO, *factors, alpha=scale)
        else:
            out_NO.addmm_(*factors, alpha=scale)
        ctx.save_for_backward(x_NI, inner_NR, weight_OI, first_RI, second_OR)
        ctx.scale, ctx.state, ctx.shape = scale, state, x.shape
        return torch.ops.aten._unsafe_view.default(out_NO, [*x.shape[:-1], out_NO.shape[-1]])  # may change in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Compute gradients in the dtype of the products; autograd casts them."""
        x_NI, inner_NR, weight_OI, first_RI, second_OR = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, needs_first, needs_second, *_ = ctx.needs_input_grad
        x_grad = weight_grad = bias_grad = first_grad = second_grad = None
        with torch.autocast(grad.device.type, enabled=False):
            grad_NO = grad.reshape(-1, grad.shape[-1])
            inner_grad_NR = grad_NO.mm(second_OR.to(x_NI.dtype)).mul_(ctx.scale)
            if needs_x:
                whole_OI = weight_OI if ctx.state is None else unpacked(weight_OI, ctx.state)
                x_grad = grad_NO.mm(whole_OI.to(x_NI.dtype)).addmm_(inner_grad_NR, first_RI.to(x_NI.dtype))
                x_grad = x_grad.view(ctx.shape)
            if needs_weight:
                weight_grad = grad_NO.t().mm(x_NI)
            if needs_bias:
                bias_grad = grad_NO.sum(0)
            if needs_first:
                first_grad = inner_grad_NR.t().mm(x_NI)
            if needs_second:  # this operand order is a third faster on a CPU
                second_grad = inner_NR.t().mm(grad_NO).mul_(ctx.scale).t()
        return x_grad, weight_grad, bias_grad, first_grad, second_grad, None, None, None
