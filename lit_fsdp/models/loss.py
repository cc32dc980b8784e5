"""The next-token loss as a sum over supervised tokens.

Shapes: B batch, T tokens, K kept positions, V vocabulary, N supervised tokens.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

IGNORED = -100
"""Label of a token that is not learnt, as in ``torch.nn.functional.cross_entropy``."""


class TokenLoss(NamedTuple):
    """Sums over the supervised tokens of a batch, to be added up over batches and ranks before dividing."""

    loss_sum: torch.Tensor
    """Summed negative log-likelihood in nats: fp32 scalar, with a graph."""
    num_tokens: torch.Tensor
    """Supervised tokens: int64 scalar."""
    num_correct: torch.Tensor
    """Supervised tokens whose most likely prediction was right: int64 scalar."""


def summed_loss(logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> TokenLoss:
    """The loss of logits at token t for the label at token t + 1, over labels other than -100.

    Only rows of supervised tokens are upcast, so the fp32 copy is (N, V). A batch without any gives a zero that still
    depends on the logits: backward runs through the whole model and no rank misses a collective.
    """
    return _loss_of(logits_BTV[:, :-1], labels_BT[:, 1:])


def per_sample_loss(logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed negative log-likelihood in nats, fp32 (B,), and supervised tokens, int64 (B,), of each row."""
    targets = labels_BT[:, 1:]
    supervised = targets != IGNORED
    losses_N = F.cross_entropy(logits_BTV[:, :-1][supervised].float(), targets[supervised], reduction="none")
    row_N = supervised.nonzero()[:, 0]
    sums_B = torch.zeros(len(targets), dtype=torch.float32, device=losses_N.device).index_add(0, row_N, losses_N)
    return sums_B, supervised.sum(dim=1)


def causal_lm_forward(model: nn.Module, batch: Mapping[str, torch.Tensor], count_correct: bool = True) -> TokenLoss:
    """The loss of ``model`` on a batch with ``input_ids``, ``labels`` and what else its forward takes.

    The model is called as a whole, so that hooks and all-gathers happen. Models whose forward knows ``logits_to_keep``
    apply the head only where it is needed: to supervised tokens, or with older transformers to positions that some row
    of the batch supervises. Loss and gradients are those of :func:`summed_loss`. Without ``count_correct`` a pass over
    all logits, which finds right predictions, is saved and ``num_correct`` is 0.
    """
    labels_BT = batch["labels"]
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    selection = _head_selection(_forward_of(model))
    if selection == "none":
        return summed_loss(model(**inputs).logits, labels_BT)
    targets_BT = F.pad(labels_BT[:, 1:], (0, 1), value=IGNORED)
    supervised_BT = targets_BT != IGNORED
    if not supervised_BT.any():  # one token without a loss, so that the head takes part in the backward pass
        supervised_BT[0, 0] = True
    if selection == "tokens":
        logits_NV = model(**inputs, logits_to_keep=supervised_BT).logits
        return _loss_of(logits_NV, targets_BT[supervised_BT], count_correct)
    kept_K = supervised_BT.any(dim=0).nonzero()[:, 0]
    logits_BKV = model(**inputs, logits_to_keep=kept_K).logits
    return _loss_of(logits_BKV, targets_BT[:, kept_K], count_correct)


def _loss_of(logits: torch.Tensor, targets: torch.Tensor, count_correct: bool = True) -> TokenLoss:
    supervised = targets != IGNORED
    logits_NV, targets_N = logits[supervised].float(), targets[supervised]
    # sum() of no rows is a zero with a graph; cross_entropy of none would be one too, but not on every backend
    loss = F.cross_entropy(logits_NV, targets_N, reduction="sum") if len(targets_N) else logits_NV.sum()
    correct = (logits_NV.detach().argmax(dim=-1) == targets_N).sum() if count_correct else supervised.sum() * 0
    return TokenLoss(loss, supervised.sum(), correct)


def _forward_of(model: nn.Module) -> Callable[..., Any]:
    """The forward that is called in the end: wrappers such as FSDP1's pass everything on to ``.module``."""
    inner = getattr(model, "module", None)
    return _forward_of(inner) if isinstance(inner, nn.Module) else type(model).forward


@functools.cache
def _head_selection(forward: Callable[..., Any]) -> Literal["none", "positions", "tokens"]:
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
