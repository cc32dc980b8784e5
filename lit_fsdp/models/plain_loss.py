"""The loss of logits that are all there: the plain way, and the one for models whose head is not understood.

Shapes: B batch, T tokens, K kept positions, V vocabulary, N supervised tokens.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F

from lit_fsdp.models.token_scores import LossTerms, TokenScores, score_logits

_SCORED_ROWS = 256


def loss_of_logits(
    logits_NV: torch.Tensor, targets_N: torch.Tensor, terms: LossTerms
) -> tuple[torch.Tensor, TokenScores]:
    """The summed loss, a scalar with a graph, and the scores of each token without one.

    The upcast copy is (N, V). No tokens give a zero that still depends on the logits: backward runs through the whole
    model and no rank misses a collective.

    Args:
        logits_NV: What the model returned, scaled and capped already.
        targets_N: Right tokens.
        terms: Only label smoothing and z-loss are read.
    """
    wide_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    scores = _scores(logits_NV.detach(), targets_N, terms)
    if not len(targets_N):  # cross_entropy of none would be a zero too, but not on every backend
        return wide_NV.sum(), scores
    loss = F.cross_entropy(wide_NV, targets_N, reduction="sum", label_smoothing=terms.label_smoothing)
    if terms.z_loss:
        loss = loss + terms.z_loss * wide_NV.logsumexp(dim=-1).square().sum()
    return loss, scores


@torch.no_grad()
def _scores(logits_NV: torch.Tensor, targets_N: torch.Tensor, terms: LossTerms) -> TokenScores:
    made = LossTerms(z_loss=terms.z_loss, label_smoothing=terms.label_smoothing)
    with torch.autocast(logits_NV.device.type, enabled=False):
        found = [
            score_logits(rows.clone(), targets_N[start : start + len(rows)], made, with_grad=False)[0]
            for start, rows in zip(range(0, len(logits_NV), _SCORED_ROWS), logits_NV.split(_SCORED_ROWS), strict=False)
        ]
    return TokenScores.joined(found, logits_NV)


def logits_of(
    model: nn.Module, inputs: Mapping[str, Any], targets_BT: torch.Tensor, supervised_BT: torch.Tensor
) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """What the model returns, with the logits (N, V) and targets (N,) of supervised tokens.

    Models whose forward knows ``logits_to_keep`` apply the head only where it is needed: to supervised tokens, or with
    older transformers to positions that some row of the batch supervises. A batch without supervised tokens gives
    logits with a graph all the same, of which none is selected.
    """
    selection = head_selection(_forward_of(model))
    if selection == "none":
        out = model(**inputs)
        return out, out.logits[supervised_BT], targets_BT[supervised_BT]
    kept_BT = supervised_BT
    if not supervised_BT.any():  # one token without a loss, so that the head takes part in the backward pass
        kept_BT = supervised_BT.clone()
        kept_BT[0, 0] = True
    if selection == "tokens":
        out = model(**inputs, logits_to_keep=kept_BT)
        chosen_K = supervised_BT[kept_BT]
        return out, out.logits[chosen_K], targets_BT[supervised_BT]
    kept_K = kept_BT.any(dim=0).nonzero()[:, 0]
    out = model(**inputs, logits_to_keep=kept_K)
    chosen_BK = supervised_BT[:, kept_K]
    return out, out.logits[chosen_BK], targets_BT[:, kept_K][chosen_BK]


def _forward_of(model: nn.Module) -> Callable[..., Any]:
    """The forward that is called in the end: wrappers such as FSDP1's pass everything on to ``.module``."""
    inner = getattr(model, "module", None)
    return _forward_of(inner) if isinstance(inner, nn.Module) else type(model).forward


@functools.cache
def head_selection(forward: Callable[..., Any]) -> Literal["none", "positions", "tokens"]:
    """What ``logits_to_keep`` of this forward may select: nothing, positions for all rows, or single tokens."""
    if "logits_to_keep" not in inspect.signature(forward).parameters:
        return "none"
    # newer transformers slice in one shared function, which takes a mask; older ones in each forward, by position
    keep = inspect.unwrap(forward).__globals__.get("slice_logits_to_keep")
    if keep is None:
        return "positions"
    try:
        by_mask = keep(torch.zeros(1, 2, 1), torch.tensor([[True, False]])).shape == (1, 1)
    except (IndexError, RuntimeError):
        by_mask = False
    return "tokens" if by_mask else "positions"
