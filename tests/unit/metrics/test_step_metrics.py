"""Sums to means: what is logged of a step and of a validation."""

from __future__ import annotations

import pytest
import torch

from lit_fsdp.metrics.step_metrics import SumMetric, eval_means, step_metrics


def _seen(*batches: tuple[int, float]) -> SumMetric:
    metrics = SumMetric(4, eval_means)
    for tokens, nll in batches:
        metrics.update(torch.tensor([tokens, nll, tokens, nll / 2]))
    return metrics


def test_means_are_over_tokens_and_start_anew() -> None:
    metrics = _seen((3, 6.0), (0, 0.0), (1, 4.0))
    wanted = {"loss": 2.5, "perplexity": 12.182494, "token_accuracy": 1.0, "entropy": 1.25}
    assert {name: float(value) for name, value in metrics.compute().items()} == pytest.approx(wanted)
    metrics.reset()
    metrics.update(torch.tensor([1, 7.0, 0, 0.0]))
    assert float(metrics.compute()["loss"]) == 7.0


def test_one_batch_without_a_finite_loss_shows() -> None:
    found = _seen((3, 6.0), (3, float("nan"))).compute()
    assert found["loss"].isnan()
    assert float(found["token_accuracy"]) == 1.0


def test_what_a_backend_does_not_tell_is_not_logged() -> None:
    totals = torch.tensor([2.0, 4.0, 0, 0, 0, 0, float("nan"), float("nan"), 4.0, 0.0], dtype=torch.float64)
    assert step_metrics(totals, False, False, with_scores=False) == {"train_loss": 2.0}
    totals[6:8] = torch.tensor([1.0, 3.0])
    told = step_metrics(totals, False, False)
    assert (told["train_token_accuracy"], told["train_entropy"]) == (0.5, 1.5)
