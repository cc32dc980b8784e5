"""Losses of pairs: the formulas written out on full logits, gradients included, whichever way the head is computed."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from lit_fsdp.config.model import LossConfig, PreferenceConfig, PreferenceModelConfig
from lit_fsdp.errors import ConfigError
from lit_fsdp.models.loss import plan_loss
from lit_fsdp.models.preference import PAIR_COUNTS, preference_forward

CASES = [
    {"loss": "dpo", "beta": 0.3},
    {"loss": "dpo", "beta": 0.3, "label_smoothing": 0.2},
    {"loss": "ipo", "beta": 0.4},
    {"loss": "orpo", "beta": 0.5},
    {"loss": "simpo", "beta": 2.0, "gamma": 0.7, "label_smoothing": 0.1},
]
REFERENCE = torch.tensor([[-31.0, -22.0, 0.0], [-20.0, -37.0, 0.0]])


def _model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    tiny = LlamaConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, vocab_size=60)
    return LlamaForCausalLM(tiny)


def _batch() -> dict[str, torch.Tensor]:
    """Chosen rows of two pairs and a filler, then the rejected ones; each completion of another length."""
    torch.manual_seed(1)
    ids = torch.randint(0, 60, (6, 12))
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for row, (prompt, end) in enumerate([(3, 9), (5, 12), (1, 1), (3, 12), (5, 8), (1, 1)]):
        mask[row, :end] = 1
        labels[row, prompt:end] = ids[row, prompt:end]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _written_out(model: LlamaForCausalLM, batch: dict[str, torch.Tensor], case: dict[str, float | str]) -> torch.Tensor:
    """The summed loss of the two pairs, each by itself, from all logits."""
    beta, smooth, total = float(case["beta"]), float(case.get("label_smoothing", 0)), torch.zeros(())
    log_probs = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits.log_softmax(-1)
    for pair in (0, 1):
        logps, lengths = [], []
        for row in (pair, pair + 3):
            kept = [t for t in range(1, 12) if batch["labels"][row, t] != -100]
            logps.append(sum(log_probs[row, t - 1, batch["input_ids"][row, t]] for t in kept))
            lengths.append(len(kept))
        ratios = [logps[side] - REFERENCE[side, pair] for side in (0, 1)]
        means = [logps[side] / lengths[side] for side in (0, 1)]
        if case["loss"] == "ipo":
            total = total + (ratios[0] / lengths[0] - ratios[1] / lengths[1] - 1 / (2 * beta)) ** 2
        elif case["loss"] == "orpo":
            odds = [torch.log(mean.exp() / (1 - mean.exp())) for mean in means]
            tokens = int(batch["attention_mask"][pair].sum())
            ids = batch["input_ids"][pair, 1:tokens]
            whole = -log_probs[pair, : tokens - 1].gather(1, ids[:, None]).mean()
            total = total + whole - beta * F.logsigmoid(odds[0] - odds[1])
        else:
            gap = beta * (ratios[0] - ratios[1])
            if case["loss"] == "simpo":
                gap = beta * (means[0] - means[1]) - float(case["gamma"])
            total = total - (1 - smooth) * F.logsigmoid(gap) - smooth * F.logsigmoid(-gap)
    return total


@pytest.mark.parametrize("head", ["trained", "frozen", "plain"])
def test_losses_and_gradients_are_those_of_the_formulas(head: str):
    batch = _batch()
    for case in CASES:
        model = _model()
        model.lm_head.requires_grad_(head != "frozen")
        trained = [param for param in model.parameters() if param.requires_grad]
        wanted = _written_out(model, batch, case)
        wanted_grads, wanted = torch.autograd.grad(wanted, trained), wanted.detach()
        config = PreferenceConfig(**case)
        loss_config = LossConfig(backend="plain") if head == "plain" else LossConfig(chunk_tokens=4)
        reference = REFERENCE if config.has_reference else None
        loss, sums = preference_forward(model, batch, config, plan_loss(model, loss_config), reference)
        torch.testing.assert_close(loss.loss_sum.detach(), wanted, rtol=1e-5, atol=1e-6)
        for grad, right in zip(torch.autograd.grad(loss.loss_sum, trained), wanted_grads, strict=True):
            assert (grad - right).norm() <= 1e-5 * right.norm(), case
        found = dict(zip(PAIR_COUNTS, sums.tolist(), strict=True))
        assert found["pairs"] == 2  # the filler counts for nothing
        assert found["loss"] == pytest.approx(wanted.item(), rel=1e-5)
        assert int(loss.num_tokens) == 6 + 7 + 9 + 3
        with torch.no_grad():  # as validation does
            again, _ = preference_forward(model, batch, config, plan_loss(model, loss_config), reference)
        torch.testing.assert_close(again.loss_sum, wanted, rtol=1e-5, atol=1e-6)


def test_options_that_mean_nothing_are_refused():
    for kind, options, field in (
        (PreferenceModelConfig, {"loss": LossConfig(backend="liger")}, "loss.backend"),
        (PreferenceConfig, {"beta": 0.0}, "beta"),
        (PreferenceConfig, {"gamma": -1.0}, "gamma"),
    ):
        with pytest.raises(ConfigError) as caught:
            kind(**options)
        assert caught.value.field == field
