"""Reference for recipes: a plain PyTorch loop in one process, in fp32, without any code of lit_fsdp.

Every optimizer step processes the rows of one global batch one at a time, without padding. The loss is the mean
cross-entropy over all their supervised tokens.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.nn import functional as F

Row = tuple[torch.Tensor, torch.Tensor]
"""Token ids and labels of a conversation, int64 (T,); -100 for unsupervised tokens."""


def train_plain(
    model: Any, batches: Iterable[tuple[float, list[Row]]], adamw: dict[str, Any], clip: dict[str, float | None]
) -> Iterator[tuple[float, float]]:
    """Train a causal LM; yields the loss and the gradient norm (before clipping) of each step.

    For every step, ``batches`` has the learning rate and the rows. The mapping ``adamw`` has ``betas``, ``eps`` and the
    ``weight_decay`` of matrices. The mapping ``clip`` has a limit by ``norm`` or by ``value``, or None.
    """
    named = {name: param for name, param in model.named_parameters() if param.requires_grad}
    trained, are_vectors = list(named.values()), [p.ndim < 2 or name.endswith("bias") for name, p in named.items()]
    matrices: dict[str, Any] = {"params": [p for p, is_one in zip(trained, are_vectors, strict=True) if not is_one]}
    vectors: dict[str, Any] = {"params": [p for p, is_one in zip(trained, are_vectors, strict=True) if is_one]}
    vectors["weight_decay"] = 0.0
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
