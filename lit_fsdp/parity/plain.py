"""What a recipe is measured against: a loop in plain PyTorch, one process, without a line of lit_fsdp.

Every optimizer step takes the rows of one global batch, one after the other and without padding, and the mean of the
cross-entropy over all their supervised tokens.
"""

from __future__ import annotations

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


def train_plain(
    model: Any, batches: Iterable[tuple[float, list[Row]]], adamw: dict[str, Any], clip: dict[str, float | None]
) -> Iterator[tuple[float, float]]:
    """Train step by step; yields the loss and the gradient norm, before clipping, of each.

    Args:
        model: Its forward gives logits.
        batches: The learning rate and the rows of every step.
        adamw: Its ``betas``, ``eps``, and the ``weight_decay`` of matrices.
        clip: By ``norm`` or by ``value``; None: not at all.
    """
    trained = [param for param in model.parameters() if param.requires_grad]
    matrices: dict[str, Any] = {"params": [param for param in trained if param.ndim >= 2]}
    vectors: dict[str, Any] = {"params": [param for param in trained if param.ndim < 2], "weight_decay": 0.0}
    optimizer = torch.optim.AdamW([matrices, vectors], **adamw)
    for rate, rows in batches:
        for group in optimizer.param_groups:
            group["lr"] = rate
        num_tokens = sum(int((labels[1:] != -100).sum()) for _, labels in rows)
        loss = 0.0
        for ids, labels in rows:
            logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
            summed = F.cross_entropy(logits.float(), labels[1:], ignore_index=-100, reduction="sum")
            part = summed / max(1, num_tokens)
            part.backward()
            loss += part.item()
        norm = torch.nn.utils.get_total_norm([param.grad for param in trained if param.grad is not None]).item()
        if limit := clip.get("norm"):
            torch.nn.utils.clip_grad_norm_(trained, limit)
        if limit := clip.get("value"):
            torch.nn.utils.clip_grad_value_(trained, limit)
        optimizer.step()
        optimizer.zero_grad()
        yield loss, norm
