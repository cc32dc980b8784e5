"""Random initialization: as transformers does it, and the same for every order and sharding."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from lit_fsdp.errors import CheckpointError
from lit_fsdp.models.build import build_on_meta
from lit_fsdp.models.weights import ModelSource, open_weights


def _random(config, seed=3):
    model = build_on_meta(config, "eager")
    return open_weights(ModelSource(config, None, None, "x"), model, seed), model


def test_distribution_is_that_of_from_config(tiny, fill, tensors):
    for family in ("llama", "gpt2", "mixtral", "gpt_neox"):
        weights, meta = _random(tiny(family))
        model = fill(weights, meta)
        torch.manual_seed(0)
        expected = AutoModelForCausalLM.from_config(tiny(family), attn_implementation="eager")
        for name, tensor in tensors(expected).items():
            found = torch.std_mean(tensors(model)[name].float(), correction=0)
            wanted = torch.std_mean(tensor.float(), correction=0)
            assert [one.item() for one in found] == pytest.approx([one.item() for one in wanted], abs=3e-3), name


def test_padding_row_is_zero_ties_share_the_first_owner_and_other_names_have_other_values(tiny):
    weights, model = _random(tiny("llama"))
    state = torch.get_rng_state()
    embeddings = weights.read("model.embed_tokens", model.model.embed_tokens, "weight")
    assert torch.equal(torch.get_rng_state(), state)
    assert embeddings.any(dim=1).tolist() == [row != 5 for row in range(128)]
    assert torch.equal(weights.read("lm_head", model.lm_head, "weight"), embeddings)
    blocks = [f"model.layers.{i}.self_attn.q_proj" for i in range(2)]
    first, second = (weights.read(name, model.get_submodule(name), "weight") for name in blocks)
    assert not torch.equal(first, second)


def test_code_that_initializes_nothing_is_refused(tiny, monkeypatch):
    monkeypatch.setattr(LlamaForCausalLM, "_init_weights", lambda self, module: None)
    weights, model = _random(tiny("llama", tie_word_embeddings=False))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: the model's code"):
        weights.read("lm_head", model.lm_head, "weight")
