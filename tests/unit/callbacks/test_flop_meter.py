"""FLOP/s and their share of a peak that is known, and words where it is not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from lit_fsdp.callbacks import flop_meter
from lit_fsdp.callbacks.flop_meter import FlopMeter
from lit_fsdp.config.strategy import ActivationConfig
from lit_fsdp.metrics.flops import flop_formula
from lit_fsdp.parallel.activation import prepare_blocks

COUNTS = {"tokens": 100.0, "supervised_tokens": 60.0, "squared_tokens": 1000.0}


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
        with torch.device("meta"):
            self.model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=64)).train()

    def build(self) -> Module:
        return self


def meter(module: Any, device: str, name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[FlopMeter, list[str]]:
    monkeypatch.setattr(flop_meter.torch.cuda, "get_device_name", lambda device: name)
    made = FlopMeter()
    made.read_shapes(module)
    strategy = SimpleNamespace(root_device=torch.device(device))
    return made, made.read_device(SimpleNamespace(strategy=strategy, world_size=2, precision="bf16-mixed"), module)  # type: ignore[arg-type]


def test_shares_of_the_peak_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Module()
    formula = flop_formula(module.model)
    found, said = meter(module, "cuda", "NVIDIA H200", monkeypatch)
    assert said == []
    rates = found.rates(COUNTS, 0.5)
    assert rates["model_tflops_per_rank"] == pytest.approx(formula.train_flops(COUNTS) / 0.5 / 2 / 1e12)
    assert rates["mfu"] == rates["hfu"] == pytest.approx(rates["model_tflops_per_rank"] / 989.4)

    prepare_blocks(module.model.model.layers, ActivationConfig(mode="full"))
    found, _ = meter(module, "cuda", "NVIDIA H200", monkeypatch)
    recomputing = found.rates(COUNTS, 0.5)
    assert recomputing["mfu"] == rates["mfu"]
    words = dict.fromkeys(formula.blocks, "full")
    again = formula.recomputed_flops(COUNTS, words)
    assert again
    assert recomputing["hfu"] / rates["hfu"] == pytest.approx(1 + again / formula.train_flops(COUNTS))


@pytest.mark.parametrize(
    ("device", "name", "text"),
    [
        ("cpu", "", "MFU –: no peak rate is known for bf16 on CPU"),
        ("cuda", "Some GPU", "MFU –: no peak rate is known for bf16 on Some GPU"),
    ],
)
def test_no_share_of_an_unknown_peak(device: str, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, said = meter(Module(), device, name, monkeypatch)
    assert said == [text]
    assert list(found.rates(COUNTS, 1.0)) == ["model_tflops_per_rank"]


def test_no_hfu_where_the_compiler_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Module()
    monkeypatch.setattr(flop_meter, "recomputes", lambda block: "budget 0.5")
    found, said = meter(module, "cuda", "NVIDIA H200", monkeypatch)
    assert said == ["HFU –: what is recomputed is up to the compiler or to chosen ops"]
    assert "mfu" in found.rates(COUNTS, 1.0)
    assert "hfu" not in found.rates(COUNTS, 1.0)


def test_somebody_elses_module(monkeypatch: pytest.MonkeyPatch) -> None:
    found, said = meter(nn.Linear(2, 2), "cuda", "NVIDIA H200", monkeypatch)
    assert said == ["MFU –: FLOPs are not counted: the module holds no transformers model"]
    assert found.rates(COUNTS, 1.0) == {}
