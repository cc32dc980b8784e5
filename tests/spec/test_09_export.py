"""An export is the live model: plain transformers computes the losses that the run logged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.spec.running import RECIPE, checkpoint, run


def test_the_logged_validation_loss(reference: Path, tmp_path: Path) -> None:
    rows = [{"text": f"{number} " + "bread and salt " * (number % 4)} for number in range(8)]
    Path("val.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ("--data.val", "val.jsonl", "--trainer.limit_val_batches", "1.0", "--ckpt_path", checkpoint(reference, 6))
    run("validate", *RECIPE, "--trainer.default_root_dir", tmp_path / "run", *words)
    text = (tmp_path / "run" / "validate-metrics.csv").read_text().splitlines()
    logged = dict(zip(text[0].split(","), text[1].split(","), strict=True))

    run("export", "--ckpt", checkpoint(reference, 6), "--out", "model")
    model: Any = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained("model")
    total, count = 0.0, 0
    for row in rows:
        ids = torch.tensor([tokenizer(row["text"])["input_ids"] + [tokenizer.eos_token_id]])
        total += model(ids, labels=ids).loss.item() * (ids.numel() - 1)
        count += ids.numel() - 1
    assert float(logged["val_loss"]) == pytest.approx(total / count, rel=1e-5)
