"""What is counted in every step, summed over micro-batches and ranks by the one all-reduce that a step has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

BATCH_COUNTS = ("tokens", "samples", "slots", "squared_tokens")
"""Counted while a batch is put together: tokens without padding; samples; places of ``input_ids``, padding too; and
the sum over samples of (tokens of the sample) squared, to which the cost of attention is proportional."""
SCORE_COUNTS = ("correct_tokens", "entropy_sum", "objective_sum", "z_loss_sum")
"""Counted where the loss is computed: supervised tokens whose most likely prediction was right and the entropy of the
predictions, both NaN where a fused backend does not tell; what backward runs on (``loss_sum`` is the plain
cross-entropy, always), and the part of it that is z-loss."""
STEP_COUNTS = ("supervised_tokens", "loss_sum", *BATCH_COUNTS, *SCORE_COUNTS)
"""First entries of ``CausalLMModule.step_totals``; votes to stop follow."""


def step_counts(totals: Iterable[float]) -> dict[str, float]:
    """``step_totals`` (or sums of them) as a mapping by the names in :data:`STEP_COUNTS`."""
    return dict(zip(STEP_COUNTS, (float(value) for value in totals), strict=False))


def batch_counts(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """``batch["counts"]``, or for somebody's own batches the same counted from mask and ids; int64 (4,)."""
    if "counts" in batch:
        return batch["counts"]
    ids_BT = batch["input_ids"]
    mask_BT = batch.get("attention_mask", torch.ones_like(ids_BT))
    lengths_B = mask_BT.long().sum(dim=1)
    sizes = torch.tensor([len(ids_BT), ids_BT.numel()], device=lengths_B.device)
    return torch.stack([lengths_B.sum(), sizes[0], sizes[1], lengths_B.square().sum()])
