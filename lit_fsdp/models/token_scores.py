"""What one chunk of logits says about its tokens: loss, its gradient, entropy and right predictions, in one go.

Shapes: N supervised tokens, C tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

_FP16_SCALE = 16.0


@dataclass(frozen=True, kw_only=True)
class LossTerms:
    """What is made of the logits that a head gives, and of the loss.

    The loss of a token is ``(1 - label_smoothing) * nll + label_smoothing * mean over v of -log p(v)
    + z_loss * logsumexp(logits) ** 2``, of the logits ``cap * tanh(scale * head(hidden) / cap)``.
    """

    z_loss: float = 0.0
    label_smoothing: float = 0.0
    scale: float = 1.0
    """Factor on the logits (Granite, Cohere)."""
    cap: float | None = None
    """Bound of the logits (Gemma 2), in nats."""

    @property
    def is_plain(self) -> bool:
        """Whether the loss is the negative log-likelihood."""
        return self.z_loss == 0 and self.label_smoothing == 0


def gradient_scale(dtype: torch.dtype) -> float:
    """What gradients of logits are multiplied by: they are probabilities, and in fp16 those below 6e-8 would vanish."""
    return _FP16_SCALE if dtype == torch.float16 else 1.0


class TokenScores(NamedTuple):
    """What is known of each supervised token, without a graph; fp32 (N,), or fp64 for fp64 logits."""

    nll: torch.Tensor
    """Negative log-likelihood in nats."""
    loss: torch.Tensor
    """The loss with label smoothing and z-loss."""
    z_loss: torch.Tensor
    """The z-loss alone, already weighted."""
    entropy: torch.Tensor
    """Entropy of the prediction in nats."""
    correct: torch.Tensor
    """Whether the most likely token was right: bool."""

    @staticmethod
    def joined(found: Sequence[TokenScores], like: torch.Tensor) -> TokenScores:
        """Scores of chunks in one; of none, empty ones on the device of ``like``."""
        if found:
            return TokenScores(*(torch.cat(parts) for parts in zip(*found, strict=True)))
        none = like.new_zeros(0, dtype=torch.promote_types(like.dtype, torch.float32))
        return TokenScores(none, none, none, none, none.bool())


class Workspace:
    """Buffers that one chunk after another writes into: on a CPU fresh ones cost more than what is done with them."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def __reduce__(self) -> tuple[type[Workspace], tuple[()]]:
        """A copy of a module or a file of it has no use for what is in them."""
        return Workspace, ()

    def take(self, name: str, like: torch.Tensor, dtype: torch.dtype, shape: Sequence[int] = ()) -> torch.Tensor:
        """The buffer of that name on the device of ``like``, with its shape or ``shape``; what was in it is lost."""
        rows, *rest = tuple(shape) or tuple(like.shape)
        held = self._buffers.get(name)
        if (
            held is None
            or len(held) < rows
            or (held.device, held.dtype, [*held.shape[1:]]) != (like.device, dtype, rest)
        ):
            self._buffers.pop(name, None)
            del held  # before there are two
            with torch.inference_mode(False):  # a validation comes first, and training could not write into it
                held = self._buffers[name] = torch.empty((rows, *rest), dtype=dtype, device=like.device)
        return held[:rows]


def score_logits(
    logits_CV: torch.Tensor, targets_C: torch.Tensor, terms: LossTerms, with_grad: bool, space: Workspace | None = None
) -> tuple[TokenScores, torch.Tensor | None]:
    """Scores of one chunk, in fp32, and the gradient of its summed loss by ``logits_CV``, in their dtype.

    The gradient comes multiplied by :func:`gradient_scale`.

    Args:
        logits_CV: As the head gives them; overwritten.
        targets_C: Right tokens.
        terms: Of the loss.
        with_grad: Else the gradient is None.
        space: Buffers; default: fresh ones.
    """
    space, wide = space or Workspace(), torch.promote_types(logits_CV.dtype, torch.float32)
    z_CV = logits_CV if logits_CV.dtype == wide else space.take("wide", logits_CV, wide).copy_(logits_CV)
    if terms.scale != 1.0:
        z_CV = z_CV.mul_(terms.scale)
    slope_CV = None
    if terms.cap is not None:
        z_CV = z_CV.div_(terms.cap).tanh_()
        slope_CV = z_CV.square().neg_().add_(1.0) if with_grad else None
        z_CV = z_CV.mul_(terms.cap)
    top_C, best_C = z_CV.max(dim=-1)
    p_CV = torch.softmax(z_CV, dim=-1, out=space.take("p", z_CV, wide))
    # the largest probability is at least 1 / V, so its logarithm is safe; that of the target's may not be
    lse_C = top_C - p_CV.gather(1, best_C[:, None])[:, 0].log_()
    nll_C = lse_C - z_CV.gather(1, targets_C[:, None])[:, 0]
    entropy_C = lse_C - torch.bmm(p_CV[:, None], z_CV[:, :, None])[:, 0, 0]
    z_loss_C = terms.z_loss * lse_C.square()
    loss_C = nll_C + z_loss_C
    if terms.label_smoothing:
        loss_C = loss_C + terms.label_smoothing * (lse_C - z_CV.mean(dim=-1) - nll_C)
    scores = TokenScores(nll_C, loss_C, z_loss_C, entropy_C, best_C == targets_C)
    if not with_grad:
        return scores, None
    if terms.z_loss:
        p_CV *= (1.0 + 2.0 * terms.z_loss * lse_C)[:, None]
    if terms.label_smoothing:
        p_CV -= terms.label_smoothing / p_CV.shape[1]
    target_C1 = targets_C[:, None]  # not scatter_add_: on a GPU it has no deterministic form
    p_CV.scatter_(1, target_C1, p_CV.gather(1, target_C1) - (1.0 - terms.label_smoothing))
    if slope_CV is not None:
        p_CV *= slope_CV
    factor = terms.scale * gradient_scale(logits_CV.dtype)
    if factor != 1.0:
        p_CV *= factor
    return scores, p_CV if logits_CV.dtype == wide else logits_CV.copy_(p_CV)
