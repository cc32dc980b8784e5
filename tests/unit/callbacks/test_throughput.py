"""Rates by a clock that is only turned by hand; FLOP/s and their share of a peak that is known, words where not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from lit_fsdp.callbacks import throughput
from lit_fsdp.callbacks.throughput import Throughput
from lit_fsdp.config.strategy import ActivationConfig
from lit_fsdp.metrics.flops import flop_formula
from lit_fsdp.parallel.activation import prepare_blocks


class Run:
    """A trainer whose steps take as long as they are told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(throughput.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(throughput, "peak_device_bytes", lambda device: 3 * 2**29)
        monkeypatch.setattr(throughput, "peak_reserved_bytes", lambda device: None)
        self.logged: list[dict[str, float]] = []
        strategy = SimpleNamespace(root_device=torch.device("cpu"))
        plan = {
            "global_step": 0,
            "log_every_n_steps": 1,
            "is_global_zero": True,
            "max_steps": -1,
            "max_epochs": None,
            "estimated_stepping_batches": -1,
        }
        self.trainer: Any = SimpleNamespace(strategy=strategy, **plan)
        self.module: Any = SimpleNamespace(log_dict=self.logged.append)
        self.callback = Throughput()
        self.callback.on_train_start(self.trainer, self.module)

    def step(self, seconds: float, tokens: int = 0, wait: float = 0.0) -> None:
        """One optimizer step: supervised a quarter of the tokens, samples a tenth, a fifth of the places empty."""
        self.now += wait
        self.callback.on_train_batch_start(self.trainer, self.module, None, 0)
        self.now += seconds
        self.trainer.global_step += 1
        self.module.step_totals = torch.tensor([tokens / 4, 1.0, tokens, tokens / 10, tokens * 1.25, tokens**2, 0, 0])
        self.callback.on_train_batch_end(self.trainer, self.module, None, None, 0)


def test_the_first_step_does_not_count_and_waiting_for_data_does(monkeypatch: pytest.MonkeyPatch):
    run = Run(monkeypatch)
    run.step(seconds=50, tokens=1000)
    assert run.logged == []
    run.step(seconds=3, wait=1, tokens=800)
    rates = {"tokens_per_second": 200.0, "supervised_tokens_per_second": 50.0, "samples_per_second": 20.0}
    shares = {"padding_share": pytest.approx(0.2), "data_wait_share": 0.25}
    assert run.logged == [{**rates, **shares, "step_seconds": 4.0, "peak_memory_gib": 1.5}]


def test_the_last_step_has_its_own_rates(monkeypatch: pytest.MonkeyPatch):
    run = Run(monkeypatch)
    run.trainer.log_every_n_steps, run.trainer.max_steps = 3, 4
    for seconds in (50, 1, 1, 2):
        run.step(seconds=seconds, tokens=100)
    assert [found["tokens_per_second"] for found in run.logged] == [100.0, 50.0]


def test_validation_and_saving_do_not_count(monkeypatch: pytest.MonkeyPatch):
    for pause in (
        lambda run: run.callback.on_validation_start(run.trainer, run.module),
        lambda run: run.callback.on_save_checkpoint(run.trainer, run.module, {}),
    ):
        run = Run(monkeypatch)
        run.step(seconds=1, tokens=1)
        run.step(seconds=2, tokens=100)
        pause(run)
        run.now += 1000
        run.step(seconds=2, tokens=100)
        run.callback.on_train_batch_start(run.trainer, run.module, None, 0)  # also between two micro-batches of a step
        run.now += 1
        run.callback.on_train_batch_end(run.trainer, run.module, None, None, 0)
        pause(run)
        run.now += 1000
        run.step(seconds=1, tokens=100)
        assert [found["tokens_per_second"] for found in run.logged] == [50.0, 50.0, 50.0]


COUNTS = {"tokens": 100.0, "supervised_tokens": 60.0, "squared_tokens": 1000.0}


class Module(nn.Module):
    step_totals = None

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
        with torch.device("meta"):
            self.model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=64)).train()

    def build(self) -> Module:
        return self


def meter(module: Any, device: str, name: str, precision: str = "bf16-mixed") -> tuple[Throughput, str]:
    made, strategy = Throughput(), SimpleNamespace(root_device=torch.device(device))
    trainer: Any = SimpleNamespace(strategy=strategy, world_size=2, precision=precision)
    made.setup(trainer, module, "fit")
    with mock.patch.object(torch.cuda, "get_device_name", return_value=name):
        return made, made.read_device(trainer, module)


def test_shares_of_the_peak_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Module()
    formula = flop_formula(module.model)
    found, said = meter(module, "cuda", "NVIDIA H200")
    assert said == ""
    rates = found.rates(COUNTS, 0.5)
    assert rates["model_tflops_per_rank"] == pytest.approx(formula.train_flops(COUNTS) / 0.5 / 2 / 1e12)
    assert rates["mfu"] == rates["hfu"] == pytest.approx(rates["model_tflops_per_rank"] / 989.4)

    for setting, peak in (("highest", 66.9), ("high", 494.7)):  # of fp32, and of tf32 where torch may take it
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda setting=setting: setting)
        found, _ = meter(module, "cuda", "NVIDIA H200", "32-true")
        assert found.rates(COUNTS, 0.5)["mfu"] == pytest.approx(rates["model_tflops_per_rank"] / peak)

    prepare_blocks(module.model.model.layers, ActivationConfig(mode="full"))
    found, _ = meter(module, "cuda", "NVIDIA H200")
    recomputing = found.rates(COUNTS, 0.5)
    assert recomputing["mfu"] == rates["mfu"]
    words = dict.fromkeys(formula.blocks, "full")
    again = formula.recomputed_flops(COUNTS, words)
    assert again
    assert recomputing["hfu"] / rates["hfu"] == pytest.approx(1 + again / formula.train_flops(COUNTS))


def test_no_made_up_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a peak that is unknown, of what the compiler chooses to recompute, of somebody else's module."""
    for device, name, shown in (("cpu", "", "CPU"), ("cuda", "Some GPU", "Some GPU")):
        found, said = meter(Module(), device, name)
        assert said == f"MFU (share of the peak rate) is not logged: the bf16 rate of {shown} is unknown"
        assert list(found.rates(COUNTS, 1.0)) == ["model_tflops_per_rank"]
    found, said = meter(nn.Linear(2, 2), "cuda", "NVIDIA H200")
    assert said == "MFU is not logged, as FLOPs are not counted: the module contains no transformers model"
    assert found.rates(COUNTS, 1.0) == {}
    monkeypatch.setattr(throughput, "recomputes", lambda block: "budget 0.5")
    found, said = meter(Module(), "cuda", "NVIDIA H200")
    assert said == ""
    rates = found.rates(COUNTS, 1.0)
    assert ("mfu" in rates, "hfu" in rates) == (True, False)
