"""RMS norms and SiLU-gated activations as one autograd function each, which saves only its inputs.

transformers implements them as three to seven operations, each of which saves tensors for the backward pass. Modules
do not change; without gradients and under ``torch.compile`` they run transformers' code.

Shapes: N rows, D features.
"""

import functools
import re
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from lit_fsdp.models.attention import source_of

_EPSILONS = ("variance_epsilon", "eps")
_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_PRODUCT = r"self\.down_proj\(self\.act_fn\(self\.gate_proj\((\w+)\)\) \* self\.up_proj\(\1\)\)"
_GATED = re.compile(rf"return {_PRODUCT}|down_proj = {_PRODUCT.replace('1', '2')}\s+return down_proj")


def apply_single_functions(model: nn.Module) -> None:
    """Replace the forward pass of RMS norms and SiLU-gated feed-forward layers, in place."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and (kind := _kind(module)) is not None:
            module.forward = functools.partial(_norm, module, kind)  # unlike a closure, it survives copies and pickles
        elif _is_gated(module):
            module.forward = functools.partial(_feed_forward, module)


def _kind(norm: Any) -> tuple[float, int, bool] | None:
    """``eps``, ``plus`` and ``casts_first`` of :func:`_normed` for a norm on meta; None if it computes otherwise."""
    names = [name for name, _ in norm.named_parameters()]
    if names != ["weight"] or norm.weight.ndim != 1 or not any(hasattr(norm, name) for name in _EPSILONS):
        return None
    eps = next(getattr(norm, name) for name in _EPSILONS if hasattr(norm, name))
    ramp = torch.linspace(-1, 2, norm.weight.numel())
    x_ND, weight_D = torch.stack([ramp, ramp.flip(0) * 3]).bfloat16(), (ramp * 0.5).bfloat16()
    try:
        wanted = torch.func.functional_call(norm, {"weight": weight_D}, (x_ND,))
    except (RuntimeError, TypeError):
        return None
    kinds = [(eps, 0, True), (eps, 1, False), (eps, 0, False)]  # Llama, Gemma, OLMo
    return next((kind for kind in kinds if torch.equal(_normed(x_ND, weight_D, *kind)[0], wanted)), None)


def _is_gated(module: Any) -> bool:
    parts = dict(module.named_children())
    is_silu = type(parts.get("act_fn")).__name__ in ("SiLU", "SiLUActivation")
    return is_silu and parts.keys() == _PARTS and _multiplies(module.__class__)


@functools.cache
def _multiplies(kind: Any) -> bool:
    """Whether the forward pass of a class is the gated product and nothing else."""
    body = source_of(kind.forward).partition(":\n")[2]
    return _GATED.fullmatch(body.strip()) is not None


def _norm(module: Any, kind: tuple[float, int, bool], hidden_states: torch.Tensor) -> torch.Tensor:
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return type(module).forward(module, hidden_states)
    return _RootMeanSquare.apply(hidden_states, module.weight, *kind)


def _feed_forward(module: Any, x: torch.Tensor) -> torch.Tensor:
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return type(module).forward(module, x)
    return module.down_proj(_Gated.apply(module.gate_proj(x), module.up_proj(x)))


def _normed(
    x_ND: torch.Tensor, weight_D: torch.Tensor, eps: float, plus: int, casts_first: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output of a norm, in the same dtype as transformers, and the inverse root mean squares, (N, 1).

    With ``casts_first`` the result is cast back to the dtype of ``x_ND`` before the multiplication by the weight, else
    after it; the number ``plus`` is added to the weight.
    """
    x32_ND = x_ND.float()
    scale_N1 = x32_ND.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    normed_ND = x32_ND * scale_N1
    if casts_first:
        return weight_D * normed_ND.to(x_ND.dtype), scale_N1
    return (normed_ND * (weight_D.float() + plus)).to(x_ND.dtype), scale_N1


class _RootMeanSquare(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: torch.Tensor, weight_D: torch.Tensor, *kind: Any) -> torch.Tensor:
        out_ND, scale_N1 = _normed(x_ND, weight_D, *kind)
        ctx.save_for_backward(x_ND, weight_D, scale_N1)
        ctx.plus = kind[1]
        return out_ND

    @staticmethod
    def backward(ctx: Any, grad_ND: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_ND, weight_D, scale_N1 = ctx.saved_tensors
        x_grad = weight_grad = None
        normed_ND, grad32_ND = x_ND.float() * scale_N1, grad_ND.float()
        if ctx.needs_input_grad[1]:
            weight_grad = (grad32_ND * normed_ND).flatten(0, -2).sum(0).to(weight_D.dtype)
        if ctx.needs_input_grad[0]:
            inner_ND = grad32_ND * (weight_D.float() + ctx.plus)
            mean_N1 = (inner_ND * normed_ND).mean(-1, keepdim=True)
            x_grad = inner_ND.sub_(normed_ND.mul_(mean_N1)).mul_(scale_N1).to(x_ND.dtype)
        return x_grad, weight_grad, None, None, None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)
