"""The summed loss: shift, mask, chunks, and the same loss and gradients whichever way it is computed."""

from __future__ import annotations

import dataclasses
import itertools
from unittest import mock

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from lit_fsdp.config.model import LossConfig
from lit_fsdp.errors import ConfigError
from lit_fsdp.models.build import build_on_meta
from lit_fsdp.models.loss import ChunkedLoss, LossPlan, _is_most_likely, causal_lm_forward, next_targets, plan_loss
from tests.unit.models.families import FAMILIES
from tests.unit.models.families import tiny as tiny_family


def _nll(logits, labels):
    targets = next_targets({"labels": labels}).flatten()
    return F.cross_entropy(logits.flatten(0, 1).float(), targets, ignore_index=-100, reduction="sum").item()


def _batch(rows=((9, 16), (4, 7))):
    torch.manual_seed(0)
    ids = torch.randint(3, 128, (len(rows), 16))
    labels = torch.full_like(ids, -100)
    for row, (start, end) in enumerate(rows):
        labels[row, start:end] = ids[row, start:end]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


_HEADS = ("bert", "cohere", "gemma2", "granite", "modernbert-decoder", "mpt", "nanochat", "recurrent_gemma")
_ALL = pytest.param(FAMILIES, id="all", marks=pytest.mark.long("each of about 130 families is built and run"))


def test_the_number_of_labels_changes_nothing_and_must_be_theirs(tiny):
    torch.manual_seed(0)
    model, batch, found = LlamaForCausalLM(tiny("llama")), _batch(), []
    for more in ({}, {"num_targets": 10}):
        loss = causal_lm_forward(model, {**batch, **more}).loss_sum
        found.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    for wrong in (9, 11):
        with pytest.raises(RuntimeError, match="labels changed on the device: drop num_targets from the batch"):
            causal_lm_forward(model, {**batch, "num_targets": wrong})


@pytest.mark.parametrize("families", [pytest.param(_HEADS, id="few"), _ALL])
def test_every_family_has_its_own_loss(families):
    """Chunked or plain, whatever its config is read as: the cross-entropy of what the model itself returns."""
    seen = 0
    for family in families:
        if family == "prophetnet":  # predicts several tokens at each position, and is refused
            continue
        try:
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(tiny_family(family)).eval()
            model.config.use_cache = False  # as in training
            torch.nn.init.normal_(model.get_output_embeddings().weight, std=2.0)  # logits that a bound would show in
            batch = {"input_ids": torch.arange(3, 19).reshape(2, 8), "labels": torch.arange(3, 19).reshape(2, 8)}
            wanted = _nll(model(input_ids=batch["input_ids"]).logits, batch["labels"])
        except Exception:
            if family in _HEADS:
                raise
            continue
        with torch.no_grad():
            found = causal_lm_forward(model, batch, plan_loss(model)).nll_sum
        assert found.item() == pytest.approx(wanted, rel=1e-4), family
        seen += 1
    assert seen >= (len(_HEADS) if families is _HEADS else 120)


def test_the_router_loss_of_a_mixture_is_kept(tiny):
    config = tiny("mixtral", output_router_logits=True, router_aux_loss_coef=0.1)
    batch, model = _batch(), AutoModelForCausalLM.from_config(config).eval()
    own = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["labels"]).loss
    for plan in (plan_loss(model), plan_loss(model, LossConfig(backend="plain"))):
        found = causal_lm_forward(model, batch, plan)
        assert found.loss_sum.item() / 10 == pytest.approx(own.item(), rel=1e-5)
        assert found.loss_sum.item() > found.nll_sum.item()


def test_unsupervised_batch_reaches_every_parameter(tiny):
    for backend in ("chunked", "plain"):
        batch, model = _batch(((0, 0), (0, 1))), AutoModelForCausalLM.from_config(tiny("qwen2")).eval()
        result = causal_lm_forward(model, batch, plan_loss(model, LossConfig(backend=backend)))
        assert (result.loss_sum.item(), result.num_tokens.item()) == (0.0, 0)
        result.loss_sum.backward()
        assert not any(param.grad.any() for param in model.parameters())


