"""Fused experts, and LoRA on them, for which peft wraps each parameter in a ``ParamWrapper``.

In every forward pass peft adds ``B @ A`` to the weights of all experts, and autograd saves the sums. Here the low-rank
factors are applied to each expert's tokens by grouped matrix products, as transformers applies the weights; experts
with their own forward pass use peft's sums. Grouped products also follow autocast, which transformers 5.24 ignores
(it computes in the dtype of the weights). Modules, names, units, merges and saves do not change.

Shapes: N tokens, K experts of each, S = N * K tokens sorted by expert, E experts, I inputs, O outputs, R the rank.
"""

import functools
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd
from transformers.integrations import moe

from lit_fsdp.models.expert_parallel import Dispatch, ExpertGroup, scaled_gradient
from lit_fsdp.models.quantize import PackedExperts

_PADDED_TO = 64  # on a CPU in bf16 the tokens of each expert are padded to a multiple of this
_ALIGNED = 8  # bf16 values in 16 bytes; rows of a grouped product must be a multiple of 16 bytes


def fused_experts(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by name that stack the weights of all experts of a layer, (E, I, O) or (E, O, I)."""
    return {
        name: param
        for module_name, module in model.named_modules()
        if "expert" in f"{module_name} {type(module).__name__}".lower() and not isinstance(module, _ConvNd)
        for name, param in module.named_parameters(module_name, recurse=False)
        if param.ndim == 3
    }


def grouped_experts(model: nn.Module) -> dict[str, Any]:
    """Experts modules by name with the common interface of transformers 5: hidden states, indices, weights."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "is_transposed")}


def choose_eager(model: nn.Module) -> list[str]:
    """Use eager experts where grouped products do not support their sizes, in place; returns their names.

    Rows must be a multiple of 16 bytes, which is 8 values in bf16.
    """
    found = []
    for name, experts in grouped_experts(model).items():
        sizes = [size for param in experts.parameters() if param.ndim == 3 for size in param.shape[1:]]
        if any(size % _ALIGNED for size in sizes):
            experts.config._experts_implementation = "eager"
            found.append(name)
    return found


def reads_inner_weights(module: nn.Module) -> bool:
    """Whether the forward pass reads weights of modules inside without calling them: wrapped or packed experts."""
    is_packed = any(isinstance(child, PackedExperts) for child in module.children())
    return is_packed or type(module).__name__ == "ParamWrapper"


def prepare_experts(model: nn.Module) -> None:
    """Replace the forward pass of grouped experts and of peft's wrappers around experts, in place."""
    for module in model.modules():
        is_experts = hasattr(module, "is_transposed") and not hasattr(module, "modules_to_save")  # peft's wrapper
        if reads_inner_weights(module) or is_experts:
            module.forward = functools.partial(_forward, module)  # unlike a closure, it survives copies and pickles


def _forward(
    outer: Any, hidden_states: torch.Tensor, *args: Any, adapters: dict[str, Any] | None = None, **kwargs: Any
) -> Any:
    """The forward pass of the outermost wrapper (peft nests one per parameter) or of the experts themselves.

    With expert parallel the experts are an FSDP unit, which gets the surrounding ``adapters`` as an argument.
    """
    wrappers, base = {}, outer
    while hasattr(base, "lora_A"):
        wrappers[base.parameter_name] = base
        base = base.base_layer
    packed = {name: child for name, child in base.named_children() if isinstance(child, PackedExperts)}
    is_off = any(wrapper.disable_adapters or wrapper.merged for wrapper in wrappers.values())
    if adapters is None:
        adapters = {} if is_off else {name: _factors(wrapper) for name, wrapper in wrappers.items()}
    is_divided = hasattr(base, "expert_group")
    if is_divided and base is not outer:
        return base(hidden_states, *args, adapters=adapters, **kwargs)
    implementation = getattr(getattr(base, "config", None), "_experts_implementation", None)
    kind = hidden_states.device.type
    is_autocast = kind != "meta" and torch.is_autocast_enabled(kind)
    # without gradients the sums are cheap, and logits are bit-equal to peft's
    is_ours = (torch.is_grad_enabled() or is_autocast) and implementation == "grouped_mm"
    # torch 2.15: compiled code passes factors in a layout that grouped products refuse
    is_ours = is_ours and not (adapters and torch.compiler.is_compiling())
    if is_divided or (is_ours and hasattr(base, "is_transposed")):
        dtype = torch.get_autocast_dtype(kind) if is_autocast else hidden_states.dtype
        found = _by_expert(base, packed, adapters, hidden_states.to(dtype), *args, **kwargs)
        return found.to(hidden_states.dtype)
    weights = {name: experts.unpacked(hidden_states.dtype) for name, experts in packed.items()}
    for name, (first, second, scale) in adapters.items():
        weight = weights.get(name, getattr(base, name))
        is_transposed = weight.ndim == 3 and not wrappers[name]._did_swap_in_out_features
        factors = [f.to(weight.dtype) for f in ((first.mT, second.mT) if is_transposed else (second, first))]
        whole = torch.baddbmm(weight if weight.ndim == 3 else weight[None], *factors, alpha=scale)
        weights[name] = whole.view_as(weight)
    # call the base with its hooks, with which transformers records the logits of routers
    is_called = base is not outer and "forward" not in vars(base)
    run = base if is_called else functools.partial(type(base).forward, base)
    before = {name: base.__dict__[name] for name in weights if name in base.__dict__}  # fsdp1 stores them here
    base.__dict__.update(weights)  # shadows the parameters, which stay registered
    try:
        return run(hidden_states, *args, **kwargs)
    finally:
        for name in weights:
            del base.__dict__[name]
        base.__dict__.update(before)


def _factors(wrapper: Any) -> tuple[torch.Tensor, torch.Tensor, float]:
    """The two factors of each expert, (E, R, I) and (E, O, R), and their scale."""
    (name,) = wrapper.active_adapters
    first, second, experts = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight, wrapper.num_experts
    first_ERI = first.view(experts, -1, first.shape[1])
    return first_ERI, second.view(len(second), -1, experts).permute(2, 0, 1), wrapper.scaling[name]


class _Unpacked(torch.autograd.Function):
    """A grouped product with 4-bit experts, which backward dequantizes again for the gradient of the input."""

    @staticmethod
    def forward(
        ctx: Any, x_SI: torch.Tensor, experts: PackedExperts, ends_E: torch.Tensor, is_transposed: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(ends_E)
        ctx.experts, ctx.is_transposed = experts, is_transposed
        weight = experts.unpacked(x_SI.dtype)
        return moe._grouped_mm(x_SI, weight if is_transposed else weight.mT, ends_E)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (ends_E,) = ctx.saved_tensors
        weight = ctx.experts.unpacked(grad.dtype)
        return moe._grouped_mm(grad, weight.mT if ctx.is_transposed else weight, ends_E), None, None, None


def _by_expert(
    experts: Any,
    packed: dict[str, PackedExperts],
    adapters: dict[str, tuple[torch.Tensor, torch.Tensor, float]],
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """The experts' forward pass as transformers defines it: (N, I) to (N, O), with indices and weights (N, K)."""
    num_choices, group = top_k_index.shape[1], getattr(experts, "expert_group", None)
    if group is not None:
        dispatch = Dispatch(group, top_k_index)
        own = {name: _own_factors(group, *given) for name, given in adapters.items()}
        x_TI, weights_T1 = dispatch.there(hidden_states, top_k_weights)
        out_TO = _products(experts, packed, own, x_TI, dispatch.expert_T, len(group.own))
        return dispatch.back(out_TO * weights_T1, hidden_states.dtype)
    order_S = top_k_index.flatten().argsort(stable=True)
    inverse_S = torch.empty_like(order_S).scatter_(0, order_S, torch.arange(len(order_S), device=order_S.device))
    x_SI = _Rows.apply(hidden_states, order_S // num_choices, inverse_S, num_choices)
    out_SO = _products(experts, packed, adapters, x_SI, top_k_index.flatten()[order_S], experts.num_experts)
    out_NKO = _Rows.apply(out_SO, inverse_S, order_S, 1).view(*top_k_index.shape, -1)
    return (out_NKO * top_k_weights[..., None]).sum(dim=1)


class _Rows(torch.autograd.Function):
    """Gather rows of a tensor, each of which occurs ``times`` times; the backward pass gathers from ``places``.

    The backward pass of indexing would scatter instead, and accumulate in the dtype of the gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: torch.Tensor, places: torch.Tensor, times: int) -> torch.Tensor:
        ctx.save_for_backward(places)
        ctx.times = times
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        found = grads[0].index_select(0, *ctx.saved_tensors)
        return found if ctx.times == 1 else found.unflatten(0, (-1, ctx.times)).sum(1), None, None, None


def _padded(expert_S: torch.Tensor, ends_E: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The new index of each row, and the ends, after padding each expert's rows to a multiple of ``_PADDED_TO``.

    oneDNN builds, and keeps, a bf16 kernel for each new number of rows: 3 ms each, for every expert in every step.
    """
    counts_E = ends_E.diff(prepend=ends_E[:1] * 0)
    more_E = -counts_E % _PADDED_TO
    before_E = more_E.cumsum(0) - more_E  # rows added before those of each expert
    return torch.arange(len(expert_S)) + before_E[expert_S], (counts_E + more_E).cumsum(0).int()


def _own_factors(
    group: ExpertGroup, first_ERI: torch.Tensor, second_EOR: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Factors of this rank's experts; all ranks have all adapters, so the engine averages over all of them."""
    first, second = (scaled_gradient(factor[group.own], group.degree) for factor in (first_ERI, second_EOR))
    return first, second, scale


def _products(
    experts: Any,
    packed: dict[str, PackedExperts],
    adapters: dict[str, tuple[torch.Tensor, torch.Tensor, float]],
    x_SI: torch.Tensor,
    expert_S: torch.Tensor,
    num_experts: int,
) -> torch.Tensor:
    """Apply its expert to each row, (S, I) to (S, O); the tensor ``expert_S`` ascends and indexes the local experts."""
    ends_E = torch.searchsorted(expert_S, torch.arange(num_experts, device=expert_S.device), right=True).int()
    place_S = None
    is_real = not (isinstance(x_SI, FakeTensor) or torch.compiler.is_compiling())  # sizes will depend on values
    if x_SI.device.type == "cpu" and x_SI.dtype == torch.bfloat16 and is_real:
        place_S, ends_E = _padded(expert_S, ends_E)
        expert_S = torch.repeat_interleave(ends_E.diff(prepend=ends_E[:1] * 0))
        x_SI = x_SI.new_zeros(len(expert_S), x_SI.shape[1]).index_copy(0, place_S, x_SI)

    def product(x_SI: torch.Tensor, name: str) -> torch.Tensor:
        if name in packed:
            out_SO = _Unpacked.apply(x_SI, packed[name], ends_E, experts.is_transposed)
        else:
            weight = getattr(experts, name).to(x_SI.dtype)  # for autocast, which does not cover grouped products
            out_SO = moe._grouped_mm(x_SI, weight if experts.is_transposed else weight.mT, ends_E)
        if experts.has_bias:
            out_SO = out_SO + getattr(experts, f"{name}_bias")[expert_S].to(out_SO.dtype)
        if name in adapters:
            first_ERI, second_EOR, scale = adapters[name]
            more = -first_ERI.shape[1] % _ALIGNED
            first_ERI, second_ERO = (F.pad(f, (0, 0, 0, more)).to(out_SO.dtype) for f in (first_ERI, second_EOR.mT))
            inner_SR = moe._grouped_mm(x_SI, first_ERI.mT, ends_E) * scale
            out_SO = out_SO + moe._grouped_mm(inner_SR, second_ERO.contiguous(), ends_E)
        return out_SO

    x_SI = (
        experts._apply_gate(product(x_SI, "gate_up_proj"))
        if experts.has_gate
        else experts.act_fn(product(x_SI, "up_proj"))
    )
    out_SO = product(x_SI, "down_proj")
    out_SO = out_SO if place_S is None else out_SO.index_select(0, place_S)
    return experts.post_expert_norm(out_SO) if getattr(experts, "has_post_expert_norm", False) else out_SO
