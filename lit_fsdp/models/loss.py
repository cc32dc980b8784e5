"""The next-token loss as a sum over supervised tokens.

The model is always called as a whole, so that hooks and all-gathers happen; only its head's own forward is replaced
while it runs, by one that computes the loss of supervised tokens chunk by chunk.

Shapes: B batch, T tokens, D width of the hidden states, V vocabulary, N supervised tokens.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from lit_fsdp.config.model import LossConfig
from lit_fsdp.errors import require
from lit_fsdp.models.chunked_loss import LossTerms, Objective, TokenScores, chunk_rows, chunked_loss, plain_loss

IGNORED = -100
"""Label of a token that is not supervised, as in ``torch.nn.functional.cross_entropy``."""
_log = logging.getLogger(__name__)
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
_FACTORS = ("logit_scale", "lm_head_multiplier")
_OF_LOGITS = re.compile(r"logit|lm_head|output_mult")
_ELSEWHERE = re.compile(r"router|^attn_|^mlp_|_to_keep$|_bias$")
_BACKEND = "model.loss.backend"


class TokenLoss(NamedTuple):
    """Sums over the supervised tokens of a batch, in nats, to be added up over batches and ranks before dividing.

    Backward runs on ``loss_sum``, the only one with a graph: ``nll_sum`` and what label smoothing, z-loss and a
    mixture's router loss make of it. ``num_correct`` and ``entropy_sum`` are NaN if the backend does not tell.
    """

    loss_sum: torch.Tensor
    num_tokens: torch.Tensor
    nll_sum: torch.Tensor
    z_loss_sum: torch.Tensor
    num_correct: torch.Tensor
    entropy_sum: torch.Tensor


@dataclass(frozen=True)
class LossPlan:
    """How the loss of one model is computed, which may be another way than the recipe's; see :func:`plan_loss`."""

    backend: str
    terms: LossTerms
    chunk_tokens: int | None = None


def plan_loss(model: nn.Module, config: LossConfig | None = None) -> LossPlan:
    """How the loss of ``model`` is computed; one whose logits are not understood gets the plain way, and a warning.

    Raises:
        ConfigError: Liger is not installed or does not fit this model.
    """
    config = config or LossConfig()
    backend, terms = config.backend, {"z_loss": config.z_loss, "label_smoothing": config.label_smoothing}
    if backend == "plain":
        return LossPlan(backend, LossTerms(**terms))
    if backend == "liger":
        _check_liger(model)
    scale, cap, unknown = _after_the_head(model)
    if unknown:
        _log.warning(
            "%s: %s is not for %s: %s. All logits are made at once (plain): the same loss, more memory",
            *(_BACKEND, backend, type(model).__name__, unknown),
        )
        return LossPlan("plain", LossTerms(**terms))
    return LossPlan(backend, LossTerms(**terms, scale=scale, cap=cap), config.chunk_tokens)


def _check_liger(model: nn.Module) -> None:
    fix = "set model.loss.backend: chunked, which does the same in plain PyTorch"
    is_there, given = importlib.util.find_spec("liger_kernel"), "liger, but liger_kernel is not installed"
    require(is_there, _BACKEND, given, "liger_kernel", f"pip install lit-fsdp[liger], or {fix}")
    owner = owner_of_head(model)
    kind = None if owner is None else type(_head_of(owner))
    # no adapter, which it would pass by
    require(kind is nn.Linear, _BACKEND, f"liger with a head that is a {kind}", "a plain linear head", fix)


def _after_the_head(model: nn.Module) -> tuple[float, float | None, str]:
    """The model's factor on its logits, their bound, and why neither is known, or nothing."""
    owner: Any = owner_of_head(model)
    if owner is None:
        return 1.0, None, "it has no output head (get_output_embeddings)"
    if not type(owner).forward.__module__.startswith("transformers.models."):
        return 1.0, None, "its forward is not one of transformers"
    config = owner.config.get_text_config()
    scale, cap = 1.0, None
    for key, value in config.to_dict().items():
        if not value or not _OF_LOGITS.search(key) or _ELSEWHERE.search(key):
            continue
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if is_number and key in _CAPS:
            cap = float(value)
        elif is_number and key in _FACTORS:
            scale = float(value)
        elif is_number and key == "logits_scaling" and config.model_type.startswith("granite"):
            scale = 1.0 / value
        else:
            return 1.0, None, f"what it does with {key}: {value} is not known here"
    return scale, cap, ""


def owner_of_head(model: nn.Module) -> nn.Module | None:
    """The module that has a body and an output head, inside whatever is around it."""
    for module in model.modules():
        get = getattr(type(module), "get_output_embeddings", None)
        if get is not None and isinstance(get(module), nn.Module):
            return module
    return None


def _head_of(owner: Any) -> nn.Module:
    """The module whose forward makes logits of hidden states, without FSDP1's wrapper."""
    head: nn.Module = owner.get_output_embeddings()
    while (inner := head._modules.get("_fsdp_wrapped_module")) is not None:
        head = inner
    return head


def causal_lm_forward(model: nn.Module, batch: Mapping[str, torch.Tensor], plan: LossPlan | None = None) -> TokenLoss:
    """The loss of ``model`` on a batch with ``input_ids``, ``labels`` and what else its forward takes.

    Where ``position_ids`` start anew (packed samples) the first token of a sample is never supervised. Without a plan,
    that of :func:`plan_loss` is taken.
    """
    plan, targets_BT = plan or plan_loss(model), next_targets(batch)
    loss, scores, router = token_losses(model, batch, targets_BT, plan)
    num_tokens = (targets_BT != IGNORED).sum()
    loss = loss if router is None else loss + router * num_tokens
    return TokenLoss(loss, num_tokens, *summed(scores))


