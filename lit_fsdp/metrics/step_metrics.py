"""Counts of every step, summed over micro-batches and by one all-reduce over ranks, and the logged metrics."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torchmetrics import Metric

BATCH_COUNTS = ("tokens", "samples", "slots", "squared_tokens")
"""Counted while a batch is collated: tokens without padding; samples; positions of ``input_ids`` with padding; and
the sum over samples of (tokens of the sample) squared, to which the cost of attention is proportional."""
STEP_COUNTS = ("supervised_tokens", "loss_sum", *BATCH_COUNTS, "correct_tokens")
"""First entries of ``CausalLMModule.step_totals``; votes to stop follow. The entry ``loss_sum`` is the plain
cross-entropy, and ``correct_tokens`` are supervised tokens whose most likely prediction was right; NaN with Liger."""


def end_of(trainer: Any) -> float:
    """The optimizer step at which limits on steps and epochs end a run; infinite without such a limit."""
    limit = trainer.max_steps if trainer.max_steps > 0 else math.inf
    is_known = not math.isinf(trainer.estimated_stepping_batches)  # also prepares the loader
    if not trainer.max_epochs or trainer.max_epochs < 0 or not is_known or math.isinf(trainer.num_training_batches):
        return limit
    extra = getattr(getattr(trainer, "datamodule", None), "extra_steps", 0)
    steps = math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches) * trainer.max_epochs
    return min(limit, steps + extra)


def step_counts(totals: Iterable[float]) -> dict[str, float]:
    """``step_totals`` (or sums of them) as a mapping by the names in :data:`STEP_COUNTS`."""
    return dict(zip(STEP_COUNTS, (float(value) for value in totals), strict=False))


def batch_counts(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return ``batch["counts"]``, or for custom batches count from mask and ids; int64 (4,)."""
    if "counts" in batch:
        return batch["counts"]
    ids_BT = batch["input_ids"]
    lengths_B = batch.get("attention_mask", torch.ones_like(ids_BT)).long().sum(dim=1)
    sizes = torch.tensor([len(ids_BT), ids_BT.numel()], device=lengths_B.device)
    return torch.stack([lengths_B.sum(), *sizes, lengths_B.square().sum()])


def step_metrics(totals: torch.Tensor) -> dict[str, torch.Tensor]:
    """Metrics of one optimizer step, per supervised token of its global batch; fp32 scalars.

    The ``totals`` are in the order of :data:`STEP_COUNTS`; more may follow.
    """
    means = dict(zip(STEP_COUNTS, (totals / totals[0].clamp(min=1)).float(), strict=False))
    return {"train_loss": means["loss_sum"], "train_token_accuracy": means["correct_tokens"]}


class SumMetric(Metric):
    """Sums over the batches of all ranks, which may have different numbers of tokens, and their means."""

    sums: torch.Tensor

    def __init__(self, num_sums: int, means: Callable[[torch.Tensor], dict[str, torch.Tensor]]) -> None:
        super().__init__()
        self._means = means
        self.add_state("sums", torch.zeros(num_sums, dtype=torch.float64), dist_reduce_fx="sum")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the means."""
        return tuple(self._means(torch.ones_like(self.sums)))

    def update(self, sums: torch.Tensor) -> None:
        """Add the sums of one batch, fp64."""
        self.sums += sums

    def compute(self) -> dict[str, torch.Tensor]:
        """Compute fp32 scalars over all ranks."""
        return self._means(self.sums)


def eval_means(sums: torch.Tensor) -> dict[str, torch.Tensor]:
    """Loss, perplexity and accuracy of supervised tokens, from their number and the sums over them."""
    loss, accuracy = (sums[1:] / sums[0]).float()
    return {"loss": loss, "perplexity": loss.exp(), "token_accuracy": accuracy}
