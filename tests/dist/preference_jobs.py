"""Runs on pairs of completions, and what they are held against: a plain loop with all logits."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from lit_fsdp import CausalLMDataModule, Checkpoint, IsolationProof, PreferenceModule
from lit_fsdp.metrics.step_metrics import step_counts
from tests.dist.jobs import Losses, fit

BETA, GLOBAL_BATCH, LEARNING_RATE = 0.3, 4, 1e-3
OPTIM = {"lr": LEARNING_RATE, "schedule": "constant", "beta2": 0.999}


def pair_rows(count: int = 12) -> list[dict[str, Any]]:
    """Sums, the right one chosen, of different lengths."""
    return [
        {"prompt": f"{i} + {i * i} =", "chosen": f" {i + i * i}.", "rejected": f" {i * 7 % 10}{'?' * (i % 4)}"}
        for i in range(count)
    ]


class Logged(Losses):
    """Collects what every optimizer step has logged of its pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Trainer, *rest: Any) -> None:
        super().on_train_batch_end(trainer, *rest)
        if len(self.values) > len(self.steps):
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
    seed: int = 3,
) -> dict[str, Any]:
    """Train in file order; what each step logged, the state at the end, and the references in the cache."""
    place, logged = Path(run).parent, Logged()
    place.mkdir(exist_ok=True)
    os.environ["LIT_FSDP_CACHE"] = str(place / "proofs")
    (place / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pair_rows()))
    module = PreferenceModule(**{"name": folder, "optim": OPTIM, "preference": {"beta": BETA}, **(model or {})})
    options = {"train": str(place / "pairs.jsonl"), "cache_dir": str(place / "cache"), "shuffle": False}
    options |= {"global_batch_size": GLOBAL_BATCH, "micro_batch_size": micro, "max_seq_length": 60, **(data or {})}
    _, found = fit(
        module,
        {"precision": "fp32", **strategy},
        [logged, IsolationProof(), Checkpoint(every_steps=2, keep_last=-1)],
        CausalLMDataModule(**options),
        ckpt_path,
        steps,
        seed=seed,
        default_root_dir=run,
    )
    cached = (place / "cache").glob("reference/**/*.npy")
    references = {str(path): path.stat().st_mtime_ns for path in cached}  # and when each was written
    counts = step_counts(module.step_totals.tolist())
    rows = {"rows": module.pair_rows, "tokens": counts["tokens"], "slots": counts["slots"]}
    return {"steps": logged.steps, "digest": found["digest"], "references": references, **rows}


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
