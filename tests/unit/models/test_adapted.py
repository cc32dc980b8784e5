"""A layer and its adapter in one function against peft's own way: outputs, gradients, what is saved, and when."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import peft
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lit_fsdp.config.model import LoraConfig
from lit_fsdp.config.strategy import ActivationConfig
from lit_fsdp.models.adapted import apply_one_function
from lit_fsdp.models.build import build_on_meta
from lit_fsdp.models.lora import LoraWeights, apply_lora
from lit_fsdp.parallel.activation import prepare_blocks
from tests.unit.models.conftest import fill, opened

INPUTS, OUTPUTS, RANK = 24, 40, 4


def adapted(bias: bool = True, trained: bool = False, **settings: Any) -> Any:
    """A linear layer as peft adapts it, with values that are no zeros."""
    torch.manual_seed(0)
    holder = nn.ModuleDict({"layer": nn.Linear(INPUTS, OUTPUTS, bias)})
    options = {"r": RANK, "lora_alpha": 6, "target_modules": ["layer"], **settings}
    layer: Any = peft.LoraModel(holder, peft.LoraConfig(**options), "default").model["layer"]
    nn.init.normal_(layer.lora_B["default"].weight)
    return layer.requires_grad_(True) if trained else layer


def results(layer: Any, x: torch.Tensor, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """Output and gradients; ``dtype`` is that of autocast."""
    layer.zero_grad()
    x = x.detach().requires_grad_(x.requires_grad)
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        out = layer(x)
        out += 1  # as some models do
    out.double().square().sum().backward()
    grads = {name: param.grad.clone() for name, param in layer.named_parameters() if param.grad is not None}
    return {"out": out.detach(), **grads, **({"x": x.grad} if x.grad is not None else {})}


def distances(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> dict[str, float]:
    assert {name: t.shape for name, t in found.items()} == {name: t.shape for name, t in wanted.items()}
    return {name: float((found[name].double() - t).norm() / t.double().norm()) for name, t in wanted.items()}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A word for each forward by peft itself."""
    found: list[str] = []
    for kind in (peft.tuners.lora.Linear, peft.tuners.lora.Linear4bit):
        own = kind.forward
        monkeypatch.setattr(kind, "forward", lambda *a, _own=own, **k: (found.append("peft"), _own(*a, **k))[1])
    return found


def test_outputs_and_gradients_are_pefts(calls: list[str]):
    torch.manual_seed(1)
    x = torch.randn(3, 5, INPUTS, requires_grad=True)
    for given in (x, x.detach(), x[0, 0], x.transpose(0, 1), x[:0]):
        for options in ({}, {"bias": False}, {"trained": True}, {"use_rslora": True, "lora_dropout": 0.0}):
            layer = adapted(**options)
            wanted = results(layer, given)
            assert calls.pop() == "peft"
            apply_one_function(layer)
            found = results(layer, given)
            assert not calls
            assert given.shape[0] == 0 or max(distances(found, wanted).values()) < 1e-6
    for one in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
        nn.init.zeros_(one.lora_B["default"].weight)
        assert torch.equal(one(x), layer.base_layer(x))
    assert not calls


def test_in_bf16_it_is_as_near_to_exact_as_peft(calls: list[str]):
    x = torch.randn(64, INPUTS, requires_grad=True)
    for dtype in (None, torch.bfloat16):
        layer, given = adapted(trained=True), x
        if dtype is None:
            layer, given = layer.bfloat16(), x.detach().bfloat16().requires_grad_()
        exact = results(copy.deepcopy(layer).double(), given.double())
        theirs = distances(results(layer, given, dtype), exact)
        calls.clear()
        apply_one_function(layer)
        ours = distances(results(layer, given, dtype), exact)
        assert not calls
        assert all(ours[name] < 1.25 * theirs[name] for name in theirs), (ours, theirs)
        assert ours["out"] < theirs["out"]


def test_input_and_inner_product_are_all_that_is_saved():
    x, layer = torch.randn(64, INPUTS, requires_grad=True), adapted()
    apply_one_function(layer)
    own = {param.untyped_storage().data_ptr() for param in layer.parameters()}
    kept: dict[int, torch.Tensor] = {}
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t)
    with hooks:
        layer(x)
    saved = [t.numel() for t in kept.values() if t.untyped_storage().data_ptr() not in own]
    assert sorted(saved) == [64 * RANK, 64 * INPUTS]


def _two_adapters(layer: Any) -> None:
    layer.update_layer("other", 2, 4, config=peft.LoraConfig(r=2))
    layer.set_adapter(["default", "other"])


PEFTS_OWN: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {
    "dropout": ({"lora_dropout": 0.5}, lambda layer: layer.train()),
    "dora": ({"use_dora": True}, lambda layer: None),
    "bias of the adapter": ({"lora_bias": True}, lambda layer: None),
    "two adapters": ({}, _two_adapters),
    "off": ({}, lambda layer: setattr(layer, "_disable_adapters", True)),
    "merged": ({}, lambda layer: layer.merge()),
    "hook of A": ({}, lambda layer: layer.lora_A["default"].register_forward_hook(lambda m, a, out: 2 * out)),
    "hook of the base": ({}, lambda layer: layer.base_layer.register_forward_pre_hook(lambda m, args: (2 * args[0],))),
    "forward of B": ({}, lambda layer: setattr(layer.lora_B["default"], "forward", lambda h: h.sum(-1, keepdim=True))),
    "dtypes": ({}, lambda layer: layer.base_layer.double()),
}


def test_what_is_more_than_one_adapter_goes_pefts_own_way(calls: list[str]):
    for name, (options, change) in PEFTS_OWN.items():
        found = []
        for ours in (False, True):
            layer = adapted(**options)
            change(layer)
            if ours:
                apply_one_function(layer)
            x = torch.ones(3, INPUTS, dtype=layer.base_layer.weight.dtype, requires_grad=True)
            torch.manual_seed(3)
            found.append(results(layer, x))
        assert calls == ["peft"] * 2, name
        assert all(torch.equal(t, found[1][key]) for key, t in found[0].items()), name
        calls.clear()
    layer = adapted(lora_dropout=0.5).eval()
    apply_one_function(layer)
    layer(torch.ones(3, INPUTS))
    assert not calls  # drops nothing in evaluation


def test_recomputed_models_use_it_and_selective_repeats_no_product(saved, calls: list[str]):
    """Also over a base in 4 bits, whose own products are not torch's to keep."""
    source, base, _ = opened(saved("llama"))
    ids = torch.arange(20).reshape(2, 10)
    for quantize in (None, "nf4"):
        model = build_on_meta(source.hf_config, "sdpa")
        apply_lora(model, LoraConfig(target_modules="all-linear", quantize=quantize))
        model = fill(LoraWeights(base, model, 5), model).train()
        found: dict[str, list[Any]] = {}
        for mode in ("none", "full", "selective"):
            prepare_blocks(model.model.layers, ActivationConfig(mode=mode))
            for counter in (nullcontext(), FlopCounterMode(display=False)):
                model.zero_grad()
                with counter:
                    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
                found.setdefault(mode, []).extend(p.grad for p in model.parameters() if p.grad is not None)
            found[mode].append(torch.tensor(counter.get_total_flops()))
        assert all(map(torch.equal, found["none"][:-1], found["full"][:-1]))
        assert all(map(torch.equal, found["none"], found["selective"])) or quantize
        assert found["full"][-1] > found["none"][-1]
    assert not calls
