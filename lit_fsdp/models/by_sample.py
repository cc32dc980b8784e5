"""Attention of each sample on its own, as plain matrix products: the fast way on CPUs.

Torch's fused attention on a CPU computes every pair of a pack under a mask, those of different samples too, and its
backward pass is slow on short samples. Here each sample is a few products of its own length, so that nothing is
computed for pairs of different samples or for padding. The query heads that share a key head are one product.

It stores the probabilities for backward, H t t elements of a sample; from :data:`LONGEST` tokens on, a sample goes
through fused attention instead. Windows, soft caps, sinks, dropout and calls without borders (generation) go to
transformers' own SDPA, with its mask.

Shapes: B packs or padded rows, T tokens of each, t tokens of a sample, H query heads, K key heads, G = H / K, D width.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

NAME = "by_sample"
"""As ``model.attn_implementation`` says it."""
LONGEST = 1024
"""Tokens of the longest sample whose probabilities are kept."""
_SHORT = 256


def register() -> None:
    """Make :data:`NAME` known to transformers; twice is once."""
    AttentionInterface.register(NAME, by_sample_attention)
    AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def with_borders(inputs: Mapping[str, Any], borders: torch.Tensor | None) -> dict[str, Any]:
    """What the model gets of a batch: its inputs and ``cu_seq_lens_q``, where its sequences begin.

    Args:
        inputs: Of a packed batch, or of rows padded on the right.
        borders: Of a packed batch; else found from ``attention_mask``, the padding of a row being one more sequence.
    """
    if borders is None and "attention_mask" in inputs:
        mask_BT = inputs["attention_mask"]
        rows, length = mask_BT.shape
        begins = torch.arange(rows, device=mask_BT.device) * length
        ends = begins + mask_BT.sum(dim=1)
        padded_on_the_right = mask_BT.diff(dim=1).le(0).all()
        assert padded_on_the_right, "rows are padded on the right"
        inner = torch.stack([begins, ends], dim=1).flatten()
        borders = torch.cat([inner, torch.tensor([rows * length], device=inner.device)]).unique().int()
    return dict(inputs) if borders is None else {**inputs, "cu_seq_lens_q": borders}


def by_sample_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each sequence, as transformers calls it.

    Args:
        module: The layer.
        query: (B, H, T, D).
        key: (B, K, T, D).
        value: (B, K, T, D).
        attention_mask: What SDPA would need; not looked at where ``cu_seq_lens_q`` says it all.
        **options: ``cu_seq_lens_q`` int32 (N + 1,): where sequences begin in the flattened (B * T) tokens, none across
            a border between rows; ``scaling``, default 1 / sqrt(D); and what else transformers passes.

    Returns:
        (B, T, H, D) and None.
    """
    borders = options.get("cu_seq_lens_q")
    length = query.shape[2]
    if borders is None or key.shape[2] != length or _is_special(module, options, length):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    scaling = options.get("scaling") or query.shape[-1] ** -0.5
    rows = []
    for q, k, v, sizes in zip(query, key, value, _lengths_by_row(borders, length), strict=True):
        samples = zip(q.split(sizes, 1), k.split(sizes, 1), v.split(sizes, 1), strict=True)
        rows.append(torch.cat([_one_sample(*sample, scaling=scaling) for sample in samples], dim=1))
    return torch.stack(rows).transpose(1, 2), None


def _is_special(module: nn.Module, options: dict[str, Any], length: int) -> bool:
    if options.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        return True
    window = options.get("sliding_window")
    others = (options.get(name) for name in ("softcap", "s_aux", "position_bias"))
    return (
        bool(options.get("dropout")) or (window is not None and window < length) or any(x is not None for x in others)
    )


def _lengths_by_row(borders: torch.Tensor, length: int) -> list[list[int]]:
    """Sequence lengths of each row."""
    rows: list[list[int]] = []
    places = borders.tolist()
    for begin, end in itertools.pairwise(places):
        if begin % length == 0:
            rows.append([])
        rows[-1].append(end - begin)
    return rows


def _one_sample(
    query_HtD: torch.Tensor, key_KtD: torch.Tensor, value_KtD: torch.Tensor, scaling: float
) -> torch.Tensor:
    heads, length, width = query_HtD.shape
    groups = heads // len(key_KtD)
    if length >= LONGEST:
        key, value = (x.repeat_interleave(groups, 0)[None] for x in (key_KtD, value_KtD))
        return F.scaled_dot_product_attention(query_HtD[None], key, value, is_causal=True, scale=scaling)[0]
    later = _later_keys(length, groups, query_HtD.dtype, query_HtD.device)
    query = query_HtD.reshape(len(key_KtD), groups * length, width)
    scores = torch.baddbmm(later, query, key_KtD.transpose(1, 2), alpha=scaling)
    return torch.bmm(torch.softmax(scores, dim=-1), value_KtD).view(heads, length, -1)


def _later_keys(length: int, groups: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Minus infinity where a key comes after its query; (1, G * t, t). Layers share it; of long ones few are kept."""
    return (_short_mask if length <= _SHORT else _long_mask)(length, groups, dtype, device)


def _mask(length: int, groups: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    mask = torch.full((length, length), float("-inf"), dtype=dtype, device=device).triu(1)
    return mask.repeat(groups, 1)[None]


_short_mask = functools.lru_cache(maxsize=_SHORT)(_mask)
_long_mask = functools.lru_cache(maxsize=16)(_mask)
