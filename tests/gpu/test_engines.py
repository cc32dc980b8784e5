"""Both engines in every precision mode on one device: dtypes read back, losses against a plain loop and each other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.runs import LongRows, plain_losses, save_model, train

ENGINES = ("fsdp2", "fsdp1")
# relative to a plain fp32 loop; bf16 has 8 bits of mantissa
MODES = {
    "fp32": ("fp32", "fp32", 1e-4),
    "mixed": ("fp32", "bf16", 2e-2),
    "low_precision": ("bf16", "bf16", 5e-2),
}


@pytest.mark.parametrize("mode", MODES)
def test_dtypes_and_losses(tiny_model: Path, accelerator: str, device: str, mode: str) -> None:
    param, compute, tolerance = MODES[mode]
    wanted = plain_losses(tiny_model, device, 6)
    assert wanted[-1] < wanted[0]
    losses = {}
    for engine in ENGINES:
        result = train(tiny_model, accelerator, {"engine": engine, "precision": mode}, max_steps=6)
        assert result["device"] == device
        dtypes = {what: found for what, found in result["realized"].items() if what != "reductions"}
        assert dtypes == {  # one rank need not reduce anything
            "parameters after set-up": {param},
            "gathered parameters in the forward": {compute},
            "activations": {compute},
            "buffers": {"fp32"},
            "parameters after the first step": {param},
            "gradients": {param},
            "optimizer state after the first step": {param},
        }
        assert result["losses"] == pytest.approx(wanted, rel=tolerance)
        losses[engine] = result["losses"]
        torch.distributed.destroy_process_group()
    assert losses["fsdp1"] == pytest.approx(losses["fsdp2"], rel={"fp32": 1e-5}.get(mode, tolerance))


@pytest.mark.parametrize("engine", ENGINES)
def test_clipping_and_accumulation(tiny_model: Path, accelerator: str, engine: str) -> None:
    strategy = {"engine": engine, "precision": "fp32"}
    whole = train(tiny_model, accelerator, strategy, max_steps=4, gradient_clip_val=0.3)
    torch.distributed.destroy_process_group()
    parts = train(tiny_model, accelerator, strategy, max_steps=4, gradient_clip_val=0.3, accumulate_grad_batches=3)
    assert len(whole["losses"]) == 4
    assert parts["losses"] == pytest.approx(whole["losses"], rel=1e-4)


@pytest.mark.parametrize("engine", ENGINES)
def test_recomputed_activations_save_memory_and_change_nothing(
    tmp_path: Path, accelerator: str, device: str, engine: str
) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 8, "max_position_embeddings": 256}
    folder = save_model(tmp_path / "model", sizes)
    results = {}
    for recompute in ("none", "full"):
        strategy = {"engine": engine, "activation_checkpointing": recompute}
        results[recompute] = train(folder, accelerator, strategy, data=LongRows(), max_steps=4)
        torch.distributed.destroy_process_group()
    # the first loss is a forward pass of the same kernels; attention's backward may add in any order on CUDA
    assert results["full"]["losses"][0] == results["none"]["losses"][0]
    assert results["full"]["losses"] == pytest.approx(results["none"]["losses"], rel=1e-3)
    if device == "cuda":
        assert 0 < results["full"]["peak_bytes"] < 0.8 * results["none"]["peak_bytes"]
