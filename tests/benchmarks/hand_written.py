"""The training loop somebody would write by hand, without Lightning and without us.

    python hand_written.py WORKLOAD_FOLDER OUT.json [lora]

One process: fp32 weights, bf16 autocast. Several (by RANK and WORLD_SIZE): ``fully_shard`` per layer and on the root,
bf16 parameters and fp32 reductions. On a CPU without bf16 instructions all of it in fp32. Both: cross-entropy over the
supervised positions, fused AdamW with decay on matrices, gradients clipped to a norm of 1. Rows of their own go through
the model's ordinary forward; packs, told apart by their positions, through torch's chunked head. With ``lora`` peft's
adapters are trained, and the base is in bf16 if the CPU has instructions for it, as ours.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from work import CLIP_NORM, LORA, OPTIM

from lit_fsdp.host import cpu_has_bf16

COMPUTE = torch.bfloat16 if cpu_has_bf16() else torch.float32
RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def main(folder: Path, out: Path, *adapters: str) -> None:
    """Train on the rank's batches and write the time and loss of every step."""
    batches = torch.load(folder / f"batches-{RANK}-of-{RANKS}.pt", weights_only=True)
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).train()
    if adapters:
        from peft import LoraConfig, get_peft_model

        settings = LoraConfig(r=LORA["r"], lora_alpha=LORA["alpha"], target_modules=LORA["target_modules"])
        model = get_peft_model(model.to(COMPUTE), settings).base_model.model  # adapters in fp32
    if RANKS > 1:
        dist.init_process_group("gloo")
        policy = MixedPrecisionPolicy(param_dtype=COMPUTE, reduce_dtype=torch.float32)
        for part in (*model.model.layers, model):
            fully_shard(part, mp_policy=policy)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": OPTIM["weight_decay"]},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (OPTIM["beta1"], OPTIM["beta2"])
    optimizer = torch.optim.AdamW(groups, lr=OPTIM["lr"], betas=betas, eps=OPTIM["eps"], fused=True)
    recorded: dict[str, list[float]] = {"times": [], "losses": []}
    for batch in batches:
        recorded["losses"].append(step(model, optimizer, batch))
        recorded["times"].append(time.time())
    if RANK == 0:
        out.write_text(json.dumps(recorded))
    if RANKS > 1:
        dist.destroy_process_group()


def step(model: Any, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> float:
    """One optimizer step; the mean loss over the supervised tokens of the global batch."""
    targets = batch["labels"][:, 1:]
    supervised = targets != -100
    is_packed = "position_ids" in batch
    if is_packed:
        supervised &= batch["position_ids"][:, 1:] > 0  # the first token of a sample does not follow from another
    inputs = {name: batch[name] for name in ("input_ids", "position_ids" if is_packed else "attention_mask")}
    with torch.autocast("cpu", torch.bfloat16, enabled=RANKS == 1 and torch.bfloat16 == COMPUTE):
        if is_packed:
            hidden = model.model(**inputs, use_cache=False).last_hidden_state[:, :-1][supervised]
            options = torch.nn.LinearCrossEntropyOptions()
            weight = model.lm_head.weight.to(hidden.dtype)
            loss = F.linear_cross_entropy(hidden, weight, targets[supervised], reduction="sum", options=options)
        else:
            logits = model(**inputs, use_cache=False).logits[:, :-1][supervised].float()
            loss = F.cross_entropy(logits, targets[supervised], reduction="sum")
    totals = torch.stack([loss.detach(), supervised.sum()])
    if RANKS > 1:
        dist.all_reduce(totals)
    (loss * RANKS / totals[1]).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
    optimizer.step()
    optimizer.zero_grad()
    return float(totals[0]) / float(totals[1])


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
