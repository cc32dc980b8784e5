"""Runs on pairs of completions, and what they are held against: a plain loop with all logits."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from lit_fsdp import CausalLMDataModule, Checkpoint, PreferenceModule
from tests.dist.jobs import digest, trainer_for

BETA, GLOBAL_BATCH, LEARNING_RATE = 0.3, 4, 1e-3
OPTIM = {"lr": LEARNING_RATE, "schedule": "constant", "beta2": 0.999}


def pair_rows(count: int = 12) -> list[dict[str, Any]]:
    """Sums, the right one chosen, of different lengths."""
    return [
        {"prompt": f"{i} + {i * i} =", "chosen": f" {i + i * i}.", "rejected": f" {i * 7 % 10}{'?' * (i % 4)}"}
        for i in range(count)
    ]


class Logged(Callback):
    """Collects what every optimizer step has logged of its pairs."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.step = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, *rest: Any) -> None:
        if self.step < trainer.global_step:
            self.step = trainer.global_step
            found = {k.removeprefix("train_"): float(v) for k, v in trainer.callback_metrics.items() if "train_" in k}
            self.steps.append(found)


def train_pairs(
    folder: str,
    run: str,
    strategy: dict[str, Any],
    micro: int = 2,
    steps: int = 10,
    model: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    ckpt_path: str | None = None,
) -> dict[str, Any]:
    """Train in file order; what each step logged, the state at the end, and the references in the cache."""
    torch.manual_seed(3)
    place = Path(run)
    rows = place.parent / "pairs.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in pair_rows()))
    logged = Logged()
    callbacks = [logged, Checkpoint(every_steps=2, keep_last=-1)]
    trainer = trainer_for({"precision": "fp32", **strategy}, callbacks, max_steps=steps, default_root_dir=run)
    module = PreferenceModule(**{"name": folder, "optim": OPTIM, "preference": {"beta": BETA}, **(model or {})})
    options = {"train": str(rows), "cache_dir": str(place.parent / "cache"), "shuffle": False, "max_seq_length": 60}
    options |= {"global_batch_size": GLOBAL_BATCH, "micro_batch_size": micro}
    trainer.fit(module, datamodule=CausalLMDataModule(**{**options, **(data or {})}), ckpt_path=ckpt_path)
    optimizer: Any = trainer.optimizers[0]
    return {
        "steps": logged.steps,
        "digest": digest(module, getattr(optimizer, "_optimizer", optimizer)),
        "references": references(place),
    }


def references(run: Path) -> dict[str, int]:
    """Files of log-probabilities in the cache, and when each was written."""
    found = (run.parent / "cache").glob("reference/**/*.npy")
    return {str(path): path.stat().st_mtime_ns for path in found}


def plain_dpo(folder: str, steps: int = 10) -> list[dict[str, float]]:
    """DPO written out with all logits, in one process in fp32; what each step has."""
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").train()
    reference = copy.deepcopy(policy).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    rows, found = pair_rows(), []

    def logp(model: Any, prompt: str, completion: str) -> torch.Tensor:
        start = len(tokenizer(prompt)["input_ids"])
        ids = torch.tensor([tokenizer(prompt + completion)["input_ids"] + [tokenizer.eos_token_id]])
        log_probs = model(ids).logits[0, :-1].log_softmax(-1)
        return log_probs.gather(1, ids[0, 1:, None])[start - 1 :, 0].sum()

    for step in range(steps):
        batch = [rows[(step * GLOBAL_BATCH + i) % len(rows)] for i in range(GLOBAL_BATCH)]
        losses, chosen, rejected = [], [], []
        for row in batch:
            logps = [logp(policy, row["prompt"], row[side]) for side in ("chosen", "rejected")]
            with torch.no_grad():
                before = [logp(reference, row["prompt"], row[side]) for side in ("chosen", "rejected")]
            ratios = [now - then for now, then in zip(logps, before, strict=True)]
            losses.append(-F.logsigmoid(BETA * (ratios[0] - ratios[1])))
            chosen.append(BETA * float(ratios[0].detach()))
            rejected.append(BETA * float(ratios[1].detach()))
        loss = torch.stack(losses).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        means = {"rewards/chosen": sum(chosen) / GLOBAL_BATCH, "rewards/rejected": sum(rejected) / GLOBAL_BATCH}
        found.append({"loss": float(loss.detach()), **means})
    return found
