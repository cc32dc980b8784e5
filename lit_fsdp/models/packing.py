"""Packed batches: model inputs for each attention backend, and a check that samples do not see each other.

Eager, SDPA and FlexAttention of transformers infer from ``position_ids`` where samples start, without an attention
mask. FlashAttention and SDPA sample by sample get all packs as one row with the boundaries of the sequences. Pairs of
completions use such a row too: see :func:`pairs_in_one_row`.

Shapes: B packs, T tokens of each, N samples of all packs, L tokens of each, D hidden size.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from lit_fsdp.models.attention import BY_SAMPLE
from lit_fsdp.models.context import mixes_by_attention
from lit_fsdp.models.loss import IGNORED, NUM_TARGETS, ONE_ROW, next_targets, owner_of_head

# batch keys that a model or its loss may get
INPUTS = ("input_ids", "attention_mask", "labels", "position_ids", NUM_TARGETS)
BY_LONGEST = {"longrope", "dynamic"}
"""Rotary encodings whose frequencies depend on the longest sample of a batch."""
_BY_BORDERS = ("flash_attention", BY_SAMPLE)


def model_inputs(batch: Mapping[str, Any], attn_implementation: str) -> dict[str, Any]:
    """Select the model inputs of a batch: its :data:`INPUTS`.

    For packs with FlashAttention they have shape (1, B * T) and come with ``cu_seq_lens_q`` and ``cu_seq_lens_k`` int32
    (N + 1,), and ``max_length_q`` and ``max_length_k`` as ints; with SDPA sample by sample also with
    ``sample_lengths``, N ints. With SDPA the mask of right-padded rows, as our batches are, is renamed ``padding``:
    no token attends to later ones, so attention needs no mask.

    For pairs in one row the model gets the item :data:`~lit_fsdp.models.loss.ONE_ROW` instead of the padded rows.
    """
    inputs = {name: value for name, value in batch.items() if name in INPUTS}
    if "counts" in batch and "attention_mask" in inputs and attn_implementation.startswith("sdpa"):
        inputs["padding"] = inputs.pop("attention_mask")
    if ONE_ROW in batch:
        row = batch[ONE_ROW]
        known = {name: row[name] for name in ("taken", "num_tokens") if name in row}
        inputs[ONE_ROW] = {**known, **model_inputs(row, attn_implementation)}
    if "cu_seq_lens" not in batch or not attn_implementation.startswith(_BY_BORDERS):
        return inputs
    borders, longest = batch["cu_seq_lens"], int(batch["longest"])
    flat = {name: value.reshape(1, -1) if torch.is_tensor(value) else value for name, value in inputs.items()}
    lengths: dict[str, Any] = {"max_length_q": longest, "max_length_k": longest}
    if attn_implementation == BY_SAMPLE:
        lengths["sample_lengths"] = batch.get("sample_lengths") or tuple(borders.diff().tolist())
    lengths |= {name: batch[name] for name in ("shared_lengths", "context") if name in batch}
    return {**flat, "cu_seq_lens_q": borders, "cu_seq_lens_k": batch.get("cu_seq_lens_k", borders), **lengths}


def real_tokens(batch: Mapping[str, Any]) -> torch.Tensor | None:
    """Whether each token that the model gets from a batch belongs to a sample, bool (N,); None if it is unknown."""
    if "attention_mask" in batch:
        is_real_N = batch["attention_mask"].bool().flatten()
    elif "num_filled" in batch:  # packs
        num_filled_B, positions_T = batch["num_filled"], torch.arange(batch["input_ids"].shape[1])
        is_real_N = (positions_T.to(num_filled_B.device) < num_filled_B[:, None]).flatten()
    else:
        return None
    if ONE_ROW not in batch:
        return is_real_N
    taken_N = batch[ONE_ROW]["taken"]
    return is_real_N[taken_N] & (taken_N >= 0)  # -1: the padding of a context group's row


def rows_of_pairs(model: Any, attn_implementation: str) -> tuple[str, ...]:
    """List possible layouts of pairs for ``model``, best first: ``shared`` | ``whole``, in one row, and ``padded``.

    A prompt is shared only if, according to the configuration, only attention mixes tokens, nothing (such as dropout)
    differs between two copies of a prompt, and no router loss depends on the number of copies.
    """
    if not attn_implementation.startswith(_BY_BORDERS):
        return ("padded",)
    config: dict[str, Any] = model.config.get_text_config().to_dict()
    drops = any("att" in name and "drop" in name and value for name, value in config.items())
    fits = attn_implementation == BY_SAMPLE and mixes_by_attention(model)
    return ("shared",) * (fits and not drops and not config.get("output_router_logits")) + ("whole", "padded")


def one_row(batch: Mapping[str, Any], begins_B: torch.Tensor | None = None) -> dict[str, Any]:
    """Join all samples of a batch in one row, as :data:`~lit_fsdp.models.loss.ONE_ROW`; best called on the host.

    From a padded batch it takes the tokens of each row from position ``begins_B`` on, by default all.
    """
    ids_BT = batch["input_ids"]
    if "cu_seq_lens" in batch:
        lengths = batch.get("sample_lengths") or tuple(batch["cu_seq_lens"].diff().tolist())
        row = {name: batch[name].reshape(1, -1) for name in ("input_ids", "position_ids")}
        row |= {name: batch[name] for name in ("cu_seq_lens", "longest")}
        return {**row, "taken": torch.arange(ids_BT.numel(), device=ids_BT.device), "sample_lengths": lengths}
    mask_BT = batch.get("attention_mask", torch.ones_like(ids_BT)).bool()
    ends_B = mask_BT.sum(dim=1)
    begins_B = torch.zeros_like(ends_B) if begins_B is None else begins_B
    positions_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
    taken_N = (mask_BT & (positions_T >= begins_B[:, None])).flatten().nonzero().squeeze(1)
    sizes_B, longest = ends_B - begins_B, int(ends_B.max())
    return {
        "taken": taken_N,
        "input_ids": ids_BT.flatten()[taken_N].unsqueeze(0),
        "position_ids": (taken_N % ids_BT.shape[1]).unsqueeze(0),
        "cu_seq_lens": F.pad(sizes_B.cumsum(0), (1, 0)).int(),
        "longest": 1 << (longest - 1).bit_length(),
        "sample_lengths": tuple(sizes_B.tolist()),
    }


def pairs_in_one_row(batch: Mapping[str, Any], shares: bool) -> dict[str, Any]:
    """Join all samples of a padded batch of pairs, on the host, as :data:`~lit_fsdp.models.loss.ONE_ROW`.

    The chosen samples come first, then the rejected ones. With ``shares`` a rejected sample omits the leading tokens
    that it has in common with its chosen sample and that precede any target, and continues from them; their numbers are
    ``shared_lengths``. The ``counts`` then describe the tokens that are computed.
    """
    ids_BT, mask_BT = batch["input_ids"], batch["attention_mask"].bool()
    num_pairs, ends_B = len(ids_BT) // 2, mask_BT.sum(dim=1)
    begins_B = torch.zeros_like(ends_B)
    if shares:
        is_target_BT = next_targets(batch) != IGNORED
        is_own_PT = (ids_BT[:num_pairs] != ids_BT[num_pairs:]) | is_target_BT.view(2, num_pairs, -1).any(dim=0)
        shared_P = (is_own_PT.cumsum(dim=1) == 0).sum(dim=1)
        begins_B[num_pairs:] = shared_P.minimum(ends_B.view(2, -1).amin(dim=0) - 1)
    row = one_row(batch, begins_B)
    if begins_B.any():
        borders_k = F.pad(ends_B.cumsum(0), (1, 0)).int()
        row |= {"cu_seq_lens_k": borders_k, "shared_lengths": tuple(begins_B[num_pairs:].tolist())}
    tokens, samples, _, squared_tokens = batch["counts"]
    num_taken = torch.tensor(len(row["taken"]), device=ids_BT.device)
    counts = torch.stack([tokens - begins_B.sum(), samples, num_taken, squared_tokens - begins_B.square().sum()])
    return {**batch, "counts": counts, ONE_ROW: row}


def last_hidden_states(model: nn.Module, batch: Mapping[str, Any], attn_implementation: str) -> torch.Tensor:
    """Call the model as a whole and return the inputs of its head, (B, T, D), without a graph."""
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


_NUM_SAMPLES, _LENGTH = 4, 16  # of the proof: the minimum that covers every neighbor relation
_SHARED = 7  # tokens of the shared prompts in the proof


@dataclass(frozen=True)
class Isolation:
    """Influence of the samples of a pack on each other: largest ‖Δ‖ / ‖h‖ of a sample's last hidden states."""

    change: float
    """When its neighbors got other tokens; 0 if all are bit-equal."""
    moved: float
    """When it swapped positions with its neighbor, or is a row without packing."""
    exchanged: float
    """When two other samples swapped places: experts still get the same tokens, which thus round alike."""
    is_blind: bool
    """Whether a sample with other tokens had the same states, so that the check could not detect anything."""


