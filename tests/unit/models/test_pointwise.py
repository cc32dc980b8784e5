"""Norms and gated activations in one function: values and gradients of transformers, with less kept for them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from lit_fsdp.config.model import ModelConfig
from lit_fsdp.models.build import build_trainable
from lit_fsdp.models.pointwise import apply_single_functions
from tests.unit.models.families import FAMILIES, FEW, random_model

# how many norms and feed-forward layers of two blocks are covered; none where a model computes something else
COVERED = {"llama": (5, 2), "qwen3": (9, 2), "gemma3_text": (13, 0), "olmo3": (9, 2), "gpt2": (0, 0), "mixtral": (5, 0)}


def _covered(model: Any) -> tuple[int, int]:
    found = [getattr(module.forward, "func", None) for module in model.modules() if "forward" in module.__dict__]
    names = [function.__name__ for function in found if function is not None]
    return names.count("_norm"), names.count("_feed_forward")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_are_those_of_transformers(dtype: torch.dtype):
    ids = torch.arange(3, 43).reshape(2, 20)
    for family, covered in COVERED.items():
        found, kept = [], []
        for changed in (False, True):
            model, saved = random_model(family).to(dtype).train(), {}
            if changed:
                apply_single_functions(model)
                assert _covered(model) == covered, family

            def pack(tensor: torch.Tensor, saved: dict[int, int] = saved) -> torch.Tensor:
                saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            kept.append(sum(saved.values()))
            found.append(
                {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}
            )
            with torch.no_grad():
                found[-1]["logits"] = model.eval()(input_ids=ids, use_cache=False).logits
        assert torch.equal(found[0]["logits"], found[1]["logits"]), family
        limit = 1e-5 if dtype == torch.float32 else 0.1  # transformers rounds the steps between
        for name, wanted in found[0].items():
            assert (found[1][name] - wanted).float().norm() <= limit * wanted.float().norm() + 1e-8, (family, name)
        assert kept[1] < kept[0] or covered == (0, 0), family


@pytest.mark.parametrize("families", [FEW, pytest.param(FAMILIES, marks=pytest.mark.long("each of 150 families"))])
def test_every_family_computes_what_it_did(families: tuple[str, ...]):
    """With gradients on, where the functions are used; what transformers cannot run at this size is left out."""
    ids, num_covered = torch.arange(3, 27).reshape(2, 12), 0
    for family in families:
        try:
            model = random_model(family).train(False)
            wanted = model(input_ids=ids, use_cache=False).logits.detach()
        except Exception:
            assert families is not FEW
            continue
        apply_single_functions(model)
        num_covered += any(_covered(model))
        found = model(input_ids=ids, use_cache=False).logits
        assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max())), family
    assert num_covered >= (5 if families is FEW else 80)


def test_a_model_that_is_trained_uses_them_and_copies_keep_their_own_weights():
    model, _ = build_trainable(random_model("llama").config, ModelConfig())
    assert _covered(model) == (5, 2)
    model.to_empty(device="cpu")
    again = copy.deepcopy(model)
    norm = again.model.layers[0].input_layernorm
    with torch.no_grad():
        norm.weight.fill_(2.0)
        model.model.layers[0].input_layernorm.weight.fill_(1.0)
    x = torch.randn(3, norm.weight.numel(), requires_grad=True)
    assert torch.equal(norm(x), 2 * model.model.layers[0].input_layernorm(x))
    assert all(leaf.is_leaf for leaf in tree_leaves(dict(again.named_parameters())))
