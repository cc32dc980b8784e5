"""The summed loss: shift, mask, chunks, and the same loss and gradients whichever way it is computed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from lit_fsdp.config.model import LossConfig
from lit_fsdp.errors import ConfigError
from lit_fsdp.models.build import build_on_meta
from lit_fsdp.models.loss import causal_lm_forward, next_targets, plan_loss
from lit_fsdp.models.weights import ModelSource, open_weights
from tests.unit.models.families import FAMILIES
from tests.unit.models.families import tiny as tiny_family


def _labels():
    labels = torch.tensor([[-100, -100, 4, 5, -100, 6], [1, 2, -100, -100, -100, -100]])
    return labels, [(0, 1, 4), (0, 2, 5), (0, 4, 6), (1, 0, 2)]  # row, position of the logits, target


class _Fixed(nn.Module):
    """A model without a head, which gives these logits."""

    def __init__(self, logits):
        super().__init__()
        self.logits = logits

    def forward(self, input_ids):
        return self


def test_sum_is_written_out():
    torch.manual_seed(0)
    logits = torch.randn(2, 6, 9)
    labels, targets = _labels()
    log_probs = logits.log_softmax(-1)
    result = causal_lm_forward(_Fixed(logits), {"input_ids": labels, "labels": labels})
    assert result.loss_sum.item() == pytest.approx(-sum(log_probs[b, t, v].item() for b, t, v in targets), rel=1e-6)
    assert result.nll_sum.item() == pytest.approx(result.loss_sum.item(), rel=1e-6)
    assert result.num_tokens.item() == 4
    assert result.num_correct.item() == sum(logits[b, t].argmax().item() == v for b, t, v in targets)
    entropies = -(log_probs.exp() * log_probs).sum(-1)
    assert result.entropy_sum.item() == pytest.approx(sum(entropies[b, t].item() for b, t, _ in targets), rel=1e-6)


def _nll(logits, labels):
    targets = next_targets({"labels": labels}).flatten()
    return F.cross_entropy(logits.flatten(0, 1).float(), targets, ignore_index=-100, reduction="sum").item()


def test_the_first_token_of_a_packed_sample_is_never_supervised():
    labels = torch.tensor([[7, 8, 9, 4, 5, 6]])
    positions = torch.tensor([[0, 1, 0, 1, 2, 0]])
    assert next_targets({"labels": labels, "position_ids": positions}).tolist() == [[8, -100, 4, 5, -100, -100]]
    assert next_targets({"labels": labels}).tolist() == [[8, 9, 4, 5, 6, -100]]


def _model(config, fill):
    meta = build_on_meta(config, "eager")
    return fill(open_weights(ModelSource(config, None, None, "x"), meta, 1), meta)


def _batch(rows=((9, 16), (4, 7))):
    torch.manual_seed(0)
    ids = torch.randint(3, 128, (len(rows), 16))
    labels = torch.full_like(ids, -100)
    for row, (start, end) in enumerate(rows):
        labels[row, start:end] = ids[row, start:end]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def _grads(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


_HEADS = ("bert", "cohere", "gemma2", "granite", "modernbert-decoder", "mpt", "nanochat", "recurrent_gemma")


_ALL = pytest.param(FAMILIES, id="all", marks=pytest.mark.long("each of about 130 families is built and run"))


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


def test_the_router_loss_of_a_mixture_is_kept(tiny, fill):
    model, batch = _model(tiny("mixtral", output_router_logits=True, router_aux_loss_coef=0.1), fill), _batch()
    own = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["labels"]).loss
    for plan in (plan_loss(model), plan_loss(model, LossConfig(backend="plain"))):
        found = causal_lm_forward(model, batch, plan)
        assert found.loss_sum.item() / 10 == pytest.approx(own.item(), rel=1e-5)
        assert found.loss_sum.item() > found.nll_sum.item()


def test_unsupervised_batch_reaches_every_parameter(tiny, fill):
    model, batch = _model(tiny("qwen2"), fill), _batch(((0, 0), (0, 1)))
    for backend in ("chunked", "plain"):
        result = causal_lm_forward(model, batch, plan_loss(model, LossConfig(backend=backend)))
        assert (result.loss_sum.item(), result.num_tokens.item()) == (0.0, 0)
        grads = _grads(model, result.loss_sum)
        assert grads.keys() == dict(model.named_parameters()).keys()
        assert not any(grad.any() for grad in grads.values())


class _Shifted(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits + torch.arange(128)
        return out


def test_what_is_not_known_is_said_and_done_plainly(tiny, caplog):
    batch = _batch()
    for model, said in (
        (_Fixed(torch.randn(2, 16, 128)), "no output head"),
        (_Shifted(tiny("llama")), "its forward is not one of transformers"),
        (LlamaForCausalLM(tiny("llama", logits_squared=True)), "logits_squared: True is not known"),
    ):
        caplog.clear()
        wanted = _nll(model(input_ids=batch["input_ids"]).logits, batch["labels"])
        found = causal_lm_forward(model, {name: batch[name] for name in ("input_ids", "labels")})
        assert found.loss_sum.item() == pytest.approx(wanted, rel=1e-6)
        assert len(caplog.records) == 1
        assert said in caplog.text
    with pytest.raises(ConfigError, match=r"not installed[\s\S]*pip install lit-fsdp\[liger\]"):
        plan_loss(build_on_meta(tiny("llama"), "eager"), LossConfig(backend="liger"))
