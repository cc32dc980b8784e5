"""Peak memory of every activation checkpointing mode on a 1B-shaped Llama with random weights, one device.

Bytes go to standard output (``pytest -s``). Rows are long enough that activations outweigh the weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from tests.dist.reference import global_batch
from tests.gpu.conftest import DRY_RUN
from tests.gpu.runs import save_model, train

ENGINES = ("fsdp2", "fsdp1")
ONE_BILLION = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
}
ROWS, LENGTH = (2, 32) if DRY_RUN else (8, 2048)
MODES: dict[str, dict[str, Any]] = {
    "none": {"activation_checkpointing": "none"},
    "every_n": {"activation_checkpointing": {"mode": "every_n", "n": 2}},
    "selective": {"activation_checkpointing": "selective"},
    "full": {"activation_checkpointing": "full"},
    "offload": {"activation_checkpointing": {"offload_activations": True}},
    "full_offload": {"activation_checkpointing": {"mode": "full", "offload_activations": True}},
    "compiled": {"compile": True},
    "budget_0.5": {"compile": True, "activation_checkpointing": {"mode": "memory_budget", "memory_budget": 0.5}},
    "budget_0": {"compile": True, "activation_checkpointing": {"mode": "memory_budget", "memory_budget": 0.0}},
}


class Rows(LightningDataModule):
    """The same few long batches over and over."""

    def train_dataloader(self) -> DataLoader[Any]:
        """Three, one per step."""
        return DataLoader([global_batch(i, rows=ROWS, length=LENGTH) for i in range(3)], batch_size=None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The 1B shape with a small vocabulary, so that logits do not hide the blocks; tiny in a dry run."""
    sizes = {"num_hidden_layers": 4, "max_position_embeddings": 64} if DRY_RUN else ONE_BILLION
    return save_model(tmp_path_factory.mktemp("memory") / "model", sizes)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine", ENGINES)
def test_peak_memory_of_every_mode(folder: Path, accelerator: str, device: str, engine: str) -> None:
    results: dict[str, dict[str, Any]] = {}
    for name, options in MODES.items():
        if DRY_RUN and options.get("compile"):
            continue  # minutes of C++ on a CPU; the compiler has tests of its own
        torch._dynamo.reset()
        results[name] = train(folder, accelerator, {"engine": engine, **options}, data=Rows(), max_steps=3)
        torch.distributed.destroy_process_group()
        if device == "cuda":
            torch.cuda.empty_cache()
        print(f"{engine} {name}: {results[name]['peak_bytes'] / 2**30:.2f} GiB peak")
    kept = results["none"]["losses"]
    for name, result in results.items():
        assert len(result["losses"]) == 3
        # the first loss is a forward pass of the same kernels; compiled ones round bf16 elsewhere
        assert result["losses"][0] == (pytest.approx(kept[0], rel=1e-2) if "compile" in MODES[name] else kept[0])
        assert result["losses"] == pytest.approx(kept, rel=1e-2)
    if device != "cuda":
        return
    peak = {name: result["peak_bytes"] for name, result in results.items()}
    assert 0 < peak["full"] < peak["every_n"] < peak["none"]
    assert peak["full"] < peak["selective"] < peak["none"]
    assert peak["offload"] < peak["none"]
    assert peak["full_offload"] < peak["full"]
    assert peak["budget_0"] < peak["budget_0.5"] < peak["none"]
