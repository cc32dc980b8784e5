"""Head and cross-entropy a few rows at a time: loss and gradients in one go, so that all logits never exist.

The gradient of a sum of losses is known as soon as the logits of a chunk are, up to the factor that backward brings
later. So the forward pass computes, chunk by chunk, logits, loss and gradients of hidden states and head, and keeps
only the gradients. Nothing is recomputed and nothing of size (N, V) outlives a chunk.

Shapes: N supervised tokens, C tokens of a chunk, D width of the hidden states, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from lit_fsdp.models.token_scores import LossTerms, TokenScores, Workspace, gradient_scale, score_logits

CHUNK_BYTES = 96 * 2**20
"""What the fp32 logits of a chunk take by default."""
_SLAB_ROWS = 8192


class Head(Protocol):
    """A head inside its forward: gives logits, and takes their gradients."""

    tensors: list[torch.Tensor]
    """What is trained."""
    space: Workspace
    """Where one chunk after another is computed."""

    def logits(self, hidden_CD: torch.Tensor, with_grad: bool) -> torch.Tensor:
        """(C, V), without a graph, to be overwritten."""

    def backward(self, grad_CV: torch.Tensor) -> torch.Tensor:
        """The gradient of the hidden states last given; those of ``tensors`` are added up."""

    def finish(self, factor: float) -> list[torch.Tensor]:
        """The gradients of ``tensors`` times ``factor``, in fp32 at least: in fp16 a sum may have no room yet."""


def chunk_rows(vocab_size: int, width: int) -> int:
    """Tokens per chunk by default: :data:`CHUNK_BYTES` of fp32 logits, or a quarter of the head's fp32 gradient.

    The second where it is larger: every chunk reads and writes that gradient, which many small ones would be slow at.
    """
    return max(1, CHUNK_BYTES // (4 * vocab_size), width // 4)


def head_loss(
    head: Head, hidden_ND: torch.Tensor, targets_N: torch.Tensor, terms: LossTerms, num_rows: int
) -> tuple[torch.Tensor, TokenScores]:
    """The summed loss of all tokens, a tensor of shape (1, 1, 1) with a graph, and the scores of each without one.

    Without any token the loss is a zero whose gradients are zeros, for hidden states and head alike. Backward works
    once.

    Args:
        head: Inside its forward, so that its weights are there.
        hidden_ND: Of supervised tokens only.
        targets_N: Right tokens.
        terms: Of the loss.
        num_rows: Tokens per chunk.
    """
    tensors = list(head.tensors)
    if torch.is_grad_enabled() and (hidden_ND.requires_grad or tensors):
        loss, *scores = _ChunkedLoss.apply(head, targets_N, terms, num_rows, hidden_ND, *tensors)
        return loss, TokenScores(*scores)
    found, _, _ = _run(head, hidden_ND, targets_N, terms, num_rows, None)
    return found.loss.sum().view(1, 1, 1), found


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        head: Head,
        targets_N: torch.Tensor,
        terms: LossTerms,
        num_rows: int,
        hidden_ND: torch.Tensor,
        *tensors: torch.Tensor,
    ) -> Any:
        scores, dhidden, dtensors = _run(head, hidden_ND, targets_N, terms, num_rows, ctx.needs_input_grad[4])
        ctx.gradients, ctx.dtypes = (dhidden, *dtensors), [tensor.dtype for tensor in (hidden_ND, *tensors)]
        ctx.mark_non_differentiable(*scores)
        return (scores.loss.sum().reshape(1, 1, 1).clone(), *scores)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, *ignored: Any) -> Any:
        gradients, ctx.gradients = ctx.gradients, None
        assert gradients is not None, "the gradients of a chunked loss are given away once"
        if grad.is_cuda or float(grad) != 1.0:  # on a GPU to ask would wait for it
            gradients = [None if g is None else _times(g, grad.view(())) for g in gradients]
        narrow = [None if g is None else g.to(dtype) for g, dtype in zip(gradients, ctx.dtypes, strict=True)]
        return (None, None, None, None, *narrow)


def _times(values: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """In place, with the factor in its own dtype: in bf16 a third would be too large by 0.2 %."""
    for part in values.split(_SLAB_ROWS):
        if part.dtype == factor.dtype:
            part.mul_(factor)
        else:
            part.copy_(part.to(factor.dtype).mul_(factor))
    return values


def _run(
    head: Head,
    hidden_ND: torch.Tensor,
    targets_N: torch.Tensor,
    terms: LossTerms,
    num_rows: int,
    with_hidden: bool | None,
) -> tuple[TokenScores, torch.Tensor | None, list[torch.Tensor]]:
    """Scores, and unless ``with_hidden`` is None the gradients of hidden states (if it is true) and of the head."""
    with_grad, undo = with_hidden is not None, 1.0
    dhidden_ND = torch.empty_like(hidden_ND) if with_hidden else None
    found: list[TokenScores] = []
    for start in range(0, len(hidden_ND), num_rows):
        rows = slice(start, start + num_rows)
        logits_CV = head.logits(hidden_ND[rows], with_grad)
        undo = 1.0 / gradient_scale(logits_CV.dtype)
        with torch.autocast(logits_CV.device.type, enabled=False):
            scores, grad_CV = score_logits(logits_CV, targets_N[rows], terms, with_grad, head.space)
            found.append(scores)
            if grad_CV is not None:
                dhidden_CD = head.backward(grad_CV)
                if dhidden_ND is not None:
                    dhidden_ND[rows] = dhidden_CD if undo == 1.0 else dhidden_CD * undo
    return TokenScores.joined(found, hidden_ND), dhidden_ND, head.finish(undo) if with_grad else []


class LinearHead:
    """A linear layer's own arithmetic, with the gradient of its weight in one fp32 buffer.

    Args:
        weight_VD: As it stands in the layer's forward.
        bias_V: Or None.
        dtype: In which products are taken: the weight's, or autocast's.
        space: Buffers of earlier calls; default: fresh ones.
    """

    def __init__(
        self, weight_VD: torch.Tensor, bias_V: torch.Tensor | None, dtype: torch.dtype, space: Workspace | None = None
    ) -> None:
        self.space = space or Workspace()
        self._given = (weight_VD,) if bias_V is None else (weight_VD, bias_V)
        self.tensors = [tensor for tensor in self._given if tensor.requires_grad]
        self._weight = weight_VD.detach().to(dtype)
        self._bias = None if bias_V is None else bias_V.detach().to(dtype)
        self._wide = torch.promote_types(dtype, torch.float32)
        self._grads: dict[int, torch.Tensor] = {}

    def logits(self, hidden_CD: torch.Tensor, with_grad: bool) -> torch.Tensor:
        """Product and bias."""
        self._hidden = hidden_CD.to(self._weight.dtype)
        out = self.space.take("logits", hidden_CD, self._weight.dtype, (len(hidden_CD), len(self._weight)))
        if self._bias is None:
            return torch.mm(self._hidden, self._weight.T, out=out)
        return torch.addmm(self._bias, self._hidden, self._weight.T, out=out)

    def backward(self, grad_CV: torch.Tensor) -> torch.Tensor:
        """Two products, and sums in fp32."""
        for tensor in self.tensors:
            self._add(tensor, grad_CV)
        return grad_CV @ self._weight

    def _add(self, tensor: torch.Tensor, grad_CV: torch.Tensor) -> None:
        key, wide = id(tensor), self._wide
        if tensor.ndim == 1:
            total = grad_CV.sum(dim=0, dtype=wide)
            self._grads[key] = self._grads[key].add_(total) if key in self._grads else total
        elif grad_CV.dtype == wide:
            if key in self._grads:
                self._grads[key].addmm_(grad_CV.T, self._hidden)
            else:
                self._grads[key] = grad_CV.T @ self._hidden
        else:
            product = torch.mm(grad_CV.T, self._hidden, out=self.space.take("product", tensor, grad_CV.dtype))
            if key not in self._grads:
                self._grads[key] = product.to(wide)
                return
            for total, part in zip(self._grads[key].split(_SLAB_ROWS), product.split(_SLAB_ROWS), strict=True):
                total.add_(part.to(wide))  # a whole wide copy would cost memory, and a mixed sum is slow

    def finish(self, factor: float) -> list[torch.Tensor]:
        """Zeros where there was no chunk."""
        return [_finished(self._grads.get(id(tensor)), tensor, factor) for tensor in self.tensors]


class AnyHead:
    """A head of which only the forward is known: adapters, several layers, a product of its own making.

    Its gradients come from autograd, chunk by chunk, while the chunk's activations are there.

    Args:
        module: The head; what is trained of it is what its modules hold now, as an engine has put it there.
        forward: Its own forward.
    """

    def __init__(self, module: nn.Module, forward: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.space = Workspace()
        self._forward = forward
        found: dict[int, torch.Tensor] = {}
        for child in module.modules():  # FSDP1 puts plain tensors in the place of parameters
            for held in (child._parameters, child.__dict__):
                found |= {id(t): t for t in held.values() if torch.is_tensor(t) and t.requires_grad}
        self.tensors = list(found.values())
        self._totals: list[torch.Tensor | None] = [None] * len(self.tensors)

    def logits(self, hidden_CD: torch.Tensor, with_grad: bool) -> torch.Tensor:
        """What the forward gives, copied: it may be needed for the gradient."""
        with torch.set_grad_enabled(with_grad):
            self._hidden = hidden_CD.detach().requires_grad_(with_grad)
            self._logits = self._forward(self._hidden)
        return self._logits.detach().clone()

    def backward(self, grad_CV: torch.Tensor) -> torch.Tensor:
        """Autograd through the forward of this chunk."""
        inputs = [self._hidden, *self.tensors]
        first, *rest = torch.autograd.grad(self._logits, inputs, grad_CV, allow_unused=True)
        for index, grad in enumerate(rest):
            if grad is not None:
                total, wide = self._totals[index], grad.to(torch.promote_types(grad.dtype, torch.float32))
                self._totals[index] = wide if total is None else total.add_(wide)
        del self._logits
        return first

    def finish(self, factor: float) -> list[torch.Tensor]:
        """Zeros where a tensor took no part."""
        pairs = zip(self._totals, self.tensors, strict=True)
        return [_finished(total, tensor, factor) for total, tensor in pairs]


def _finished(total: torch.Tensor | None, tensor: torch.Tensor, factor: float) -> torch.Tensor:
    if total is None:
        return torch.zeros_like(tensor)
    return total if factor == 1.0 else total.mul_(factor)
