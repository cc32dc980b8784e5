"""Sums to means: what is logged of a step and of a validation."""

from __future__ import annotations

import warnings

import pytest
import torch

from lit_fsdp.metrics.losses import EvalMetrics, step_metrics


def test_means_are_over_tokens_and_start_anew() -> None:
    metrics = EvalMetrics()
    for tokens, nll in ((3, 6.0), (0, 0.0), (1, 4.0)):
        metrics.add(torch.tensor(tokens), torch.tensor(nll), torch.tensor(tokens), torch.tensor(nll / 2))
    found = metrics.finish("val")
    assert {name: float(value) for name, value in found.items()} == pytest.approx(
        {"val_loss": 2.5, "val_perplexity": 12.182494, "val_token_accuracy": 1.0, "val_entropy": 1.25}
    )
    metrics.add(torch.tensor(1), torch.tensor(7.0), torch.tensor(0), torch.tensor(0.0))
    assert float(metrics.finish("val")["val_loss"]) == 7.0


def test_one_batch_without_a_finite_loss_shows() -> None:
    metrics = EvalMetrics()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for nll in (6.0, float("nan")):
            metrics.add(torch.tensor(3), torch.tensor(nll), torch.tensor(1), torch.tensor(1.0))
        found = metrics.finish("val")
    assert found["val_loss"].isnan()
    assert float(found["val_token_accuracy"]) == pytest.approx(1 / 3)


def test_what_a_backend_does_not_tell_is_not_logged() -> None:
    totals = torch.tensor([2.0, 4.0, 0, 0, 0, 0, float("nan"), float("nan"), 4.0, 0.0], dtype=torch.float64)
    assert step_metrics(totals, False, False, with_scores=False) == {"train_loss": 2.0}
    totals[6:8] = torch.tensor([1.0, 3.0])
    told = step_metrics(totals, False, False)
    assert (told["train_token_accuracy"], told["train_entropy"]) == (0.5, 1.5)
