"""Head and cross-entropy a few tokens at a time, so that the logits of a whole batch never exist.

The gradient of a sum is known as soon as the logits of a chunk are, up to the factor that backward brings. So the
forward pass differentiates each chunk at once and keeps the sums of the gradients: nothing of size (N, V) outlives a
chunk, and nothing is computed twice. Where an objective weights tokens by what it makes of all of them, a head that is
trained runs once more before.

Shapes: N supervised tokens, C tokens of a chunk, D width of the hidden states, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

CHUNK_BYTES = 96 * 2**20
"""What the fp32 logits of a chunk take by default."""
_FP16_SCALE = 16.0  # gradients of logits are probabilities, and in fp16 those below 6e-8 would vanish
_SCORED_ROWS = 256


@dataclass(frozen=True, kw_only=True)
class LossTerms:
    """What is made of the logits that a head gives, and of the loss.

    The loss of a token is ``(1 - label_smoothing) * nll + label_smoothing * mean over v of -log p(v)
    + z_loss * logsumexp(logits) ** 2``, of the logits ``cap * tanh(scale * head(hidden) / cap)``: Granite and Cohere
    have a ``scale``, Gemma 2 a ``cap``.
    """

    z_loss: float = 0.0
    label_smoothing: float = 0.0
    scale: float = 1.0
    cap: float | None = None


Objective = Callable[[torch.Tensor], torch.Tensor]
"""What is trained on in place of a sum: a scalar of the negative log-likelihoods of all tokens, (N,)."""


class TokenScores(NamedTuple):
    """What is known of each supervised token, without a graph; fp32 (N,), or fp64 for fp64 logits.

    ``loss`` has label smoothing and z-loss, ``nll`` is the negative log-likelihood in nats, ``z_loss`` is weighted,
    ``entropy`` that of the prediction in nats, and ``correct`` (bool) whether the most likely token was right. Of Liger
    sums alone, as (1,), and NaN for the last two.
    """

    loss: torch.Tensor
    nll: torch.Tensor
    z_loss: torch.Tensor
    entropy: torch.Tensor
    correct: torch.Tensor


def made_of(logits_NV: torch.Tensor, terms: LossTerms) -> torch.Tensor:
    """The model's logits, in fp32 at least, of those that its head gives."""
    z_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    if terms.scale != 1.0:
        z_NV = z_NV * terms.scale
    return z_NV if terms.cap is None else terms.cap * torch.tanh(z_NV / terms.cap)


@torch.no_grad()
def score_tokens(z_NV: torch.Tensor, targets_N: torch.Tensor, terms: LossTerms) -> tuple[TokenScores, torch.Tensor]:
    """Scores of each token, and the gradient of their summed loss by the model's logits (in fp32 at least)."""
    share, target_N1 = terms.label_smoothing, targets_N[:, None]
    with torch.autocast(z_NV.device.type, enabled=False):
        top_N, best_N = z_NV.max(dim=-1)
        p_NV = z_NV.softmax(dim=-1)
        # the largest probability is at least 1 / V, so its logarithm is safe; that of the target's may not be
        lse_N = top_N - p_NV.gather(1, best_N[:, None])[:, 0].log()
        nll_N = lse_N - z_NV.gather(1, target_N1)[:, 0]
        entropy_N = lse_N - torch.bmm(p_NV[:, None], z_NV[:, :, None])[:, 0, 0]
        z_loss_N = terms.z_loss * lse_N.square()
        loss_N = nll_N + z_loss_N
        if share:
            loss_N = loss_N + share * (lse_N - z_NV.mean(dim=-1) - nll_N)
        scores = TokenScores(loss_N, nll_N, z_loss_N, entropy_N, best_N == targets_N)
        grad_NV = p_NV  # in place, as a third tensor of this size would be the largest cost
        if terms.z_loss:
            grad_NV *= (1.0 + 2.0 * terms.z_loss * lse_N)[:, None]
        if share:
            grad_NV -= share / z_NV.shape[1]
        # not scatter_add_, which has no deterministic form on a GPU
        return scores, grad_NV.scatter_(1, target_N1, grad_NV.gather(1, target_N1) - (1.0 - share))


def plain_loss(
    logits_NV: torch.Tensor, targets_N: torch.Tensor, terms: LossTerms, objective: Objective | None = None
) -> tuple[torch.Tensor, TokenScores]:
    """The summed loss, or the objective's value, of logits that are all there, scaled and capped; a scalar; scores."""
    z_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    if objective is not None:
        loss = objective(F.cross_entropy(z_NV, targets_N, reduction="none"))
    else:
        loss = F.cross_entropy(z_NV, targets_N, reduction="sum", label_smoothing=terms.label_smoothing)
    if terms.z_loss:
        loss = loss + terms.z_loss * z_NV.logsumexp(dim=-1).square().sum()
    chunks = zip(z_NV.split(_SCORED_ROWS), targets_N.split(_SCORED_ROWS), strict=True)
    return loss, _joined([score_tokens(z_CV, targets_C, terms)[0] for z_CV, targets_C in chunks])