class _Shifted(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits + torch.arange(out.logits.shape[-1])
        return out


def test_what_is_not_known_is_said_and_done_plainly(tiny, caplog):
    batch = _batch()
    for model, said in (
        (_Shifted(tiny("llama")), "its forward is not one of transformers"),
        (LlamaForCausalLM(tiny("llama", logits_squared=True)), "the effect of logits_squared: True"),
    ):
        caplog.clear()
        wanted = _nll(model(input_ids=batch["input_ids"]).logits, batch["labels"])
        found = causal_lm_forward(model, {name: batch[name] for name in ("input_ids", "labels")})
        assert found.loss_sum.item() == pytest.approx(wanted, rel=1e-6)
        assert len(caplog.records) == 1
        assert said in caplog.text
    with pytest.raises(ConfigError, match=r"not installed[\s\S]*pip install 'lit-fsdp\[liger\]'"):
        plan_loss(build_on_meta(tiny("llama"), "eager"), LossConfig(backend="liger"))


def test_a_head_over_a_frozen_body_is_trained_without_liger(tiny, monkeypatch):
    """Whose kernel gives weights a gradient only beside one of the hidden states."""
    monkeypatch.setattr("lit_fsdp.models.loss._liger_loss", mock.Mock(side_effect=AssertionError))
    model = AutoModelForCausalLM.from_config(tiny("llama", tie_word_embeddings=False)).requires_grad_(False)
    head, plan = model.get_output_embeddings().requires_grad_(True), plan_loss(model)
    causal_lm_forward(model, _batch(), dataclasses.replace(plan, backend="liger")).loss_sum.backward()
    assert bool(head.weight.grad.any())


def _tensors():
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64) for s in ((11, 6), (23, 6), (23,))]
    return [t.requires_grad_() for t in tensors], torch.randint(0, 23, (11,), generator=generator)


def _loss(hidden, weight, bias, targets, num_rows=4, **terms):
    trained = [t for t in (weight, bias) if t is not None]
    plan = LossPlan("chunked", **terms)
    return ChunkedLoss.apply(lambda rows: F.linear(rows, weight, bias), targets, plan, num_rows, hidden, *trained)


