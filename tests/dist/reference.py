"""The training loop everything is measured against: plain PyTorch, one process, no line of ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig

from lit_fsdp.models.tokenizers import miniature_tokenizer

TINY = LlamaConfig(
    hidden_size=48,
    intermediate_size=100,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=512,
    max_position_embeddings=64,
    tie_word_embeddings=True,
    initializer_range=0.08,
)
ROWS = 12  # samples per global batch: divides by 1, 2 and 4 ranks and by 3 accumulation steps
LEARNING_RATE = 3e-3
UNTIED = LlamaConfig(**{**TINY.to_dict(), "tie_word_embeddings": False})


def save_tiny(folder: Path, config: PretrainedConfig, seed: int = 0) -> Path:
    """A model of this configuration with random weights, with a tokenizer, as a folder."""
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    miniature_tokenizer().save_pretrained(folder)
    return folder


def global_batch(step: int, rows: int = ROWS, length: int = 14) -> dict[str, torch.Tensor]:
    """Rows that count upwards from a random start; each supervises another number of tokens, one none at all."""
    generator = torch.Generator().manual_seed(1000 + step)
    ids = (torch.randint(0, 40, (rows, 1), generator=generator) + torch.arange(length)) % 40
    labels = ids.clone()
    for row in range(rows):
        labels[row, : 1 + (row * 5 + step) % length] = -100
    labels[step % rows] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}


def step_loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Loss of a global batch, the mean over its supervised tokens."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)


def reference_losses(folder: str, steps: int = 10) -> list[float]:
    """Loss of each global batch (mean over its supervised tokens) before each AdamW step, in fp32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").train()
    return loop(model, lambda step: step_loss(model, global_batch(step)), steps)


def loop(model: Any, loss_of: Callable[[int], torch.Tensor], steps: int) -> list[float]:
    """Losses of AdamW steps; weight decay spares vectors and biases."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    matrices = [p for name, p in trained.items() if p.ndim >= 2 and not name.endswith("bias")]
    vectors = [p for name, p in trained.items() if p.ndim < 2 or name.endswith("bias")]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95))
    losses = []
    for step in range(steps):
        loss = loss_of(step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses
