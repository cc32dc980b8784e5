"""Losses of pairs: the formulas written out on full logits, gradients included, whichever way the head is computed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, masking_utils

from lit_fsdp.config.model import LossConfig, PreferenceConfig, PreferenceModelConfig
from lit_fsdp.data.batches import collate_items
from lit_fsdp.errors import ConfigError
from lit_fsdp.models.loss import plan_loss, sample_losses
from lit_fsdp.models.packing import (
    Isolation,
    last_hidden_states,
    measure_isolation,
    model_inputs,
    pairs_in_one_row,
    rows_of_pairs,
)
from lit_fsdp.models.preference import PAIR_COUNTS, pair_losses, preference_forward
from tests.unit.models.families import random_model

CASES = [
    {"loss": "dpo", "beta": 0.3},
    {"loss": "dpo", "beta": 0.3, "label_smoothing": 0.2},
    {"loss": "ipo", "beta": 0.4},
    {"loss": "orpo", "beta": 0.5},
    {"loss": "simpo", "beta": 2.0, "gamma": 0.7, "label_smoothing": 0.1},
]
REFERENCE = torch.tensor([[-31.0, -22.0, 0.0], [-20.0, -37.0, 0.0]])


def test_odds_of_a_certain_answer_are_finite():
    logps = torch.tensor([[0.0, -3.0, 0.0], [-3.0, 0.0, 0.0]], requires_grad=True)
    losses, _ = pair_losses(PreferenceConfig(loss="orpo"), logps, torch.ones(2, 3), None)
    losses.sum().backward()
    assert losses.isfinite().all()
    assert logps.grad.isfinite().all()
    assert losses[0] < losses[2] < losses[1]


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


def _collated() -> dict[str, Any]:
    """Three pairs, whose prompts are longer or shorter than their completions, and a filler."""
    random, items = np.random.default_rng(0), []
    for prompt, *completions in ((14, 5, 9), (3, 8, 2), (20, 1, 1)):
        begin = random.integers(3, 60, prompt)
        sides = [np.concatenate([begin, random.integers(3, 60, length)]) for length in completions]
        items.append([(tokens, np.arange(len(tokens)) >= prompt) for tokens in sides])
    return collate_items([*items, []], None, 0, True)


_WINDOW = {"sliding_window": 6}
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("shared", {}),
    "qwen3": ("shared", {}),
    "gemma3_text": ("shared", _WINDOW),
    "mistral": ("shared", _WINDOW),
    "mixtral": ("shared", {}),
    "llama-with-dropout": ("whole", {"attention_dropout": 0.1}),
    "mixtral-with-router-loss": ("whole", {"output_router_logits": True}),
    "gemma2": ("shared", _WINDOW),
    "gpt_oss": ("shared", _WINDOW),
    "qwen3_next": ("padded", {}),
}


def test_pairs_in_one_row_are_as_padded_ones():
    """Losses, sums and gradients; what is computed is what is counted, and neither side sees the other."""
    padded = _collated()
    for case, (best, changes) in ROWS.items():
        model = random_model(case.partition("-")[0], True, **changes)
        attention, plan = model.config._attn_implementation, plan_loss(model)
        ways = ("shared", "whole", "padded")
        assert rows_of_pairs(model, attention) == ways[ways.index(best) :], case
        for loss in ("dpo", "orpo") if best != "padded" else ():
            config, found = PreferenceConfig(loss=loss), {}
            reference = torch.tensor([[-30.0, -40, -5, 0], [-31, -38, -6, 0]]) if config.has_reference else None
            for way in ("padded", *ways[ways.index(best) : 2]):
                batch = padded if way == "padded" else pairs_in_one_row(padded, way == "shared")
                inputs = model_inputs(batch, attention)
                total, sums = preference_forward(model, inputs, config, plan, reference)
                grads = torch.autograd.grad(total.loss_sum, list(model.parameters()), allow_unused=True)
                flat = torch.cat([grad.flatten() for grad in grads if grad is not None])
                found[way] = torch.cat([total.loss_sum.detach()[None], sums]), flat
                assert (found[way][0] - found["padded"][0]).abs().max() <= 1e-5 * found["padded"][0].abs().max()
                assert (flat - found["padded"][1]).norm() <= 1e-5 * found["padded"][1].norm(), (case, loss, way)
                logps = sample_losses(model, inputs, plan)[0]
                torch.testing.assert_close(logps, sample_losses(model, model_inputs(padded, attention), plan)[0])
                num, _, slots, squares = batch["counts"].tolist()
                shared = (13, 2, 19) if way == "shared" else ()
                assert (num, slots) == (100 - sum(shared), 8 * 23 if way == "padded" else num + 2)
                assert squares == sum(n * n for n in (19, 23, 11, 5, 21, 21)) - sum(n * n for n in shared)


def test_a_prompt_that_is_not_shared_right_is_noticed():
    """As where attention is not told of it, or goes by the places in a chunk."""
    ids = torch.arange(3, 67)
    model = random_model("llama4_text", True, attention_chunk_size=6)
    states = lambda batch: last_hidden_states(model, batch, model.config._attn_implementation)  # noqa: E731
    assert rows_of_pairs(model, model.config._attn_implementation)[0] == "whole"
    if hasattr(masking_utils, "remap_positions_for_packed_sequence"):  # else chunks begin where they would in one text
        assert measure_isolation(states, ids, shares=False).moved <= 1e-5
    assert measure_isolation(states, ids, shares=True).moved > 0.01
    model = random_model("llama", True)
    assert measure_isolation(states, ids, shares=True) == Isolation(0.0, pytest.approx(0.0, abs=1e-5), 0.0, False)
    untold = lambda batch: states({name: part for name, part in batch.items() if name != "shared_lengths"})  # noqa: E731
    assert measure_isolation(untold, ids, shares=True).moved > 0.01


def test_options_that_mean_nothing_are_refused():
    for kind, options, field in (
        (PreferenceModelConfig, {"loss": LossConfig(backend="liger")}, "loss.backend"),
        (PreferenceConfig, {"beta": 0.0}, "beta"),
        (PreferenceConfig, {"gamma": -1.0}, "gamma"),
    ):
        with pytest.raises(ConfigError) as caught:
            kind(**options)
        assert caught.value.field == field
