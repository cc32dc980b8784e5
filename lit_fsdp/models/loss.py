"""The next-token loss as a sum over supervised tokens.

Shapes: B batch, T tokens, D width of the hidden states, V vocabulary, N supervised tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn import functional as F

from lit_fsdp.config.model import LossConfig
from lit_fsdp.models.fused_loss import check_fused, fused_loss
from lit_fsdp.models.head import (
    HeadUse,
    UnknownHead,
    head_of,
    in_place_of_forward,
    is_plain_linear,
    learn_head,
    owner_of_head,
)
from lit_fsdp.models.linear_loss import AnyHead, Head, LinearHead, chunk_rows, head_loss
from lit_fsdp.models.plain_loss import logits_of, loss_of_logits
from lit_fsdp.models.router_loss import router_loss
from lit_fsdp.models.token_scores import LossTerms, TokenScores, Workspace

IGNORED = -100
"""Label of a token that is not learnt, as in ``torch.nn.functional.cross_entropy``."""
_log = logging.getLogger(__name__)


class TokenLoss(NamedTuple):
    """Sums over the supervised tokens of a batch, to be added up over batches and ranks before dividing."""

    loss_sum: torch.Tensor
    """What backward runs on: fp32 scalar with a graph. Negative log-likelihood, or what label smoothing, z-loss and a
    mixture's router loss make of it."""
    num_tokens: torch.Tensor
    """Supervised tokens: int64 scalar."""
    nll_sum: torch.Tensor
    """Summed negative log-likelihood in nats, whatever is trained on: fp32 scalar."""
    z_loss_sum: torch.Tensor
    """Part of ``loss_sum`` that is z-loss: fp32 scalar."""
    num_correct: torch.Tensor | None
    """Supervised tokens whose most likely prediction was right: int64 scalar; None if the backend does not tell."""
    entropy_sum: torch.Tensor | None
    """Summed entropy of the predictions in nats: fp32 scalar; None if the backend does not tell."""


@dataclass(frozen=True)
class LossPlan:
    """How the loss of one model is computed."""

    config: LossConfig
    """The ``model.loss`` section."""
    use: HeadUse | None
    """What the model does with its logits; None: unknown, so the plain way is taken."""
    reason: str = ""
    """Why ``use`` is None."""
    space: Workspace = field(default_factory=Workspace, repr=False, compare=False)
    """Buffers of the chunked loss, kept from batch to batch on a CPU; a GPU's allocator keeps them itself."""

    @property
    def backend(self) -> str:
        """``chunked``, ``plain``, ``liger`` or ``cce``: the recipe's, or ``plain`` where nothing else is safe."""
        return "plain" if self.use is None else self.config.backend

    @property
    def tells_scores(self) -> bool:
        """Whether right predictions and entropy are known in training."""
        return self.backend in ("chunked", "plain")

    @property
    def terms(self) -> LossTerms:
        """Numbers of the loss."""
        scale, cap = self.use or (1.0, None)
        return LossTerms(z_loss=self.config.z_loss, label_smoothing=self.config.label_smoothing, scale=scale, cap=cap)


def plan_loss(model: nn.Module, config: LossConfig | None = None) -> LossPlan:
    """Learn what ``model`` does with its logits, and refuse what cannot work; nothing is computed.

    An architecture that is not understood gets the plain way, and the log says why.

    Args:
        model: A causal LM, on meta, sharded or wrapped.
        config: The ``model.loss`` section; default: all defaults.

    Raises:
        ConfigError: A fused backend that is not installed or does not fit this model.
    """
    config = config or LossConfig()
    if config.backend == "plain":
        return LossPlan(config, None, "the recipe says so")
    try:
        plan = LossPlan(config, learn_head(model))
        head = head_of(model)
        if not is_plain_linear(head) and _has_units_inside(head):
            raise UnknownHead("its head has FSDP units inside")
    except UnknownHead as error:
        plan = LossPlan(config, None, str(error))
    if config.backend != "chunked":
        check_fused(config, None if plan.use is None else head_of(model), plan.terms, plan.reason)
    if plan.use is None:
        _log.warning(
            "model.loss.backend: %s is not for %s: %s. All logits are made at once (plain): the same loss, more memory",
            config.backend,
            type(model).__name__,
            plan.reason,
        )
    return plan


_PLANS: WeakKeyDictionary[nn.Module, LossPlan] = WeakKeyDictionary()


def causal_lm_forward(model: nn.Module, batch: Mapping[str, torch.Tensor], plan: LossPlan | None = None) -> TokenLoss:
    """The loss of ``model`` on a batch with ``input_ids``, ``labels`` and what else its forward takes.

    The model is called as a whole, so that hooks and all-gathers happen, with its head's forward replaced by one that
    computes the loss of supervised tokens chunk by chunk. Loss and gradients are those of :func:`summed_loss`, plus
    what the plan adds. Where ``position_ids`` start anew (packed samples) the first token of a sample is never learnt.

    Args:
        model: The causal LM, sharded or wrapped as may be.
        batch: Tensors on the model's device.
        plan: From :func:`plan_loss`; default: the chunked loss without extras, planned at the first call.
    """
    if plan is None:
        plan = _PLANS.get(model) or _PLANS.setdefault(model, plan_loss(model))
    targets_BT = next_targets(batch)
    found = _compute(model, batch, targets_BT, plan)
    num_tokens = (targets_BT != IGNORED).sum()
    nothing = found.loss.detach() * 0
    return TokenLoss(
        found.loss if found.router is None else found.loss + found.router * num_tokens,
        num_tokens,
        found.nll_sum,
        nothing if found.z_loss_sum is None else found.z_loss_sum,
        None if found.scores is None else found.scores.correct.sum(),
        None if found.scores is None else found.scores.entropy.sum(),
    )


