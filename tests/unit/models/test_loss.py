"""The summed loss: shift, mask, and the head applied only where it is needed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lit_fsdp.models import loss as loss_module
from lit_fsdp.models.build import build_on_meta
from lit_fsdp.models.loss import TokenLoss, causal_lm_forward, per_sample_loss, summed_loss
from lit_fsdp.models.source import ModelSource
from lit_fsdp.models.weights import open_weights


def _labels():
    labels = torch.tensor([[-100, -100, 4, 5, -100, 6], [1, 2, -100, -100, -100, -100]])
    return labels, [(0, 1, 4), (0, 2, 5), (0, 4, 6), (1, 0, 2)]  # row, position of the logits, target


def test_sum_is_written_out():
    torch.manual_seed(0)
    logits = torch.randn(2, 6, 9)
    labels, targets = _labels()
    log_probs = logits.log_softmax(-1)
    result = summed_loss(logits, labels)
    assert isinstance(result, TokenLoss)
    assert result.loss_sum.item() == pytest.approx(-sum(log_probs[b, t, v].item() for b, t, v in targets), rel=1e-6)
    assert result.num_tokens.item() == 4
    assert result.num_correct.item() == sum(logits[b, t].argmax().item() == v for b, t, v in targets)
    assert [t.dtype for t in result] == [torch.float32, torch.int64, torch.int64]
    assert [t.dim() for t in result] == [0, 0, 0]


def test_bf16_logits_are_summed_in_fp32():
    logits = torch.randn(1, 500, 40).bfloat16()
    labels = torch.randint(0, 40, (1, 500))
    exact = F.cross_entropy(logits[0, :-1].double(), labels[0, 1:], reduction="sum")
    assert summed_loss(logits, labels).loss_sum.item() == pytest.approx(exact.item(), rel=1e-6)


def test_nothing_supervised_keeps_the_graph():
    logits = torch.randn(2, 4, 9, requires_grad=True)
    result = summed_loss(logits, torch.full((2, 4), -100))
    assert (result.loss_sum.item(), result.num_tokens.item(), result.num_correct.item()) == (0.0, 0, 0)
    result.loss_sum.backward()
    assert logits.grad is not None
    assert not logits.grad.any()


def test_first_label_is_never_learnt():
    labels = torch.tensor([[7, -100, -100]])
    assert summed_loss(torch.randn(1, 3, 9), labels).num_tokens.item() == 0


def test_each_sample_alone():
    torch.manual_seed(0)
    logits, (labels, _) = torch.randn(2, 6, 9), _labels()
    sums, counts = per_sample_loss(logits, labels)
    assert counts.tolist() == [3, 1]
    for row in range(2):
        assert sums[row].item() == pytest.approx(
            summed_loss(logits[row : row + 1], labels[row : row + 1]).loss_sum.item(), rel=1e-6
        )
    empty, none = per_sample_loss(logits, torch.full((2, 6), -100))
    assert (empty.tolist(), none.tolist()) == ([0.0, 0.0], [0, 0])


def _model(config, fill):
    meta = build_on_meta(config, "eager")
    return fill(open_weights(ModelSource(config, None, None, "x"), meta, 1), meta)


def _batch(rows=((9, 16), (4, 7))):
    torch.manual_seed(0)
    ids = torch.randint(3, 99, (len(rows), 16))
    labels = torch.full_like(ids, -100)
    for row, (start, end) in enumerate(rows):
        labels[row, start:end] = ids[row, start:end]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def _grads(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _use(selection, model_class, monkeypatch):
    """Have the loss select what ``selection`` says, as it does with models and versions that can do no better."""
    able = ["none", "positions", "tokens"]
    best = loss_module._head_selection(model_class.forward)
    if able.index(selection) > able.index(best):
        pytest.skip(f"this transformers selects {best}")
    monkeypatch.setattr(loss_module, "_head_selection", lambda forward: selection)


@pytest.mark.parametrize("selection", ["none", "positions", "tokens"])
def test_skipping_unsupervised_positions_changes_nothing(family, tiny, fill, selection, monkeypatch):
    model, batch = _model(tiny(family), fill), _batch()
    _use(selection, type(model), monkeypatch)
    plain = summed_loss(
        model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits, batch["labels"]
    )
    expected = _grads(model, plain.loss_sum)
    result = causal_lm_forward(model, batch)
    assert result.loss_sum.item() == pytest.approx(plain.loss_sum.item(), rel=1e-6)
    assert torch.equal(result.num_tokens, plain.num_tokens)
    assert torch.equal(result.num_correct, plain.num_correct)
    grads = _grads(model, result.loss_sum)
    assert grads.keys() == expected.keys()
    difference, norm = (
        torch.cat([g.flatten() for g in gs]).norm()
        for gs in ([grads[name] - grad for name, grad in expected.items()], expected.values())
    )
    assert difference <= 1e-6 * norm


@pytest.mark.parametrize("selection", ["none", "positions", "tokens"])
def test_unsupervised_batch_reaches_every_parameter(tiny, fill, selection, monkeypatch):
    model, batch = _model(tiny("qwen2"), fill), _batch(((0, 0), (0, 1)))
    _use(selection, type(model), monkeypatch)
    result = causal_lm_forward(model, batch)
    assert (result.loss_sum.item(), result.num_tokens.item()) == (0.0, 0)
    grads = _grads(model, result.loss_sum)
    assert grads.keys() == dict(model.named_parameters()).keys()
    assert not any(grad.any() for grad in grads.values())


class _Wrapper(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


@pytest.mark.parametrize("wrapped", [False, True])
def test_head_runs_on_supervised_tokens_only(tiny, fill, wrapped):
    model, batch = _model(tiny("llama"), fill), _batch()
    seen = []
    model.lm_head.register_forward_hook(lambda module, args, out: seen.append(args[0].numel() // 64))
    causal_lm_forward(_Wrapper(model) if wrapped else model, batch)
    union, tokens = 2 * 10, 10  # positions 3-5 and 8-14 in both rows; 7 + 3 tokens
    assert seen[0] in (union, tokens)


class _NoSelection(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(99, 99)

    def forward(self, input_ids, attention_mask):
        return type("Out", (), {"logits": self.embed(input_ids)})


def test_model_whose_forward_cannot_select():
    batch, model = _batch(), _NoSelection()
    expected = summed_loss(model.embed(batch["input_ids"]), batch["labels"])
    assert torch.equal(causal_lm_forward(model, batch).loss_sum, expected.loss_sum)
