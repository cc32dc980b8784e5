"""Noise on the embeddings of training batches (NEFTune, arXiv:2310.05914)."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lit_fsdp.models.loss import ONE_ROW


@contextmanager
def embedding_noise(model: Any, alpha: float, batch: Mapping[str, Any], rank: int) -> Iterator[None]:
    """Add uniform noise of at most alpha / sqrt(L * D) to each embedded token; L is the length of its sample.

    The noise of each sample, padded or packed, therefore has a norm of at most alpha, independent of other samples.
    Padding gets no noise, nor does eval mode. Each rank draws it from its own generator, seeded by torch's generator,
    whose state checkpoints save.
    """
    batch = batch.get(ONE_ROW, batch)  # what the model gets
    if "cu_seq_lens" in batch:
        lengths_N = batch["cu_seq_lens"].diff()
        lengths_BT = lengths_N.repeat_interleave(lengths_N)
        if "own" in batch:  # this rank's part of a context group's row
            lengths_BT = torch.cat([lengths_BT[start:end] for start, end in batch["own"]])
    else:
        mask_BT = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
        lengths_BT = mask_BT.sum(dim=1, keepdim=True) * mask_BT

    def add(module: nn.Module, args: Any, embedded_BTD: torch.Tensor) -> torch.Tensor:
        if not module.training:  # such as the reference pass of preference training
            return embedded_BTD
        own = torch.Generator(embedded_BTD.device).manual_seed(int(torch.randint(2**62, ())) + rank)
        noise_BTD = torch.empty_like(embedded_BTD).uniform_(-1, 1, generator=own)
        own_BT = lengths_BT.reshape(embedded_BTD.shape[:2])  # FlashAttention gets all packs as one row
        bounds_BT = torch.where(own_BT > 0, alpha / (own_BT * embedded_BTD.shape[-1]).sqrt(), 0)
        return embedded_BTD + noise_BTD * bounds_BT.unsqueeze(-1).to(noise_BTD.dtype)

    handle = model.get_input_embeddings().register_forward_hook(add)
    try:
        yield
    finally:
        handle.remove()
