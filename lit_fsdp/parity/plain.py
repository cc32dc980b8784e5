"""What a recipe is measured against: a loop in plain PyTorch, one process, without a line of lit_fsdp.

Every optimizer step takes the rows of one global batch, one after the other and without padding, and the mean of the
cross-entropy over all their supervised tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

Row = tuple[torch.Tensor, torch.Tensor]
"""Token ids and labels of a conversation, int64 (T,); -100 where nothing is supervised."""


def load_plain(folder: str, trained: set[str]) -> Any:
    """The model of a folder as transformers builds it, in fp32, in which only the parameters named are trained."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    for name, param in model.named_parameters():
        param.requires_grad_(name in trained)
    return model


def train_plain(model: Any, batches: Iterable[list[Row]], optim: dict[str, Any]) -> Iterator[tuple[float, float]]:
    """Train step by step; yields the loss and the gradient norm, before clipping, of each.

    Args:
        model: Its forward gives logits.
        batches: The rows of every global batch.
        optim: ``lr``, ``beta1``, ``beta2``, ``eps`` and ``weight_decay`` of AdamW; ``clip`` and ``clip_algorithm``,
            norm or value; ``schedule``, ``warmup_steps``, ``decay_ratio``, ``min_lr_ratio``, and the ``total_steps``
            it is made for.
    """
    trained = [param for param in model.parameters() if param.requires_grad]
    matrices, vectors = [p for p in trained if p.ndim >= 2], [p for p in trained if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": optim["weight_decay"]}, {"params": vectors, "weight_decay": 0.0}]
    betas = optim["beta1"], optim["beta2"]
    optimizer = torch.optim.AdamW(groups, lr=optim["lr"], betas=betas, eps=optim["eps"])
    for step, rows in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = optim["lr"] * lr_share(step, optim)
        num_tokens = sum(int((labels[1:] != -100).sum()) for _, labels in rows)
        loss = 0.0
        for ids, labels in rows:
            logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
            summed = F.cross_entropy(logits.float(), labels[1:], ignore_index=-100, reduction="sum")
            part = summed / max(1, num_tokens)
            part.backward()
            loss += part.item()
        norm = torch.nn.utils.get_total_norm([param.grad for param in trained if param.grad is not None]).item()
        if optim["clip"] and optim["clip_algorithm"] == "value":
            torch.nn.utils.clip_grad_value_(trained, optim["clip"])
        elif optim["clip"]:
            torch.nn.utils.clip_grad_norm_(trained, optim["clip"])
        optimizer.step()
        optimizer.zero_grad()
        yield loss, norm


def lr_share(step: int, optim: dict[str, Any]) -> float:
    """The learning rate of a step (from 0) as a share of its peak, of the schedules that a recipe can name."""
    start, total = optim["warmup_steps"], optim["total_steps"]
    if step < start:
        return float((step + 1) / start)
    if optim["schedule"] == "constant":
        return 1.0
    if optim["schedule"] == "wsd":
        start = max(start, total - max(1, round(optim["decay_ratio"] * total)))
    done = min(1.0, max(0, step - start) / max(1, total - start))
    fall = (1 + math.cos(math.pi * done)) / 2 if optim["schedule"] == "cosine" else 1 - done
    return float(optim["min_lr_ratio"] + (1 - optim["min_lr_ratio"]) * fall)