def chunk_rows(vocab_size: int, width: int) -> int:
    """Tokens per chunk by default: :data:`CHUNK_BYTES` of fp32 logits, or a quarter of the head's fp32 gradient.

    The second where it is larger: every chunk adds to that gradient, which many small ones would be slow at.
    """
    return max(1, CHUNK_BYTES // (4 * vocab_size), width // 4)


def chunked_loss(
    head: Callable[[torch.Tensor], torch.Tensor],
    trained: Sequence[torch.Tensor],
    hidden_ND: torch.Tensor,
    targets_N: torch.Tensor,
    terms: LossTerms,
    num_rows: int,
    objective: Objective | None = None,
) -> tuple[torch.Tensor, TokenScores]:
    """The summed loss of all tokens, or the objective's value, (1, 1, 1) with a graph, and scores without one.

    Without any token the loss is a zero whose gradients are zeros. Backward works once. ``head`` gives logits (C, V) of
    hidden states (C, D), of ``num_rows`` tokens; ``trained`` is what of it is trained.
    """
    if torch.is_grad_enabled() and (hidden_ND.requires_grad or trained):
        loss, *scores = _ChunkedLoss.apply(head, targets_N, terms, num_rows, objective, hidden_ND, *trained)
        return loss, TokenScores(*scores)
    found = _scores(head, hidden_ND, targets_N, terms, num_rows)
    loss = found.loss.sum() if objective is None else objective(found.nll)
    return loss.reshape(1, 1, 1), found


@torch.no_grad()
def _scores(
    head: Callable[[torch.Tensor], torch.Tensor],
    hidden_ND: torch.Tensor,
    targets_N: torch.Tensor,
    terms: LossTerms,
    num_rows: int,
) -> TokenScores:
    chunks = zip(hidden_ND.split(num_rows), targets_N.split(num_rows), strict=True)
    return _joined([score_tokens(made_of(head(h_CD), terms), targets_C, terms)[0] for h_CD, targets_C in chunks])


def _weighed(objective: Objective, nll_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.enable_grad():
        leaf_N = nll_N.detach().requires_grad_()
        loss = objective(leaf_N)
    return loss.detach(), torch.autograd.grad(loss, leaf_N)[0]


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        head: Callable[[torch.Tensor], torch.Tensor],
        targets_N: torch.Tensor,
        terms: LossTerms,
        num_rows: int,
        objective: Objective | None,
        hidden_ND: torch.Tensor,
        *trained: torch.Tensor,
    ) -> Any:
        loss = weights_N = None
        if objective is not None and trained:
            loss, weights_N = _weighed(objective, _scores(head, hidden_ND, targets_N, terms, num_rows).nll)
        sums: list[torch.Tensor | None] = [None] * len(trained)
        found: list[TokenScores] = []
        dhidden: list[torch.Tensor] = []
        chunks = zip(hidden_ND.split(num_rows), targets_N.split(num_rows), strict=True)
        for index, (hidden_CD, targets_C) in enumerate(chunks):
            weights_C = None if weights_N is None else weights_N.split(num_rows)[index]
            scores, dhidden_CD, factor = _differentiate(head, hidden_CD, targets_C, weights_C, terms, trained, sums)
            found.append(scores)
            dhidden.append(dhidden_CD)
        joined, dhidden_ND = _joined(found), torch.cat(dhidden)
        if objective is None:
            loss = joined.loss.sum()
        elif loss is None:  # a frozen head needs no sums: the weights may come last
            loss, weights_N = _weighed(objective, joined.nll)
            dhidden_ND *= weights_N[:, None]
        ctx.gradients, ctx.factor = [dhidden_ND, *sums], factor
        ctx.dtypes = [tensor.dtype for tensor in (hidden_ND, *trained)]
        ctx.mark_non_differentiable(*joined)
        return (loss.reshape(1, 1, 1).clone(), *joined)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, *ignored: Any) -> Any:
        gradients, ctx.gradients = ctx.gradients, None
        assert gradients is not None, "the gradients of a chunked loss are given away once"
        factor = grad.view(()) / ctx.factor
        totals = zip(gradients, ctx.dtypes, strict=True)
        narrow = [None if total is None else total.mul_(factor).to(dtype) for total, dtype in totals]
        return (None, None, None, None, None, *narrow)


def _differentiate(
    head: Callable[[torch.Tensor], torch.Tensor],
    hidden_CD: torch.Tensor,
    targets_C: torch.Tensor,
    weights_C: torch.Tensor | None,
    terms: LossTerms,
    trained: Sequence[torch.Tensor],
    sums: list[torch.Tensor | None],
) -> tuple[TokenScores, torch.Tensor, float]:
    """Scores of a chunk and its gradient by the hidden states; what it adds to those of the head goes into ``sums``.

    Gradients come multiplied by the last value. They are summed in fp32: in bf16 a sum rounds, and in fp16 it may have
    no room before the loss scale is known. A function of its own, so that nothing of a chunk is left for the next.
    """
    leaf_CD = hidden_CD.detach().requires_grad_()
    with torch.enable_grad():
        z_CV = made_of(logits_CV := head(leaf_CD), terms)
    factor = _FP16_SCALE if logits_CV.dtype == torch.float16 else 1.0
    del logits_CV
    scores, grad_CV = score_tokens(z_CV, targets_C, terms)
    if factor != 1.0:
        grad_CV *= factor
    if weights_C is not None:
        grad_CV *= weights_C[:, None]
    dhidden_CD, *found = torch.autograd.grad(z_CV, [leaf_CD, *trained], grad_CV, allow_unused=True)
    for i, grad in enumerate(found):
        if grad is not None:
            so_far = sums[i]  # add_ widens as it reads: a wide copy would be as large as the sum
            sums[i] = _wide(grad) if so_far is None else so_far.add_(grad)
    return scores, _wide(dhidden_CD), factor


def _wide(grad: torch.Tensor) -> torch.Tensor:
    return grad.to(torch.promote_types(grad.dtype, torch.float32))


def _joined(chunks: Sequence[TokenScores]) -> TokenScores:
    return TokenScores(*(torch.cat(parts) for parts in zip(*chunks, strict=True)))