def summed(scores: TokenScores) -> tuple[torch.Tensor, ...]:
    """What :class:`TokenLoss` tells of the scores of all tokens, in its order."""
    return scores.nll.sum(), scores.z_loss.sum(), scores.correct.sum(), scores.entropy.sum()


@torch.no_grad()
def sample_losses(
    model: nn.Module, batch: Mapping[str, torch.Tensor], plan: LossPlan | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed negative log-likelihood in nats, fp32 (B,), and supervised tokens, int64 (B,), of each unpacked row."""
    plan, targets_BT = plan or plan_loss(model), next_targets(batch)
    _, scores, _ = token_losses(model, batch, targets_BT, plan)
    return by_position(scores.nll, targets_BT).sum(dim=1), (targets_BT != IGNORED).sum(dim=1)


def by_position(values_N: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
    """What is known of each target, where it stands, (B, T); zeros elsewhere."""
    return values_N.new_zeros(targets_BT.shape).masked_scatter(targets_BT != IGNORED, values_N)


def next_targets(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The token that each position is to predict, (B, T): the label after it, never that of another sample."""
    targets_BT = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
    positions_BT = batch.get("position_ids")
    if positions_BT is not None:
        starts_BT = F.pad(positions_BT[:, 1:] == 0, (0, 1), value=False)
        targets_BT = targets_BT.masked_fill(starts_BT, IGNORED)
    return targets_BT


def token_losses(
    model: nn.Module,
    batch: Mapping[str, torch.Tensor],
    targets_BT: torch.Tensor,
    plan: LossPlan,
    objective: Objective | None = None,
) -> tuple[torch.Tensor, TokenScores, torch.Tensor | None]:
    """The summed loss, or the objective's, a scalar with a graph; the scores of each target; and the router's loss."""
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    supervised_BT = targets_BT != IGNORED
    targets_N = targets_BT[supervised_BT]
    if plan.backend == "plain":
        out = model(**inputs)
        return *plain_loss(out.logits[supervised_BT], targets_N, plan.terms, objective), _router_loss(model, out)
    owner: Any = owner_of_head(model)
    head = _head_of(owner)
    own_forward = head.forward
    found: list[tuple[torch.Tensor, TokenScores]] = []

    def loss_forward(hidden_BTD: torch.Tensor) -> torch.Tensor:
        hidden_ND = hidden_BTD[supervised_BT]
        if plan.backend == "liger" and hidden_ND.requires_grad and len(targets_N):
            found.append(_liger_loss(head, hidden_ND, targets_N, plan.terms))
        else:
            rows = plan.chunk_tokens or chunk_rows(owner.config.get_text_config().vocab_size, hidden_ND.shape[1])
            found.append(chunked_loss(own_forward, _trained(head), hidden_ND, targets_N, plan.terms, rows, objective))
        return found[-1][0]

    head.forward = loss_forward
    try:
        out = model(**inputs)
    finally:
        del head.forward
    if len(found) != 1:
        raise RuntimeError(f"{type(model).__name__} called its head {len(found)} times instead of once")
    loss, scores = found[0]
    return loss.sum(), scores, _router_loss(model, out)


def _trained(head: nn.Module) -> list[torch.Tensor]:
    """What is trained of the head, as its modules hold it now: FSDP1 puts plain tensors in the place of parameters."""
    held = [values for module in head.modules() for values in (module._parameters, module.__dict__)]
    tensors = [t for values in held for t in values.values() if torch.is_tensor(t) and t.requires_grad]
    return list({id(tensor): tensor for tensor in tensors}.values())


def _router_loss(model: nn.Module, out: Any) -> torch.Tensor | None:
    """What a mixture of experts would add to its mean loss if it were given labels, so that all experts are used.

    Models compute it only where their configuration says ``output_router_logits: true``.
    """
    aux = getattr(out, "aux_loss", None)
    owner: Any = owner_of_head(model)
    if not torch.is_tensor(aux) or owner is None:
        return None
    names = ("router_aux_loss_coef", "aux_loss_coef")
    found = [getattr(holder, name, None) for holder in (owner, owner.config) for name in names]
    factor = next((factor for factor in found if isinstance(factor, (int, float))), None)
    if factor is None:
        raise ValueError(f"{type(owner).__name__} returns a router loss, but says no factor for it")
    return aux * factor


def _liger_loss(
    head: Any, hidden_ND: torch.Tensor, targets_N: torch.Tensor, terms: LossTerms
) -> tuple[torch.Tensor, TokenScores]:
    """Liger's kernel, inside the head's forward, where its weight is gathered under either engine."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy  # type: ignore[import-not-found]

    device = hidden_ND.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else head.weight.dtype
    # a factor on the logits may as well stand on the hidden states and the bias
    bias = None if head.bias is None else head.bias.to(dtype) * terms.scale
    options: dict[str, Any] = {"lse_square_scale": terms.z_loss, "softcap": terms.cap, "return_z_loss": True}
    options |= {"bias": bias, "reduction": "sum", "accum_dtype": torch.float32}
    hidden_ND = hidden_ND.to(dtype) * terms.scale
    result: Any = liger_fused_linear_cross_entropy(hidden_ND, head.weight.to(dtype), targets_N, **options)
    loss = result.loss.detach().float().reshape(1)
    z_loss = result.z_loss.detach().float().reshape(1) if terms.z_loss else loss * 0
    unknown = loss * torch.nan
    return result.loss.reshape(1, 1, 1).clone(), TokenScores(loss, loss - z_loss, z_loss, unknown, unknown)