@torch.no_grad()
def sample_losses(
    model: nn.Module, batch: Mapping[str, torch.Tensor], plan: LossPlan | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed negative log-likelihood in nats, fp32 (B,), and supervised tokens, int64 (B,), of each row.

    For batches of one sample per row; packed ones would be summed up. Arguments as :func:`causal_lm_forward`.
    """
    if plan is None:
        plan = _PLANS.get(model) or _PLANS.setdefault(model, plan_loss(model))
    targets_BT = next_targets(batch)
    scores = _compute(model, batch, targets_BT, plan).scores
    assert scores is not None  # fused backends only train
    row_N = (targets_BT != IGNORED).nonzero()[:, 0]
    sums_B = torch.zeros(len(targets_BT), dtype=scores.nll.dtype, device=row_N.device)
    return sums_B.index_add(0, row_N, scores.nll), (targets_BT != IGNORED).sum(dim=1)


def summed_loss(logits_BTV: torch.Tensor, labels_BT: torch.Tensor, terms: LossTerms | None = None) -> TokenLoss:
    """The loss of logits at token t for the label at token t + 1, over labels other than -100."""
    targets_BT = next_targets({"labels": labels_BT})
    supervised_BT = targets_BT != IGNORED
    loss, scores = loss_of_logits(logits_BTV[supervised_BT], targets_BT[supervised_BT], terms or LossTerms())
    sums = (scores.nll.sum(), scores.z_loss.sum(), scores.correct.sum(), scores.entropy.sum())
    return TokenLoss(loss, supervised_BT.sum(), *sums)


def next_targets(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The token that each position is to predict, (B, T): the label after it, never that of another sample."""
    targets_BT = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
    positions_BT = batch.get("position_ids")
    if positions_BT is not None:
        starts_BT = F.pad(positions_BT[:, 1:] == 0, (0, 1), value=False)
        targets_BT = targets_BT.masked_fill(starts_BT, IGNORED)
    return targets_BT


class _Found(NamedTuple):
    loss: torch.Tensor
    nll_sum: torch.Tensor
    z_loss_sum: torch.Tensor | None
    scores: TokenScores | None
    router: torch.Tensor | None


def _compute(model: nn.Module, batch: Mapping[str, torch.Tensor], targets_BT: torch.Tensor, plan: LossPlan) -> _Found:
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    supervised_BT = targets_BT != IGNORED
    if plan.backend == "plain":
        out, logits_NV, targets_N = logits_of(model, inputs, targets_BT, supervised_BT)
        loss, scores = loss_of_logits(logits_NV, targets_N, plan.terms)
        return _Found(loss, scores.nll.sum(), scores.z_loss.sum(), scores, router_loss(model, out))
    head = head_of(model)
    own_forward: Any = None if is_plain_linear(head) else head.forward
    found: list[_Found] = []

    def loss_forward(hidden_BTD: torch.Tensor) -> torch.Tensor:
        if hidden_BTD.shape[:-1] != targets_BT.shape:
            raise RuntimeError(f"the head got {tuple(hidden_BTD.shape)}, not hidden states of all {targets_BT.shape}")
        hidden_ND, targets_N = hidden_BTD[supervised_BT], targets_BT[supervised_BT]
        if own_forward is None:
            found.append(_of_linear(head, hidden_ND, targets_N, plan))
        else:
            any_head = AnyHead(head, own_forward)
            num_rows = plan.config.chunk_tokens or chunk_rows(_vocab_size(model), hidden_ND.shape[1])
            found.append(_chunked(any_head, hidden_ND, targets_N, plan.terms, num_rows))
        return found[-1].loss

    with in_place_of_forward(head, loss_forward):
        out = model(**inputs)
    if len(found) != 1:
        raise RuntimeError(f"{type(model).__name__} called its head {len(found)} times instead of once")
    return found[0]._replace(loss=found[0].loss.sum(), router=router_loss(model, out))


def _of_linear(head: Any, hidden_ND: torch.Tensor, targets_N: torch.Tensor, plan: LossPlan) -> _Found:
    """Inside the head's forward, where its weights are."""
    device, weight_VD, bias_V = hidden_ND.device.type, head.weight, head.bias
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight_VD.dtype
    if plan.backend != "chunked" and hidden_ND.requires_grad and len(targets_N):
        tensors = (hidden_ND.to(dtype), weight_VD.to(dtype), bias_V)
        return _Found(*fused_loss(plan.backend, *tensors, targets_N, plan.terms), None, None)
    num_rows = plan.config.chunk_tokens or chunk_rows(*weight_VD.shape)
    linear = LinearHead(weight_VD, bias_V, dtype, plan.space if device == "cpu" else None)
    return _chunked(linear, hidden_ND, targets_N, plan.terms, num_rows)


def _chunked(head: Head, hidden_ND: torch.Tensor, targets_N: torch.Tensor, terms: LossTerms, num_rows: int) -> _Found:
    loss, scores = head_loss(head, hidden_ND, targets_N, terms, num_rows)
    return _Found(loss, scores.nll.sum(), scores.z_loss.sum(), scores, None)


def _vocab_size(model: nn.Module) -> int:
    owner: Any = owner_of_head(model)
    return int(owner.config.get_text_config().vocab_size)


def _has_units_inside(head: nn.Module) -> bool:
    """FSDP units whose hooks must not run while the head's gradients are computed in the forward pass."""
    inside = [child for child in head.modules() if child is not head]
    return any(type(c).__name__ == "FullyShardedDataParallel" or hasattr(c, "set_requires_all_reduce") for c in inside)
