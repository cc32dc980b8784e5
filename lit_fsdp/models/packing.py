"""Packed batches: what each attention backend wants of them, and whether their samples see each other.

Eager, SDPA and FlexAttention of transformers see from ``position_ids`` alone, without an attention mask, where samples
begin. FlashAttention gets all packs as one row and the borders between the sequences. The proof puts other tokens in
some sequences and looks at what changes in the rest.

Shapes: B packs, T tokens of each, N sequences of all packs (samples and padding), R rounds, D hidden size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import comb
from typing import Any

import torch
from torch import nn

INPUTS = ("input_ids", "attention_mask", "labels", "position_ids")
"""What a model, or its loss, may get of a batch."""


def model_inputs(batch: Mapping[str, Any], attn_implementation: str) -> dict[str, Any]:
    """What the model gets of a batch: its tensors, and for packs under FlashAttention one row with its borders.

    Args:
        batch: Padded, or packed by :func:`lit_fsdp.data.batches.collate_packs`.
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


def num_rounds(num_sequences: int) -> int:
    """Fewest rounds in which, for every ordered pair of sequences, the first is changed once while the second is not.

    Source: Sperner, Ein Satz über Untermengen einer endlichen Menge, 1928: at most C(R, R // 2) sets of rounds hold
    none of each other.
    """
    rounds = 0
    while comb(rounds, rounds // 2) < num_sequences:
        rounds += 1
    return rounds


def changed_in(num_sequences: int, rounds: int) -> torch.Tensor:
    """Which sequences are changed in which round, bool (R, N); ``rounds`` >= :func:`num_rounds`."""
    changed = torch.zeros(rounds, num_sequences, dtype=torch.bool)
    for sequence, members in zip(range(num_sequences), combinations(range(rounds), rounds // 2), strict=False):
        changed[list(members), sequence] = True
    return changed


def sequence_numbers(positions_BT: torch.Tensor) -> torch.Tensor:
    """The sequence each token belongs to, int64 (B, T), counted over all packs; positions restart with a sequence."""
    begins_BT = torch.ones_like(positions_BT, dtype=torch.bool)
    begins_BT[:, 1:] = positions_BT[:, 1:] != positions_BT[:, :-1] + 1
    return begins_BT.flatten().cumsum(0).reshape(positions_BT.shape) - 1


def other_ids(ids_BT: torch.Tensor) -> torch.Tensor:
    """Another id for every token, of those that the batch holds anyway; (B, T).

    Not the next one: ids that follow each other may be tokens just added, whose embeddings are all the same.
    """
    known = ids_BT.unique()
    if len(known) == 1:
        return torch.where(ids_BT > 0, ids_BT - 1, ids_BT + 1)
    return known[(torch.searchsorted(known, ids_BT) + len(known) // 2) % len(known)]


def moved(positions_BT: torch.Tensor) -> torch.Tensor:
    """For every place the place whose token is put there when the first sequence of a pack goes behind the others.

    int64 (B, T), an index into T; the last sequence, which may be padding, stays where it is if there are three.
    """
    order = torch.arange(positions_BT.shape[1], device=positions_BT.device).repeat(len(positions_BT), 1)
    for b, numbers in enumerate(sequence_numbers(positions_BT)):
        first, last = (numbers == numbers[0]).sum(), (numbers == numbers[-1]).sum()
        end = len(numbers) - (last if numbers[-1] - numbers[0] >= 2 else 0)
        order[b, :end] = order[b, :end].roll(-int(first))
    return order


@dataclass
class Worst:
    """The largest change of what should not have changed, so far."""

    difference: float = 0.0
    """‖Δ‖ / ‖h‖ of the last hidden states of one sequence; exactly 0 if all are bit-equal."""
    sequence: int = -1
    blind: int = -1
    """A sequence that was changed and whose states did not, so that nothing would have been noticed; else -1."""

    def compare(
        self, before_BTD: torch.Tensor, after_BTD: torch.Tensor, numbers_BT: torch.Tensor, changed_N: torch.Tensor
    ) -> None:
        """Note the sequences that differ though they were not changed, and those that were and do not differ."""
        change_N = torch.zeros(len(changed_N), dtype=torch.float64, device=before_BTD.device)
        size_N = change_N.clone()
        for before_TD, after_TD, numbers_T in zip(before_BTD, after_BTD, numbers_BT, strict=True):  # bounds the copies
            before = before_TD.double()
            change_N.index_add_(0, numbers_T, (after_TD.double() - before).square().sum(dim=1))
            size_N.index_add_(0, numbers_T, before.square().sum(dim=1))
        relative_N = (change_N / size_N.clamp(min=1e-300)).sqrt().nan_to_num(nan=float("inf"))
        changed_N = changed_N.to(relative_N.device)
        kept_N = relative_N.masked_fill(changed_N, 0.0)
        if float(kept_N.max()) > self.difference:
            self.difference, self.sequence = float(kept_N.max()), int(kept_N.argmax())
        still_N = changed_N & (relative_N == 0)
        if still_N.any():
            self.blind = int(still_N.nonzero()[0])
