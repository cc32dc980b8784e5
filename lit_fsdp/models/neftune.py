"""Noise on the embeddings of training batches (NEFTune, arXiv:2310.05914)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class EmbeddingNoise:
    """Adds to each embedded token uniform numbers of at most alpha / sqrt(L * D), L the length of its own sample.

    So the noise of a sample has a norm of at most alpha, whatever stands beside it in a batch or pack; padding gets
    none. It is drawn on each rank from a generator of its own, seeded by torch's, which a checkpoint keeps.
    """

    def __init__(self, model: Any, alpha: float) -> None:
        self._alpha = alpha
        self._lengths_BT: torch.Tensor | None = None
        self._rank = 0
        embedding: nn.Module = model.get_input_embeddings()
        embedding.register_forward_hook(self._add)

    @contextmanager
    def on(self, batch: Mapping[str, Any], rank: int) -> Iterator[None]:
        """Inside, what is embedded is this batch, padded or packed, and gets noise of this rank's own."""
        if "cu_seq_lens" in batch:
            lengths_N = batch["cu_seq_lens"].diff()
            lengths_BT = lengths_N.repeat_interleave(lengths_N).view_as(batch["input_ids"])
        else:
            mask_BT = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
            lengths_BT = mask_BT.sum(dim=1, keepdim=True) * mask_BT
        self._lengths_BT, self._rank = lengths_BT, rank
        try:
            yield
        finally:
            self._lengths_BT = None

    def _add(self, module: nn.Module, args: Any, embedded_BTD: torch.Tensor) -> torch.Tensor:
        if self._lengths_BT is None or not module.training:  # as under the reference of a preference
            return embedded_BTD
        seed = int(torch.randint(2**62, ())) + self._rank
        own = torch.Generator(embedded_BTD.device).manual_seed(seed)
        noise_BTD = torch.empty_like(embedded_BTD).uniform_(-1, 1, generator=own)
        lengths_BT = self._lengths_BT.reshape(embedded_BTD.shape[:2])  # FlashAttention gets all packs as one row
        bounds_BT = torch.where(lengths_BT > 0, self._alpha / (lengths_BT * embedded_BTD.shape[-1]).sqrt(), 0)
        return embedded_BTD + noise_BTD * bounds_BT.unsqueeze(-1).to(noise_BTD.dtype)