def test_loss_and_gradients_are_those_of_the_formula():
    terms = ({}, {"scale": 0.3}, {"cap": 1.5}, {"scale": 1.7, "cap": 1.5})
    for options, num_rows in itertools.product(terms, (1, 4, 11, 100)):
        leaves, targets = _tensors()
        z = (leaves[0] @ leaves[1].T + leaves[2]) * options.get("scale", 1)
        if cap := options.get("cap"):
            z = cap * torch.tanh(z / cap)
        wanted = (z.exp().sum(-1).log() - z[torch.arange(11), targets]).sum()
        gradients = torch.autograd.grad(wanted, leaves)
        found, nll, correct = _loss(*leaves, targets, num_rows, **options)
        assert found.shape == (1, 1, 1)
        assert found._base is None  # FSDP2 warns of views
        assert torch.allclose(torch.stack([found.sum(), nll.sum()]), wanted, rtol=1e-12)
        assert torch.equal(correct, z.argmax(-1) == targets)
        for mine, theirs in zip(torch.autograd.grad(3 * found.sum(), leaves), gradients, strict=True):
            assert torch.allclose(mine, 3 * theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bf16_products_of_the_head_have_few_shapes_on_a_cpu(dtype):
    """Tokens are padded to a multiple of 64, also under autocast, and the loss is that of the tokens."""
    hidden, weight, seen = torch.randn(150, 6).to(dtype).requires_grad_(), torch.randn(23, 6), []
    targets = torch.randint(0, 23, (150,))

    def head(rows):
        seen.append(len(rows))
        return F.linear(rows, weight.to(rows.dtype))

    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
        loss, nll, _ = ChunkedLoss.apply(head, targets, LossPlan("chunked"), 128, hidden)
        wanted = F.cross_entropy(head(hidden).float(), targets, reduction="sum")
    assert (seen[:2], len(nll)) == ([128, 64], 150)
    assert torch.allclose(loss.sum(), wanted, rtol=1e-5)
    found, exact = (torch.autograd.grad(x.sum(), hidden)[0].float() for x in (loss, wanted))
    assert float((found - exact).norm() / exact.norm()) < 0.01


def test_of_equal_largest_logits_the_first_is_predicted():
    z = torch.tensor([[1.0, 3.0, 3.0], [1.0, 3.0, 3.0], [0.0, 0.0, 0.0], [2.0, 1.0, 0.0]])
    targets = torch.tensor([1, 2, 0, 1])
    assert _is_most_likely(z, targets).tolist() == [True, False, True, False]


def test_gradients_of_the_head_are_summed_in_fp32():
    """Many small chunks lose no more than one product of all rows."""
    for dtype, limit in ((torch.bfloat16, 8e-3), (torch.float16, 1e-3)):
        generator = torch.Generator().manual_seed(1)
        hidden = torch.randn(512, 16, generator=generator).to(dtype)
        weight = torch.randn(40, 16, generator=generator).to(dtype).requires_grad_()
        targets = torch.randint(0, 40, (512,), generator=generator)
        exact = weight.detach().double().requires_grad_()
        whole = F.cross_entropy(hidden.double() @ exact.T, targets, reduction="sum")
        (wanted,) = torch.autograd.grad(whole, [exact])
        errors = []
        for num_rows in (2, 512):
            loss, *_ = _loss(hidden, weight, None, targets, num_rows)
            (grad,) = torch.autograd.grad(loss.sum(), [weight])
            errors.append(float((grad.double() - wanted).norm() / wanted.norm()))
        assert errors[0] < min(limit, 1.5 * errors[1])


def test_all_logits_never_exist_and_gradients_are_given_away_once():
    """Nothing of (N, V) is made: with 64 chunks the largest tensor is a chunk's, or the head's gradient."""
    hidden, weight = torch.randn(512, 8, requires_grad=True), torch.randn(1000, 8, requires_grad=True)
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(t.numel() for t in (out if isinstance(out, (tuple, list)) else [out]) if torch.is_tensor(t))
            return out

    with Watch():
        loss, *_ = _loss(hidden, weight, None, torch.randint(0, 1000, (512,)), 8)
        loss.sum().backward(retain_graph=True)
    assert max(sizes) == 8 * 1000 == weight.numel()
    with pytest.raises(AssertionError, match="works only once"):
        loss.sum().backward()


def test_a_sum_too_large_for_fp16_fits_once_it_is_scaled():
    """A loss scale that falls helps only if nothing has overflowed before it is known."""
    weight = torch.zeros(8, 4, dtype=torch.float16, requires_grad=True)
    hidden = torch.full((20_000, 4), 8.0, dtype=torch.float16, requires_grad=True)
    loss, *_ = _loss(hidden, weight, None, torch.full((20_000,), 3), 100)
    (loss.sum() / 1024).backward()
    assert float(weight.grad[3, 0]) == pytest.approx(-20_000 * 8 * 7 / 8 / 1024, rel=2e-3)


def test_a_third_of_a_loss_has_a_third_of_the_gradients():
    """Three micro-batches to a step: rounded to bf16 first, the factor would make all gradients 0.2 % larger."""
    for dtype, limit in ((torch.bfloat16, 1e-3), (torch.float16, 1e-3), (torch.float32, 1e-6)):
        (hidden, weight, _), targets = _tensors()
        found = []
        for factor in (1.0, 1 / 3):
            leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in (hidden, weight)]
            (_loss(*leaves, None, targets)[0].sum() * factor).backward()
            found.append([leaf.grad.double() for leaf in leaves])
        for whole, third in zip(*found, strict=True):
            assert float((third * whole).sum() / whole.square().sum()) == pytest.approx(1 / 3, rel=limit)
