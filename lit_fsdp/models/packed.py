"""Packed batches as each attention backend wants them, and what a model makes of them before its head.

Eager, SDPA and FlexAttention of transformers see from ``position_ids`` alone, without an attention mask, where samples
begin. FlashAttention gets all packs as one row and the borders between the sequences.

Shapes: B packs, T tokens of each, N sequences of all packs, D hidden size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import nn

INPUTS = ("input_ids", "attention_mask", "labels", "position_ids")
"""What a model, or its loss, may get of a batch."""


def model_inputs(batch: Mapping[str, Any], attn_implementation: str) -> dict[str, Any]:
    """What the model gets of a batch: its tensors, and for packs under FlashAttention one row with its borders.

    Args:
        batch: Padded, or packed by :func:`lit_fsdp.data.collate.collate_packs`.
        attn_implementation: The backend that the model runs with.

    Returns:
        The batch's :data:`INPUTS`. Of packs under FlashAttention, all of shape (1, B * T), beside ``cu_seq_lens_q``
        and ``cu_seq_lens_k`` int32 (N + 1,), ``max_length_q`` and ``max_length_k`` as plain numbers.
    """
    inputs = {name: value for name, value in batch.items() if name in INPUTS}
    if "cu_seq_lens" not in batch or not attn_implementation.startswith("flash_attention"):
        return inputs
    borders, longest = batch["cu_seq_lens"], int(batch["longest"])
    flat = {name: value.reshape(1, -1) for name, value in inputs.items()}
    lengths = {"max_length_q": longest, "max_length_k": longest}
    return {**flat, "cu_seq_lens_q": borders, "cu_seq_lens_k": borders, **lengths}


def recut(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The same tokens with every sequence cut in two, for packs that hold only one."""
    borders = batch["cu_seq_lens"].tolist()
    cut = sorted({*borders, *((a + b) // 2 for a, b in pairwise(borders))})
    places = torch.tensor(cut, dtype=torch.int32, device=batch["cu_seq_lens"].device)
    begins = places[:-1].repeat_interleave(places.diff())
    positions = torch.arange(cut[-1], device=places.device) - begins
    return {**batch, "cu_seq_lens": places, "position_ids": positions.reshape(batch["input_ids"].shape)}


def takes_positions(model: nn.Module) -> bool:
    """Whether the model's forward knows ``position_ids``; one that does not cannot tell packed samples apart."""
    inner = getattr(model, "module", None)  # of FSDP1
    if isinstance(inner, nn.Module):
        return takes_positions(inner)
    return "position_ids" in inspect.signature(type(model).forward).parameters


def last_hidden_states(model: nn.Module, batch: Mapping[str, Any], attn_implementation: str) -> torch.Tensor:
    """What the head of the model would see, (B, T, D), without a graph.

    The model is called as a whole, so that hooks and all-gathers happen; of the head as little as it allows.
    """
    inputs = {name: value for name, value in model_inputs(batch, attn_implementation).items() if name != "labels"}
    seen: list[torch.Tensor] = []
    decoder = _decoder(model)
    forward = inspect.signature(type(_unwrapped(model)).forward).parameters
    few = {"logits_to_keep": 1} if "logits_to_keep" in forward else {}
    handle = None if decoder is None else decoder.register_forward_hook(_keep_first(seen))
    try:
        with torch.no_grad():
            output = model(**inputs, **(few if decoder is not None else {}))
    finally:
        if handle is not None:
            handle.remove()
    found = seen[-1] if seen else output.logits
    return found.detach().reshape(*batch["input_ids"].shape, -1)


def _keep_first(seen: list[torch.Tensor]) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        first = output[0]
        if torch.is_tensor(first) and first.dim() == 3:
            seen.append(first)

    return hook


def _unwrapped(model: nn.Module) -> nn.Module:
    inner = getattr(model, "module", None)
    return _unwrapped(inner) if isinstance(inner, nn.Module) else model


def _decoder(model: nn.Module) -> nn.Module | None:
    inner: Any = _unwrapped(model)
    found = inner.get_decoder() if hasattr(inner, "get_decoder") else None
    if found is inner or not isinstance(found, nn.Module):
        return None
    # modernbert-decoder calls its head "decoder", which get_decoder() looks for first
    return inner.base_model if found is inner.get_output_embeddings() else found
