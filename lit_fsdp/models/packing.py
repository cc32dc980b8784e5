"""Packed batches: what each attention backend wants of them, and whether their samples see each other.

Eager, SDPA and FlexAttention of transformers see from ``position_ids`` alone, without an attention mask, where samples
begin. FlashAttention, and SDPA sample by sample, get all packs as one row and the borders between the sequences.

Shapes: B packs, T tokens of each, N samples of all packs, L tokens of each, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lit_fsdp.models.attention import BY_SAMPLE
from lit_fsdp.models.loss import NUM_TARGETS, owner_of_head

# what a model, or its loss, may get of a batch
INPUTS = ("input_ids", "attention_mask", "labels", "position_ids", NUM_TARGETS)


def model_inputs(batch: Mapping[str, Any], attn_implementation: str) -> dict[str, Any]:
    """What the model gets of a batch: its :data:`INPUTS`.

    Of packs under FlashAttention, all of shape (1, B * T), beside ``cu_seq_lens_q`` and ``cu_seq_lens_k`` int32
    (N + 1,), ``max_length_q`` and ``max_length_k`` as plain numbers; under SDPA sample by sample ``sample_lengths``,
    N plain numbers, too. Under SDPA the mask of rows that are padded on the right, as ours are, is called ``padding``:
    no token sees what comes after it, so that attention needs none.
    """
    inputs = {name: value for name, value in batch.items() if name in INPUTS}
    if "counts" in batch and "attention_mask" in inputs and attn_implementation.startswith("sdpa"):
        inputs["padding"] = inputs.pop("attention_mask")
    if "cu_seq_lens" not in batch or not attn_implementation.startswith(("flash_attention", BY_SAMPLE)):
        return inputs
    borders, longest = batch["cu_seq_lens"], int(batch["longest"])
    flat = {name: value.reshape(1, -1) if torch.is_tensor(value) else value for name, value in inputs.items()}
    lengths: dict[str, Any] = {"max_length_q": longest, "max_length_k": longest}
    if attn_implementation == BY_SAMPLE:
        lengths["sample_lengths"] = batch.get("sample_lengths") or tuple(borders.diff().tolist())
    return {**flat, "cu_seq_lens_q": borders, "cu_seq_lens_k": borders, **lengths}


def last_hidden_states(model: nn.Module, batch: Mapping[str, Any], attn_implementation: str) -> torch.Tensor:
    """What the head of the model, which is called as a whole, sees, (B, T, D), without a graph."""
    inputs = {
        name: value
        for name, value in model_inputs(batch, attn_implementation).items()
        if name not in ("labels", NUM_TARGETS)
    }
    owner: Any = owner_of_head(model)
    seen: list[torch.Tensor] = []
    handle = owner.get_output_embeddings().register_forward_pre_hook(lambda head, args: seen.append(args[0]))
    try:
        with torch.no_grad():
            model(**inputs)
    finally:
        handle.remove()
    return seen[-1].detach().reshape(*batch["input_ids"].shape, -1)


_NUM_SAMPLES, _LENGTH = 4, 16  # of the proof: as few as show everything that tells samples apart


@dataclass(frozen=True)
class Isolation:
    """What samples of a pack do to each other; ‖Δ‖ / ‖h‖ of the last hidden states of a sample, the largest."""

    change: float
    """While its neighbors got other tokens; 0 if all are bit-equal."""
    moved: float
    """When it changed places with its neighbor."""
    is_blind: bool
    """Whether a sample with other tokens had the same states, so that nothing would have been noticed."""


def proof_batch(ids_NL: torch.Tensor) -> dict[str, Any]:
    """Samples of equal length as packs of two."""
    n, length = ids_NL.shape
    positions_L = torch.arange(length, device=ids_NL.device)
    return {
        "input_ids": ids_NL.reshape(-1, 2 * length),
        "position_ids": positions_L.repeat(n // 2, 2),
        "cu_seq_lens": torch.arange(0, (n + 1) * length, length, dtype=torch.int32, device=ids_NL.device),
        "longest": length,
        "sample_lengths": (length,) * n,
    }


def measure_isolation(states: Callable[[Mapping[str, Any]], torch.Tensor], ids: torch.Tensor) -> Isolation:
    """Look at what changes in a sample when its neighbors do, in four forward passes of 64 tokens each.

    Every second sample gets other tokens, then the others, so that each neighbor on each side is changed once.
    ``states`` gives last hidden states (B, T, D) of a packed batch; ``ids``, of any shape, are some of training.
    """
    num_ids = _NUM_SAMPLES * _LENGTH
    ids_NL = ids.flatten().repeat(-(-num_ids // ids.numel()))[:num_ids].reshape(_NUM_SAMPLES, _LENGTH)
    # not the next id: those that follow each other may be tokens just added, whose embeddings are all the same
    known = ids_NL.unique()
    shifted = (torch.searchsorted(known, ids_NL) + len(known) // 2) % len(known)
    other_NL = known[shifted] if len(known) > 1 else torch.where(ids_NL > 0, ids_NL - 1, ids_NL + 1)

    def run(ids_NL: torch.Tensor) -> torch.Tensor:
        return states(proof_batch(ids_NL)).reshape(_NUM_SAMPLES, -1).double()

    before_ND = run(ids_NL)

    def difference(after_ND: torch.Tensor) -> torch.Tensor:
        size_N = before_ND.norm(dim=1).clamp(min=1e-300)
        return ((after_ND - before_ND).norm(dim=1) / size_N).nan_to_num(nan=float("inf"))

    is_even_N, change, is_blind = torch.arange(_NUM_SAMPLES, device=ids.device) % 2 == 0, 0.0, False
    for is_kept_N in (is_even_N, ~is_even_N):
        found_N = difference(run(torch.where(is_kept_N[:, None], ids_NL, other_NL)))
        change = max(change, float(found_N[is_kept_N].max()))
        is_blind |= bool((found_N[~is_kept_N] == 0).any())
    swapped = [1, 0, 3, 2]
    return Isolation(change, float(difference(run(ids_NL[swapped])[swapped]).max()), is_blind)
