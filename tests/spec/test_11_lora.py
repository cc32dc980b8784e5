"""Adapters start from the base model's loss, train alone, and are exported for peft or merged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.spec.running import checkpoint, fit, logged, run

LORA = ("--model.lora.r", "4", "--model.miniature", "false", "--model.name", "base", "--trainer.limit_val_batches", "0")


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft 0.21 on transformers 5.23
def test_from_the_base_to_a_merged_model(reference: Path, tmp_path: Path) -> None:
    run("export", "--ckpt", checkpoint(reference, 2), "--out", "base")
    fit(tmp_path / "full", *LORA[2:], "--trainer.max_steps", "1")
    fit(tmp_path / "lora", *LORA)
    first = [float(logged(tmp_path / name)[1]) for name in ("full", "lora")]
    assert first[0] == pytest.approx(first[1], rel=1e-6)  # as B is zero
    audit = json.loads((tmp_path / "lora" / "audit.json").read_text())
    assert 0 < audit["num_trainable"] < audit["num_params"] / 5

    last = checkpoint(tmp_path / "lora", 6)
    run("export", "--ckpt", last, "--out", "adapter", "--adapter")
    run("export", "--ckpt", last, "--out", "merged", "--merge")
    ids = torch.arange(3, 43).reshape(2, 20)
    base: Any = AutoModelForCausalLM.from_pretrained("base", dtype=torch.float32)
    before = base(ids).logits
    adapted = PeftModel.from_pretrained(base, "adapter").eval()(ids).logits
    merged: Any = AutoModelForCausalLM.from_pretrained("merged", dtype=torch.float32)
    assert torch.allclose(merged(ids).logits, adapted, atol=1e-5)
    assert not torch.allclose(adapted, before, atol=1e-2)
