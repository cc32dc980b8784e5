"""Preference losses for pairs of a chosen and a rejected completion: DPO, IPO, ORPO and SimPO.

A batch has first the rows of chosen completions, then those of rejected ones, each with its prompt.

Shapes: P pairs, B = 2 P rows, T tokens, N tokens in the loss.

Sources: DPO arXiv:2305.18290 (label smoothing: Mitchell, "A note on DPO with noisy preferences", 2023); IPO
arXiv:2310.12036, eq. 17, on means over tokens as its authors intended (https://github.com/huggingface/trl/pull/1265);
ORPO arXiv:2403.07691; SimPO arXiv:2405.14734.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional as F

from lit_fsdp.config.model import PreferenceConfig
from lit_fsdp.models.loss import (
    IGNORED,
    NUM_TARGETS,
    LossPlan,
    TokenLoss,
    by_position,
    context_of,
    next_targets,
    targets_here,
    token_losses,
)

_LEAST_DOUBT = 1e-7  # of a mean log-probability, in fp32
PAIR_COUNTS = (
    *("pairs", "loss", "rewards/chosen", "rewards/rejected", "rewards/accuracies", "logps/chosen", "logps/rejected"),
    "nll_loss",
)
"""Number of pairs, and sums over pairs. A reward is beta times the log-probability of a completion minus the
reference's, or times its mean per token without a reference (ORPO, SimPO); the entry ``nll_loss`` is the term that ORPO
adds."""


def pair_metrics(sums: torch.Tensor, config: PreferenceConfig) -> dict[str, torch.Tensor]:
    """Means over pairs, fp32 scalars by name, of sums in the order of :data:`PAIR_COUNTS`; more may follow."""
    means = dict(zip(PAIR_COUNTS, (sums / sums[0].clamp(min=1)).float(), strict=False))
    means["rewards/margins"] = means["rewards/chosen"] - means["rewards/rejected"]
    left_out = {"pairs"} if config.loss == "orpo" else {"pairs", "nll_loss"}
    return {name: value for name, value in means.items() if name not in left_out}


def preference_forward(
    model: nn.Module,
    batch: Mapping[str, torch.Tensor],
    config: PreferenceConfig,
    plan: LossPlan,
    reference_2P: torch.Tensor | None,
) -> tuple[TokenLoss, torch.Tensor]:
    """Compute the loss of ``model``, called once as a whole, summed over the pairs of a batch, and sums to log.

    The latter are fp64 sums in the order of :data:`PAIR_COUNTS`. Pairs without supervised tokens are filler and not
    counted.
    """
    completion_BT = next_targets(batch)
    is_pair_P = (completion_BT != IGNORED).any(dim=1).view(2, -1).all(dim=0)
    targets_BT = completion_BT
    if config.loss == "orpo":  # its likelihood covers prompt and answer
        batch = {name: value for name, value in batch.items() if name != NUM_TARGETS}  # counted for other targets
        mask = batch.get("padding", batch.get("attention_mask", torch.ones_like(batch["input_ids"]))).bool()
        every_BT = next_targets({"labels": batch["input_ids"].masked_fill(~mask, IGNORED)})
        targets_BT = torch.cat([every_BT.chunk(2)[0], completion_BT.chunk(2)[1]])
    nll_N, _, correct_N, router = token_losses(model, batch, targets_BT, plan, each=True)
    here_BT, context = targets_here(batch, targets_BT), context_of(batch)
    nll_BT = by_position(nll_N, here_BT)
    # values of fillers are arbitrary; they are masked, because indexing would synchronize with the device
    logps_2P = -nll_BT.masked_fill(completion_BT == IGNORED, 0).sum(dim=1).view(2, -1)
    nll_P = nll_BT.chunk(2)[0].sum(dim=1)
    if context is not None:
        logps_2P, nll_P = context.summed(logps_2P), context.summed(nll_P)
    logps_2P = logps_2P.masked_fill(~is_pair_P, -1.0)
    counts_2P = (completion_BT != IGNORED).sum(dim=1).view(2, -1).clamp(min=1)
    loss_P, rewards_2P = pair_losses(config, logps_2P, counts_2P, reference_2P)
    nll_P = nll_P / (targets_BT.chunk(2)[0] != IGNORED).sum(dim=1).clamp(min=1)
    if config.loss == "orpo":
        loss_P = loss_P + nll_P
    loss_P = loss_P.masked_fill(~is_pair_P, 0)
    found = (is_pair_P, loss_P, *rewards_2P, rewards_2P[0] > rewards_2P[1], *logps_2P, nll_P)
    sums = torch.stack([term.detach().double().masked_fill(~is_pair_P, 0).sum() for term in found])
    if context is not None and context.rank:  # each pair counts once
        sums = torch.zeros_like(sums)
    loss = loss_P.sum() if router is None else loss_P.sum() + router * is_pair_P.sum()
    num_tokens = (targets_here(batch, completion_BT) != IGNORED).sum()
    return TokenLoss(loss, num_tokens, nll_N.detach().sum(), correct_N.sum()), sums


def pair_losses(
    config: PreferenceConfig,
    logps_2P: torch.Tensor,
    counts_2P: torch.Tensor,
    reference_2P: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each pair, (P,), and the rewards of both completions, (2, P), which show the model's preference.

    The values ``logps_2P`` are their summed log-probabilities, ``reference_2P`` those under the reference.
    """
    scores_2P = logps_2P / counts_2P if reference_2P is None else logps_2P - reference_2P
    rewards_2P = config.beta * scores_2P
    if config.loss == "ipo":
        means_2P = scores_2P / counts_2P
        return (means_2P[0] - means_2P[1] - 1 / (2 * config.beta)).square(), rewards_2P
    if config.loss == "orpo":
        # a certain answer has a score of 0, whose odds are infinite
        odds_2P = scores_2P - torch.log(-torch.expm1(scores_2P.clamp(max=-_LEAST_DOUBT)))
        return -config.beta * F.logsigmoid(odds_2P[0] - odds_2P[1]), rewards_2P
    margin_P = rewards_2P[0] - rewards_2P[1] - (config.gamma if config.loss == "simpo" else 0.0)
    smooth = config.label_smoothing
    return -(1 - smooth) * F.logsigmoid(margin_P) - smooth * F.logsigmoid(-margin_P), rewards_2P


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Disable peft's adapters inside the context, so that the model is its base."""
    layers = [module for module in model.modules() if hasattr(module, "_disable_adapters")]
    # not enable_adapters(False): it also freezes the adapters, and requires_grad must not change in a sharded unit
    for layer in layers:
        layer._disable_adapters = True  # type: ignore[assignment]
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False  # type: ignore[assignment]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model in eval mode inside the context."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
