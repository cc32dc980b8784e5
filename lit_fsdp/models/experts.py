"""Adapters on experts that are kept in one tensor, which peft wraps parameter by parameter (``lora.ParamWrapper``).

peft adds an adapter to the weights of all experts before each forward pass, and autograd keeps the sums. Here the two
factors multiply each expert's tokens beside its weights, in the grouped products that transformers' mixtures use; what
these do not cover gets the sums, as from peft. Its modules stay as they are, and so do names, units, merges and saves.

Shapes: N tokens, K experts of each, S = N * K tokens sorted by expert, E experts, I inputs, O outputs, R the rank.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd
from transformers.integrations import moe

_ALIGNED = 8  # numbers of bf16 in 16 bytes, of which a row of a grouped product is a multiple


def fused_experts(model: nn.Module) -> dict[str, nn.Parameter]:
    """The tensors by name that each keep a weight of all experts of a layer, (E, I, O) or (E, O, I)."""
    return {
        name: param
        for module_name, module in model.named_modules()
        if "expert" in f"{module_name} {type(module).__name__}".lower() and not isinstance(module, _ConvNd)
        for name, param in module.named_parameters(module_name, recurse=False)
        if param.ndim == 3
    }


def apply_grouped_factors(model: nn.Module) -> None:
    """Let peft's adapters on parameters compute as above, in place."""
    for wrapper in [module for module in model.modules() if type(module).__name__ == "ParamWrapper"]:
        wrapper.forward = functools.partial(_wrapped, wrapper)  # which copies and pickles take along


def _wrapped(outer: Any, *args: Any, **kwargs: Any) -> Any:
    """What an outermost wrapper gives: one of several parameters of a module is inside the other's."""
    wrappers, base = {}, outer
    while hasattr(base, "lora_A"):
        wrappers[base.parameter_name] = base
        base = base.base_layer
    if any(wrapper.disable_adapters or wrapper.merged for wrapper in wrappers.values()):
        return type(outer).forward(outer, *args, **kwargs)
    adapters = {name: _factors(wrapper) for name, wrapper in wrappers.items()}
    implementation = getattr(getattr(base, "config", None), "_experts_implementation", None)
    # without gradients sums cost little, and logits are those of peft to the last bit
    if torch.is_grad_enabled() and hasattr(base, "is_transposed") and implementation == "grouped_mm":
        return _by_expert(base, adapters, *args, **kwargs)
    before = {name: base.__dict__[name] for name in adapters if name in base.__dict__}  # where fsdp1 puts them
    try:
        for name, (first, second, scale) in adapters.items():
            weight = getattr(base, name)
            is_transposed = weight.ndim == 3 and not wrappers[name]._did_swap_in_out_features
            factors = [f.to(weight.dtype) for f in ((first.mT, second.mT) if is_transposed else (second, first))]
            whole = torch.baddbmm(weight if weight.ndim == 3 else weight[None], *factors, alpha=scale)
            base.__dict__[name] = whole.view_as(weight)  # found before the parameter, which stays where it is
        return base(*args, **kwargs)
    finally:
        for name in adapters:
            base.__dict__.pop(name, None)
        base.__dict__.update(before)


def _factors(wrapper: Any) -> tuple[torch.Tensor, torch.Tensor, float]:
    """The two factors of each expert, (E, R, I) and (E, O, R), and their scale."""
    (name,) = wrapper.active_adapters
    first, second, experts = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight, wrapper.num_experts
    first_ERI = first.view(experts, -1, first.shape[1])
    return first_ERI, second.view(len(second), -1, experts).permute(2, 0, 1), wrapper.scaling[name]


def _by_expert(
    experts: Any,
    adapters: dict[str, tuple[torch.Tensor, torch.Tensor, float]],
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Transformers' forward of a module of experts, (N, I) to (N, O), of (N, I) and twice (N, K)."""
    order_S = top_k_index.flatten().argsort(stable=True)
    expert_S = top_k_index.flatten()[order_S]
    ends_E = torch.arange(experts.num_experts, device=order_S.device)
    ends_E = torch.searchsorted(expert_S, ends_E, right=True).int()

    def product(x_SI: torch.Tensor, name: str) -> torch.Tensor:
        weight = getattr(experts, name)
        out_SO = moe._grouped_mm(x_SI, weight if experts.is_transposed else weight.mT, ends_E)
        if experts.has_bias:
            out_SO = out_SO + getattr(experts, f"{name}_bias")[expert_S]
        if name in adapters:
            first_ERI, second_EOR, scale = adapters[name]
            more = -first_ERI.shape[1] % _ALIGNED
            first_ERI, second_ERO = (F.pad(f, (0, 0, 0, more)).to(weight.dtype) for f in (first_ERI, second_EOR.mT))
            inner_SR = moe._grouped_mm(x_SI, first_ERI.mT, ends_E) * scale
            out_SO = out_SO + moe._grouped_mm(inner_SR, second_ERO.contiguous(), ends_E)
        return out_SO

    x_SI = hidden_states[order_S // top_k_index.shape[1]]
    if experts.has_gate:
        x_SI = experts._apply_gate(product(x_SI, "gate_up_proj"))
    else:
        x_SI = experts.act_fn(product(x_SI, "up_proj"))
    out_SO = product(x_SI, "down_proj")
    if getattr(experts, "has_post_expert_norm", False):
        out_SO = experts.post_expert_norm(out_SO)
    out_SO = out_SO * top_k_weights.flatten()[order_S, None]
    places_S = torch.empty_like(order_S).scatter_(0, order_S, torch.arange(len(order_S), device=order_S.device))
    return out_SO[places_S].view(*top_k_index.shape, -1).sum(dim=1).to(hidden_states.dtype)
