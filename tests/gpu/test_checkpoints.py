"""Saving, resuming bit for bit and exporting on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lit_fsdp.checkpoint.export import export
from tests.gpu.runs import plain_loss, save_model, train


@pytest.mark.parametrize("layout", ["sharded", "full"])
@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1"])
def test_a_resumed_run_is_bit_equal(tmp_path: Path, accelerator: str, engine: str, layout: str) -> None:
    folder = save_model(tmp_path / "model", {"attention_dropout": 0.2})  # so that the device's random state matters
    job: dict[str, Any] = {
        "folder": folder,
        "accelerator": accelerator,
        "strategy": {"engine": engine, "state_dict": layout},
    }
    fixed: dict[str, Any] = {"deterministic": True}  # the backward pass of attention adds in any order otherwise
    whole = train(**job, run=tmp_path / "whole", max_steps=15, **fixed)
    torch.distributed.destroy_process_group()
    cut = train(**job, run=tmp_path / "cut", max_steps=5, **fixed)  # the middle of an epoch of ten
    torch.distributed.destroy_process_group()
    resumed = train(**job, run=tmp_path / "cut", max_steps=15, ckpt_path="last", **fixed)
    assert cut["losses"] == whole["losses"][:5]
    assert resumed["losses"] == whole["losses"][5:]
    assert resumed["digest"] == whole["digest"] != cut["digest"]
    assert resumed["realized"]["parameters after resume"] == {"fp32"}
    assert resumed["realized"]["optimizer state after resume"] == {"fp32"}


@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1"])
def test_an_export_gives_the_loss_of_the_live_model(
    tiny_model: Path, tmp_path: Path, accelerator: str, device: str, engine: str
) -> None:
    result = train(tiny_model, accelerator, {"engine": engine, "precision": "fp32"}, run=tmp_path / "run", max_steps=6)
    report = export(tmp_path / "run/checkpoints/step-00000005", tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(report.folder).to(device).train()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert len(AutoTokenizer.from_pretrained(report.folder)) <= model.config.vocab_size
    with torch.no_grad():
        found = plain_loss(model, 5, device)
    assert float(found) == pytest.approx(result["losses"][5], rel=1e-5)  # the sixth loss, before its update
