"""Engines, shardings and numbers of ranks train alike: as a loop in plain PyTorch does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.pages import Page
from tests.spec.running import FACTORY, checkpoint, fit, logged, run

WAYS = {  # ranks, flags
    "fsdp1": (2, (f"{FACTORY}.engine", "fsdp1")),
    "two ranks share rows": (2, (f"{FACTORY}.context_parallel", "2")),
    "one process": (1, (f"{FACTORY}.engine", "single", "--trainer.devices", "1")),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_same_losses(way: str, reference: Path, tmp_path: Path) -> None:
    ranks, flags = WAYS[way]
    fit(tmp_path / "run", *flags, ranks=ranks)
    for name in ("train_loss", "grad_norm"):
        ours, wanted = ([float(value) for value in logged(run, name).values()] for run in (tmp_path / "run", reference))
        assert ours == pytest.approx(wanted, rel=1e-5)


def test_a_plain_loop(reference: Path, tmp_path: Path) -> None:
    """On rows of text in the order of the file, from a model folder, in one process and without a line of ours."""
    texts = [f"{number} " + "round and round " * (1 + number % 3) for number in range(12)]
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    run("export", "--ckpt", checkpoint(reference, 2), "--out", "model")
    words = ("--model.miniature", "false", "--model.name", "model", "--trainer.max_steps", "3")
    data = ("--data.train", "texts.jsonl", "--data.shuffle", "false", "--trainer.limit_val_batches", "0")
    fit(tmp_path / "run", *words, *data)

    model: Any = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32).train()
    tokenizer = AutoTokenizer.from_pretrained("model")
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.0}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    losses, norms = [], []
    for first in range(0, 12, 4):
        rows = [tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] for text in texts[first : first + 4]]
        outs = [model(torch.tensor([row])).logits[0, :-1] for row in rows]
        sums = [
            torch.nn.functional.cross_entropy(o, torch.tensor(r[1:]), reduction="sum")
            for o, r in zip(outs, rows, strict=True)
        ]
        loss = torch.stack(sums).sum() / sum(len(row) - 1 for row in rows)
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        losses.append(loss.item())
    for name, values in (("train_loss", losses), ("grad_norm", norms)):
        assert [float(value) for value in logged(tmp_path / "run", name).values()] == pytest.approx(values, rel=1e-5)
    audit = json.loads((tmp_path / "run/audit.json").read_text())
    page = Page((tmp_path / "run/report.html").read_text())
    peaks = [audit["predicted_peak_bytes"], *sorted(audit["measured_peak_bytes_per_rank"], reverse=True)]
    shown = [words for _, words in page.tables["Memory, planned and measured"][:3]]
    assert shown == [f"{peak / 2**20:.1f} MiB" for peak in peaks]
