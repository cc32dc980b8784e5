"""SDPA over each sample of a pack separately: no cost is quadratic in the pack length, and no head is repeated.

Attention sinks and soft caps, which SDPA does not support, are computed eagerly, a chunk of queries at a time.

Shapes: B rows, H query heads, K key and value heads (H is a multiple of K), T tokens of a row, D head size.
"""

import functools
import inspect
import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import accumulate
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from lit_fsdp.config.model import WITHOUT_SDPA
from lit_fsdp.errors import ConfigError
from lit_fsdp.models.context import ContextGroup

BY_SAMPLE = "sdpa_by_sample"
"""Name of this backend in transformers; :func:`by_sample` sets it."""
_OWN_MASKS = re.compile(r'_attn_implementation (?:in \([^)]*"sdpa"[^)]*\)|== "sdpa")')
"""Code of families that derive a mask of their own, but for transformers' own SDPA only (5.24: 11, and Falcon)."""
_running: list[Sequence[int] | None] = []
"""The ``sample_lengths`` of the running forward passes, the innermost last."""

kept_by: list[Any] = []
"""Contexts in which the running blocks want attention to run, the innermost last."""


def is_causal(model: torch.nn.Module) -> bool:
    """Whether no token attends to later tokens; false for models such as BERT unless configured as decoders."""
    return all(getattr(module, "is_causal", True) is not False for module in model.modules())


def check_causal(model: Any) -> None:
    """Refuse models in which a token sees later tokens, such as BERT as an encoder: they would learn to copy them.

    Raises:
        ConfigError: The model is known not to be causal.
    """
    config = model.config
    kind, fix = f"a model of type {config.model_type}", "name another model"
    if not getattr(config, "is_decoder", True) and "as a standalone" in source_of(type(model)):  # type: ignore[arg-type]
        fix = "set model.config_overrides: {is_decoder: true}"
    elif config.model_type == "xlm" and not config.causal:
        fix = "set model.config_overrides: {causal: true}"
    elif getattr(config.get_text_config(), "use_bidirectional_attention", None) in (True, "all"):  # of Gemma
        fix = "set model.config_overrides: {use_bidirectional_attention: false}"
    elif config.model_type == "doge" and config.is_moe:
        # transformers 5.24; delete when findings/doge-mixture-routes-by-other-tokens.sh changes
        kind, fix = "a Doge model with is_moe, whose router mixes tokens and rows", "use a Doge model without is_moe"
    elif config.model_type != "cpmant":  # a prefix model that expects padding on the left
        return
    raise ConfigError("model.name", f"{kind}, in which a token depends on later tokens", "a causal model", fix)


def _derives_masks(cls: Any) -> bool:
    """Whether a model class slices a mask or derives its own from it, as those with an index of keys do."""
    return cls.__name__.startswith("Doge") or bool(_OWN_MASKS.search(source_of(sys.modules[cls.__module__])))


@functools.cache
def source_of(of: Any) -> str:
    """The code of a class or module; empty if it has none."""
    try:
        return inspect.getsource(of)
    except (OSError, TypeError):
        return ""


def by_sample(model: Any, is_wanted: bool) -> None:
    """Switch a model that uses SDPA to attention sample by sample, or back to that of transformers; in place."""
    before, kind = model.config._attn_implementation, model.config.model_type
    of_transformers = "eager" if kind in WITHOUT_SDPA else "sdpa"
    has_own = _derives_masks(type(model))
    fits = model._supports_attention_backend and not has_own and is_causal(model)
    if fits and before in ((of_transformers, "sdpa") if is_wanted else (BY_SAMPLE,)):  # older versions report sdpa
        name = BY_SAMPLE if is_wanted else of_transformers
        if kind in WITHOUT_SDPA:  # for these transformers refuses any name that contains sdpa
            model.config._attn_implementation = name
        else:
            model.set_attn_implementation(name)
        if torch.cuda.is_available():
            _has_varlen()  # registers the operator, so that recomputation can keep its results
        if is_wanted:
            model.register_forward_pre_hook(_begin, with_kwargs=True)
            model.register_forward_hook(_end, always_call=True)


