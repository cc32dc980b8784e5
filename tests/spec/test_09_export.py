"""An export is the live model: plain transformers computes the losses that the run logged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.spec.running import checkpoint, run, validated


def test_the_logged_validation_loss(reference: Path, tmp_path: Path) -> None:
    rows = [{"text": f"{number} " + "bread and salt " * (number % 4)} for number in range(8)]
    Path("val.jsonl").write_text("\n".join(map(json.dumps, rows)))
    loss = validated(tmp_path / "run", "--data.val", "val.jsonl", "--ckpt_path", checkpoint(reference, 6))

    run("export", "--ckpt", checkpoint(reference, 6), "--out", "model")
    model: Any = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained("model")
    total, count = 0.0, 0
    for row in rows:
        ids = torch.tensor([tokenizer(row["text"])["input_ids"] + [tokenizer.eos_token_id]])
        total += model(ids, labels=ids).loss.item() * (ids.numel() - 1)
        count += ids.numel() - 1
    assert float(loss) == pytest.approx(total / count, rel=1e-5)
