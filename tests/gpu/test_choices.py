"""What only an accelerator can show: fp16 and fp8 kernels, offload from a device, NCCL, whole models beside engines."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.conftest import DRY_RUN
from tests.gpu.runs import plain_losses, save_model, train

ENGINES = ("fsdp2", "fsdp1")


@pytest.mark.parametrize("engine", [*ENGINES, "ddp", "single"])
def test_fp16_with_a_loss_scale(tiny_model: Path, accelerator: str, device: str, engine: str) -> None:
    wanted = plain_losses(tiny_model, device, 6)
    found = train(tiny_model, accelerator, {"engine": engine, "precision": "fp16_mixed"}, max_steps=6)
    assert found["realized"]["gradients"] == {"fp32"}
    assert found["losses"] == pytest.approx(wanted, rel=5e-3)


@pytest.mark.parametrize("engine", ENGINES)
def test_fp8_follows_bf16(tmp_path: Path, accelerator: str, device: str, engine: str) -> None:
    if DRY_RUN or torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 needs an NVIDIA Hopper GPU or newer")
    pytest.importorskip("torchao", reason="fp8 needs torchao")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
    folder = save_model(tmp_path / "model", sizes)
    wanted = plain_losses(folder, device, 6)
    found = train(folder, accelerator, {"engine": engine, "precision": "fp8"}, max_steps=6)
    assert found["realized"]["parameters after set-up"] == {"fp32"}
    assert found["losses"] == pytest.approx(wanted, rel=0.1)


@pytest.mark.parametrize("engine", ENGINES)
def test_offload_keeps_the_state_on_the_host(tiny_model: Path, accelerator: str, device: str, engine: str) -> None:
    if DRY_RUN and engine == "fsdp1":
        pytest.skip("FSDP1 offloads from accelerators only")
    wanted = plain_losses(tiny_model, device, 6)
    strategy = {"engine": engine, "precision": "fp32", "cpu_offload": True}
    found = train(tiny_model, accelerator, strategy, max_steps=6, gradient_clip_val=1e9)
    assert found["losses"] == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("engine", [*ENGINES, "ddp", "single"])
def test_one_rank_is_the_plain_module(tiny_model: Path, accelerator: str, device: str, engine: str) -> None:
    wanted = plain_losses(tiny_model, device, 6)
    found = train(tiny_model, accelerator, {"engine": engine, "precision": "fp32"}, max_steps=6)
    assert torch.distributed.get_backend() == ("gloo" if device == "cpu" else "nccl")
    assert found["losses"] == pytest.approx(wanted, rel=1e-4)