def _begin(model: Any, args: Any, kwargs: dict[str, Any]) -> None:
    _running.append(kwargs.get("sample_lengths"))


def _end(*unused: Any) -> None:
    _running.pop()


def _mask(**arguments: Any) -> torch.Tensor | int | None:
    """Return the mask for layers: None if they are causal, the size of a sliding window, or SDPA's mask."""
    window = arguments.get("local_size")
    is_chunked = window is not None and window == getattr(arguments.get("config"), "attention_chunk_size", None)
    is_other = arguments.get("use_vmap") or arguments.get("allow_is_bidirectional_skip") or is_chunked
    # transformers < 5.4 passes the positions of the queries: delete when the minimum is later
    num_queries = arguments["q_length"] if "q_length" in arguments else len(arguments["cache_position"])
    is_one_pass = arguments.get("attention_mask") is None and num_queries == arguments["kv_length"]
    # transformers forbids the skip for packed rows; our batches carry sample lengths instead of a mask
    is_known = arguments.get("allow_is_causal_skip", True) or bool(_running and _running[-1])
    return window if is_one_pass and is_known and not is_other else sdpa_mask(**arguments)


def _attend(
    module: torch.nn.Module,
    query_BHTD: torch.Tensor,
    key_BKTD: torch.Tensor,
    value_BKTD: torch.Tensor,
    attention_mask: torch.Tensor | int | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sample_lengths: Sequence[int] | None = None,
    shared_lengths: Sequence[int] = (),
    context: ContextGroup | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function for transformers, (B, T, H, D); without ``sample_lengths`` each row is one sample.

    The ``softcap`` bounds the scores; the values ``s_aux`` (H) are the logits of attention sinks, one per head.

    With ``shared_lengths`` each sample of the second half continues that many first tokens of its pair in the first. In
    a ``context`` group tensors contain this rank's part of the row; lengths describe the whole row.
    """
    tensors = (query_BHTD, key_BKTD, value_BKTD)
    options: dict[str, Any] = {"dropout_p": dropout, "scale": scaling}
    if is_plain := softcap is not None or s_aux is not None:
        options |= {"softcap": softcap, "sinks": s_aux}
    if context is not None:
        if context.method == "all_gather":
            window: Any = attention_mask
            return _by_query(tensors, context, sample_lengths or (), window, options), None
        given: dict[str, Any] = {"dropout": dropout, "scaling": scaling, "sample_lengths": sample_lengths, **others}
        own_sinks = None if s_aux is None else s_aux.chunk(context.degree)[context.rank]
        query, key, value = context.to_heads(tensors)
        out, _ = _attend(module, query, key, value, attention_mask, softcap=softcap, s_aux=own_sinks, **given)
        return context.to_positions(out), None
    if is_plain and torch.is_tensor(attention_mask):
        key, value = (repeat_kv(x, query_BHTD.shape[1] // x.shape[1]) for x in tensors[1:])
        return _plain(query_BHTD, key, value, attention_mask, **options).transpose(1, 2).contiguous(), None
    if torch.is_tensor(attention_mask) or (attention_mask is None and sample_lengths is None and not is_plain):
        out, _ = sdpa_attention_forward(module, *tensors, attention_mask, dropout=dropout, scaling=scaling, **others)
        # no mask describes shared prompts: NaN makes the isolation proof fail
        return out * torch.nan if shared_lengths else out, None
    fits_flash = query_BHTD.dtype != torch.float32 and query_BHTD.shape[-1] == value_BKTD.shape[-1] <= 256
    lengths = list(sample_lengths or [query_BHTD.shape[2]])
    if sample_lengths and query_BHTD.is_cuda and fits_flash and not dropout and not is_plain and _has_varlen():
        whole = [torch.cat(_samples(x, lengths, shared_lengths), dim=2) if shared_lengths else x for x in tensors[1:]]
        return _varlen((query_BHTD, *whole), attention_mask, scaling, others), None
    parts: Any = zip(*(_samples(x, lengths, shared_lengths) for x in tensors), strict=True)
    found = [_banded(part, attention_mask, options) for part in parts]
    for i, shared in enumerate(shared_lengths, len(found) - len(shared_lengths)):
        found[i] = found[i][:, :, shared:]
    return _joined(found), None


def _attend_as_asked(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    with kept_by[-1] if kept_by else nullcontext():
        return _attend(*args, **kwargs)


def _samples(x_BHTD: torch.Tensor, lengths: list[int], shared_lengths: Sequence[int]) -> list[torch.Tensor]:
    """Split a row into samples; a sample with a shared prompt includes it."""
    parts = list(x_BHTD.split(lengths, dim=2))
    for i, shared in enumerate(shared_lengths):
        own = i + len(shared_lengths)
        parts[own] = torch.cat([parts[i][:, :, :shared], parts[own]], dim=2)
    return parts


def _by_query(
    tensors: Sequence[torch.Tensor],
    context: ContextGroup,
    lengths: Sequence[int],
    window: int | None,
    options: dict[str, Any],
) -> torch.Tensor:
    """Attention of this rank's queries to the keys and values of all ranks."""
    query, key, value = tensors[0], *(context.gathered(x, dim=2) for x in tensors[1:])
    ends = list(accumulate(lengths))
    found, done = [], 0
    for first, last in context.parts(key.shape[2])[context.rank]:
        for start, end in zip([0, *ends], ends, strict=False):
            a, b = max(start, first), min(end, last)
            if a < b:
                queries = slice(done, done := done + b - a)
                found.append(_banded((query[:, :, queries], key[:, :, start:b], value[:, :, start:b]), window, options))
    return _joined(found)


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate parts (B, H, T, D) along T as (B, T, H, D), the layout of kernels; a single part is not copied."""
    turned = [part.transpose(1, 2) for part in parts]
    return (torch.cat(turned, dim=1) if len(turned) > 1 else turned[0]).contiguous()


_QUERIES = 1024  # per chunk, where earlier keys exist
# On a CPU the backward pass of torch's kernel is slower in bf16 than in fp32 up to about so many tokens times the head
# size (torch 2.15, heads of 64: 2.5 times as slow at 128 tokens, equal at 600 to 1,000; of 128: equal at 300 to 400).
_SHORT = 48 * 1024
# Samples are padded to a multiple of this: oneDNN compiles bf16 kernels per shape and keeps them, on a CPU with AMX
# 18 ms and 7 MB for each new length (torch 2.15).
_STEP = 64


def _banded(tensors: Sequence[torch.Tensor], window: int | None, options: dict[str, Any]) -> torch.Tensor:
    """Causal attention of one sample's last queries, in chunks if the sample is longer than the window."""
    query, key, value = tensors
    num_queries, num_keys, grouped = query.shape[2], key.shape[2], query.shape[1] != key.shape[1]
    before, is_plain = num_keys - num_queries, "sinks" in options
    if not before and not is_plain and (window is None or num_keys <= window):
        if (is_on_cpu := query.device.type == "cpu") and torch.is_autocast_enabled("cpu"):  # rotated heads may be fp32
            query, key, value = (x.to(torch.get_autocast_dtype("cpu")) for x in tensors)
        is_narrow = is_on_cpu and query.dtype in (torch.bfloat16, torch.float16)
        if not is_narrow or options["dropout_p"] or query.shape[-1] != value.shape[-1]:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped, **options)
        if num_keys * query.shape[-1] <= _SHORT:
            short: torch.Tensor = _Short.apply(query, key, value, options["scale"])
            return short
        query, key, value = (_up_to_step(x) for x in (query, key, value))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped, **options)
        return out[:, :, :num_keys]
    if grouped:  # with a mask, fast kernels do not support grouped heads
        key, value = (repeat_kv(x, query.shape[1] // x.shape[1]) for x in (key, value))
    positions, reach = torch.arange(num_keys, device=query.device), window or num_keys
    found, size = [], min(reach, _QUERIES) if before or is_plain else reach
    for start in range(0, num_queries, size):
        queries, keys = slice(start, start + size), slice(max(0, before + start - reach + 1), before + start + size)
        distance = positions[before:][queries].unsqueeze(1) - positions[keys]
        near = (distance >= 0) & (distance < reach)
        part = (query[:, :, queries], key[:, :, keys], value[:, :, keys])
        found.append((_plain if is_plain else F.scaled_dot_product_attention)(*part, attn_mask=near, **options))
    return torch.cat(found, dim=2)


def _up_to_step(x_BHTD: torch.Tensor) -> torch.Tensor:
    """Pad to the next multiple of :data:`_STEP` tokens, which no earlier token attends to."""
    return F.pad(x_BHTD, (0, 0, 0, -x_BHTD.shape[2] % _STEP))


class _Short(torch.autograd.Function):
    """Causal attention on a CPU with a forward pass in bf16 or fp16 and a backward pass in fp32, (B, H, T, D)."""

    @staticmethod
    def forward(
        ctx: Any, query_BHTD: torch.Tensor, key_BKTD: torch.Tensor, value_BKTD: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """Keep the inputs, the output and the log-sum-exp of the scores."""
        tensors, num = (query_BHTD, key_BKTD, value_BKTD), query_BHTD.shape[2]
        out, lse = _flash(*map(_up_to_step, tensors), 0.0, True, scale=scale)
        out_BHTD = out[:, :, :num]
        ctx.save_for_backward(*tensors, out_BHTD, lse[:, :, :num])
        ctx.scale = scale
        return out_BHTD

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_BHTD: torch.Tensor) -> Any:
        """Return the gradients in the dtype of the inputs."""
        wide = [x.float() for x in (grad_BHTD, *ctx.saved_tensors)]
        found = _flash_backward(*wide, 0.0, True, scale=ctx.scale)
        return (*(x.to(grad_BHTD.dtype) for x in found), None)


_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _plain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor,
    dropout_p: float,
    scale: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Eager attention, (B, H, T, D), with a soft cap or with sinks (H); the softmax is in fp32."""
    scores = (query @ key.transpose(2, 3)).float() * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~attn_mask, torch.finfo(scores.dtype).min)  # not -inf: padded rows attend to nothing
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    weights = scores.softmax(dim=-1)[..., : key.shape[2]].to(value.dtype)
    return F.dropout(weights, dropout_p) @ value


@functools.cache
def _has_varlen() -> bool:
    """Whether torch has :func:`_varlen`'s kernel with grouped heads and windows, and the GPU is Ampere or newer."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters and torch.cuda.get_device_capability()[0] >= 8


def _varlen(
    tensors: Sequence[torch.Tensor], window: int | None, scaling: float | None, lengths: dict[str, Any]
) -> torch.Tensor:
    """All samples of a row in one call of torch's FlashAttention kernel; each last query attends to all its keys."""
    from torch.nn.attention.varlen import varlen_attn

    query, key, value = (x[0].transpose(0, 1) for x in tensors)
    reach = (-1 if window is None else window - 1, 0)
    options: Any = {"scale": scaling, "window_size": reach, "enable_gqa": query.shape[1] != key.shape[1]}
    borders = lengths["cu_seq_lens_q"], lengths["cu_seq_lens_k"]
    longest = lengths["max_length_q"], lengths["max_length_k"]
    out: Any = varlen_attn(query, key, value, *borders, *longest, **options)
    return out[None]


AttentionInterface.register(BY_SAMPLE, _attend_as_asked)
AttentionMaskInterface.register(BY_SAMPLE, _mask)
