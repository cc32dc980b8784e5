"""Losses, accuracy and entropy per supervised token, from sums over batches and ranks."""

from __future__ import annotations

import torch
from torch import nn
from torchmetrics import SumMetric

from lit_fsdp.metrics.counts import STEP_COUNTS


def score_totals(
    num_correct: torch.Tensor | None, entropy_sum: torch.Tensor | None, objective: torch.Tensor, z_loss: torch.Tensor
) -> torch.Tensor:
    """:data:`lit_fsdp.metrics.counts.SCORE_COUNTS` of one batch, float64 (4,), without a graph; NaN for None."""
    unknown = objective.new_full((), torch.nan)
    sums = [unknown if value is None else value for value in (num_correct, entropy_sum)]
    return torch.stack([value.detach().double() for value in (*sums, objective, z_loss)])


def step_metrics(
    totals: torch.Tensor, with_objective: bool, with_z_loss: bool, with_scores: bool = True
) -> dict[str, torch.Tensor]:
    """What one optimizer step logs, per supervised token of its global batch; fp32 scalars on the totals' device.

    Args:
        totals: In the order of :data:`lit_fsdp.metrics.counts.STEP_COUNTS`; more may follow.
        with_objective: Log what backward ran on beside ``train_loss``, the plain cross-entropy.
        with_z_loss: Log its z-loss.
        with_scores: Log accuracy and entropy, which a fused backend does not tell.
    """
    means = dict(zip(STEP_COUNTS, (totals / totals[0].clamp(min=1)).float(), strict=False))
    found = {"train_loss": means["loss_sum"]}
    if with_objective:
        found["train_objective"] = means["objective_sum"]
    if with_z_loss:
        found["train_z_loss"] = means["z_loss_sum"]
    if not with_scores:
        return found
    return {**found, "train_token_accuracy": means["correct_tokens"], "train_entropy": means["entropy_sum"]}


class EvalMetrics(nn.Module):
    """Token-weighted loss, accuracy and entropy; every rank may have seen another number of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.nll, self.correct, self.entropy = (_total() for _ in range(4))

    def add(
        self, num_tokens: torch.Tensor, nll_sum: torch.Tensor, num_correct: torch.Tensor, entropy_sum: torch.Tensor
    ) -> None:
        """Add the sums of one batch; one without supervised tokens changes nothing."""
        self.tokens.update(num_tokens.double())
        self.nll.update(nll_sum.detach().double())
        self.correct.update(num_correct.detach().double())
        self.entropy.update(entropy_sum.detach().double())

    def finish(self, stage: str) -> dict[str, torch.Tensor]:
        """Metrics over all ranks, and a fresh start."""
        totals = [self.tokens, self.nll, self.correct, self.entropy]
        tokens, *sums = (total.compute() for total in totals)
        loss, accuracy, entropy = ((found / tokens).float() for found in sums)
        for total in totals:
            total.reset()
        return {
            f"{stage}_loss": loss,
            f"{stage}_perplexity": loss.exp(),
            f"{stage}_token_accuracy": accuracy,
            f"{stage}_entropy": entropy,
        }


def _total() -> SumMetric:
    """By default it would leave out batches whose loss is NaN, and a broken model would look fine."""
    total = SumMetric(nan_strategy="disable")
    total.set_dtype(torch.float64)
    return total
