"""Every precision mode against a plain loop, and the memory of every mode of activation checkpointing, on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer
from torch.utils.data import DataLoader

from lit_fsdp.callbacks.throughput import Throughput
from lit_fsdp.metrics.hardware import peak_flops
from tests.dist.reference import global_batch
from tests.gpu.conftest import DRY_RUN
from tests.gpu.first_day import DEVICE, plain_losses, save_model, train

ENGINES = ("fsdp2", "fsdp1")
ONE_BILLION = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
ONE_BILLION |= {"num_key_value_heads": 8, "max_position_embeddings": 4096}


class Batches(LightningDataModule):
    """One global batch per step, large enough for its activations to be most of the memory."""

    def train_dataloader(self) -> DataLoader[Any]:
        batches = [global_batch(step, *((2, 32) if DRY_RUN else (8, 2048))) for step in range(20)]
        return DataLoader(batches, batch_size=None, generator=torch.Generator())  # type: ignore[arg-type]


class Peak(Callback):
    """The largest allocation of the device after the first step, which makes the optimizer state; 0 on a CPU."""

    num_bytes = 0

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if torch.cuda.is_available():
            if trainer.global_step == 1:
                torch.cuda.reset_peak_memory_stats()
            self.num_bytes = torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("engine", ENGINES)
def test_each_precision(tiny_model: Path, engine: str) -> None:
    """Dtypes read back, and losses near a plain fp32 loop; bf16 has 8 bits of mantissa. A known peak gives an MFU."""
    wanted = plain_losses(tiny_model)
    for mode, param, compute, tolerance in (
        ("fp32", "fp32", "fp32", 1e-4),
        ("mixed", "fp32", "bf16", 2e-2),
        ("low_precision", "bf16", "bf16", 5e-2),
        ("fp16_mixed", "fp32", "fp16", 5e-3),
    ):
        found = train(tiny_model, {"engine": engine, "precision": mode}, Throughput())
        for what in ("parameters after the first step", "gradients", "optimizer state after the first step"):
            assert found["realized"][what] == {param}, (mode, what)
        assert found["realized"]["gathered parameters in the forward"] == {compute}
        assert found["losses"] == pytest.approx(wanted, rel=tolerance), mode
        if mode == "mixed":
            known = DEVICE == "cuda" and peak_flops(torch.cuda.get_device_name(), "bf16") is not None
            assert ("mfu" in found["metrics"]) == known
            assert not known or 0 < found["metrics"]["mfu"] < 1


MODES: dict[str, dict[str, Any]] = {
    "none": {"activation_checkpointing": "none"},
    "every_n": {"activation_checkpointing": {"mode": "every_n", "n": 2}},
    "selective": {"activation_checkpointing": "selective"},
    "full": {"activation_checkpointing": "full"},
    "offload": {"activation_checkpointing": {"offload_activations": True}},
    "full, offload": {"activation_checkpointing": {"mode": "full", "offload_activations": True}},
    "selective, offload": {"activation_checkpointing": {"mode": "selective", "offload_activations": True}},
    "budget 0.5": {"compile": True, "activation_checkpointing": {"mode": "memory_budget", "memory_budget": 0.5}},
    "budget 0": {"compile": True, "activation_checkpointing": {"mode": "memory_budget", "memory_budget": 0.0}},
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine", ENGINES)
def test_memory_of_every_activation_checkpointing_mode(tmp_path: Path, engine: str) -> None:
    """On a 1B shape with a small vocabulary, so that logits do not hide the blocks; ``pytest -s`` shows the GiB."""
    folder = save_model(tmp_path / "model", **({} if DRY_RUN else ONE_BILLION))
    results: dict[str, dict[str, Any]] = {}
    peak: dict[str, int] = {}
    for name, options in MODES.items():
        if DRY_RUN and options.get("compile"):
            continue  # minutes of C++ on a CPU; the compiler has tests of its own
        torch._dynamo.reset()
        found = Peak()
        results[name] = train(folder, {"engine": engine, **options}, found, max_steps=3, data=Batches())
        peak[name] = found.num_bytes
        print(f"{engine} {name}: {peak[name] / 2**30:.2f} GiB peak")
    # the backward pass of attention may add in any order on CUDA, and compiled blocks round bf16 elsewhere
    assert all(found["losses"] == pytest.approx(results["none"]["losses"], rel=1e-2) for found in results.values())
    if DEVICE == "cuda":
        assert 0 < peak["full"] < peak["every_n"] < peak["none"]
        assert peak["full"] < peak["selective"] < peak["none"]
        assert peak["offload"] < peak["none"]
        assert peak["full, offload"] < peak["full"]
        assert peak["budget 0"] < peak["budget 0.5"] < peak["none"]