def proof_batch(ids_NL: torch.Tensor) -> dict[str, Any]:
    """Samples of equal length as packs of two, or a single sample."""
    n, length = ids_NL.shape
    positions_L = torch.arange(length, device=ids_NL.device)
    return {
        "input_ids": ids_NL.reshape(-(-n // 2), -1),
        "position_ids": positions_L.repeat(n).view(-(-n // 2), -1),
        "cu_seq_lens": torch.arange(0, (n + 1) * length, length, dtype=torch.int32, device=ids_NL.device),
        "longest": length,
        "sample_lengths": (length,) * n,
    }


def _sharing_batch(ids_NL: torch.Tensor) -> dict[str, Any]:
    """Two chosen and two rejected samples in one row with shared prompts."""
    labels_NL = ids_NL.clone()
    labels_NL[:, : _SHARED + 1] = IGNORED
    padded = {"input_ids": ids_NL, "labels": labels_NL, "attention_mask": torch.ones_like(ids_NL)}
    row: dict[str, Any] = pairs_in_one_row({**padded, "counts": torch.zeros(4, dtype=torch.int64)}, True)[ONE_ROW]
    return row


def tokens_of_one_scale(model: torch.nn.Module) -> float:
    """Longest row in which no layer scales queries by their position in the row instead of in their sample.

    Llama 4 does so in layers without rotary embeddings, from its ``floor_scale`` on (transformers 5.24).
    """
    scaled = (m for m in model.modules() if getattr(m, "attn_temperature_tuning", False) and hasattr(m, "floor_scale"))
    return min((float(m.floor_scale) for m in scaled if not getattr(m, "use_rope", True)), default=math.inf)  # type: ignore[arg-type]


def tokens_of_one_frequency(model: torch.nn.Module) -> float:
    """Longest sample up to which rotary frequencies do not depend on the longest sample of the batch.

    With the types ``longrope`` and ``dynamic`` they do beyond the original length (transformers 5.24).
    """
    found = [math.inf]
    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", None)
        for layers, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
            if kind in BY_LONGEST:
                rope: Any = getattr(getattr(module, "config", None), "rope_parameters", {})
                original = (rope if layers is None else rope[layers]).get("original_max_position_embeddings")
                known: Any = getattr(module, "original_max_seq_len", math.inf)  # all that dynamic knows
                found.append(float(original if original and kind == "longrope" else known))
    return min(found)


def measure_isolation(
    states: Callable[[Mapping[str, Any]], torch.Tensor], ids: torch.Tensor, shares: bool = False
) -> Isolation:
    """Measure how a sample changes when its neighbors change, in six forward passes of 64 tokens each.

    First every second sample gets other tokens, then the remaining ones, so that each neighbor changes once. The
    function ``states`` computes last hidden states (B, T, D) of a packed batch; the ``ids``, of any shape, are training
    tokens.

    With ``shares`` the samples are two pairs with shared prompts, and one side of each pair gets another completion.
    The swapped samples are then not shared, so that ``moved`` also measures the effect of sharing.
    """
    num_ids = _NUM_SAMPLES * _LENGTH
    ids_NL = ids.flatten().repeat(-(-num_ids // ids.numel()))[:num_ids].reshape(_NUM_SAMPLES, _LENGTH)
    # not the next id: adjacent ids may be newly added tokens, whose embeddings are all equal
    known = ids_NL.unique()
    shifted = (torch.searchsorted(known, ids_NL) + len(known) // 2) % len(known)
    other_NL = known[shifted] if len(known) > 1 else torch.where(ids_NL > 0, ids_NL - 1, ids_NL + 1)
    is_first_N = torch.arange(_NUM_SAMPLES, device=ids.device) % 2 == 0
    if shares:
        ids_NL = torch.cat([ids_NL[:2], torch.cat([ids_NL[:2, :_SHARED], ids_NL[2:, _SHARED:]], dim=1)])
        other_NL = torch.cat([ids_NL[:, :_SHARED], other_NL[:, _SHARED:]], dim=1)
        is_first_N = is_first_N[[0, 1, 3, 2]]

    def run(ids_NL: torch.Tensor, shares: bool = shares) -> torch.Tensor:
        if not shares:
            return states(proof_batch(ids_NL)).reshape(_NUM_SAMPLES, -1).double()
        found_ND = states(_sharing_batch(ids_NL))[0].double()
        chosen, own = found_ND[: 2 * _LENGTH].unflatten(0, (2, -1)), found_ND[2 * _LENGTH :].unflatten(0, (2, -1))
        return torch.cat([chosen, torch.cat([chosen[:, :_SHARED], own], dim=1)]).flatten(1)

    before_ND = run(ids_NL)

    def difference(after_ND: torch.Tensor) -> torch.Tensor:
        size_N = before_ND.norm(dim=1).clamp(min=1e-300)
        return ((after_ND - before_ND).norm(dim=1) / size_N).nan_to_num(nan=float("inf"))

    change, is_blind = 0.0, False
    for is_kept_N in (is_first_N, ~is_first_N):
        found_N = difference(run(torch.where(is_kept_N[:, None], ids_NL, other_NL)))
        change = max(change, float(found_N[is_kept_N].max()))
        is_blind |= bool((found_N[~is_kept_N] == 0).any())
    swapped = [1, 0, 3, 2]
    moved_N = difference(run(ids_NL[swapped], False)[swapped])
    # of a pack, the second sample; of a row of all samples, also the one between those that swap
    exchanged_N = torch.zeros(1) if shares else difference(run(ids_NL[[2, 1, 0, 3]]))[[1, 3]]
    # without position_ids the model counts positions itself; those of RoBERTa and its kin do not start at 0
    row_N = difference(states({"input_ids": ids_NL, "attention_mask": torch.ones_like(ids_NL)}).flatten(1).double())
    return Isolation(change, float(torch.maximum(moved_N, row_N).max()), float(exchanged_N.max()), is_blind)
