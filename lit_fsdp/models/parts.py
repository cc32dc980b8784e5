"""Split batches over the ranks of a context group, and check which models support it."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from lit_fsdp.config.strategy import ContextConfig
from lit_fsdp.errors import require
from lit_fsdp.models.attention import BY_SAMPLE
from lit_fsdp.models.context import ContextGroup, mixes_by_attention
from lit_fsdp.models.loss import ONE_ROW, balance_of, next_targets, owner_of_head
from lit_fsdp.models.packing import BY_LONGEST, model_inputs, one_row


class RowParts(ContextGroup):
    """A context group that splits batches, which are equal on all its ranks; ``strategy.context``."""

    def cut(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Add this rank's part of the row as :data:`~lit_fsdp.models.loss.ONE_ROW`; best called on the host.

        The row is padded with a sample without targets until it divides evenly. The ``counts`` are those of the batch
        on the first rank and zeros on others, so that sums over ranks count each token once.
        """
        row = one_row(batch)
        num = row["input_ids"].shape[1]
        if more := -num % self.unit:
            device, last = row["input_ids"].device, F.pad(row["cu_seq_lens"], (0, 1), value=num + more)
            positions = torch.arange(more, device=device)[None]
            row["position_ids"] = torch.cat([row["position_ids"], positions], dim=1)
            row["input_ids"] = F.pad(row["input_ids"], (0, more))
            row["taken"] = F.pad(row["taken"], (0, more), value=-1)  # the last position of a row has no target
            row |= {"cu_seq_lens": last, "sample_lengths": (*row["sample_lengths"], more)}
            row["longest"] = max(row["longest"], 1 << (more - 1).bit_length())
        own = self.parts(num + more)[self.rank]
        for name in ("input_ids", "position_ids", "taken"):
            row[name] = torch.cat([row[name][..., start:end] for start, end in own], dim=-1)
        row |= {"context": self, "own": own, "num_tokens": num}
        found = {**batch, ONE_ROW: row}
        if "counts" in batch:
            tokens, samples, _, squared_tokens = batch["counts"]
            counts = torch.stack([tokens, samples, torch.full_like(tokens, num + more), squared_tokens])
            found["counts"] = counts * int(self.rank == 0)
        return found

    def inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Inputs of a transformers model in the sharded module for this rank's part of padded or packed rows.

        The ``batch`` has ``input_ids`` and ``labels`` (B, T), and ``attention_mask`` or, as our packs,
        ``position_ids``, ``cu_seq_lens`` and ``longest``. The result also has ``targets`` (1, N / n), the token of the
        same sample that each position predicts, or -100. The loss of a row is the sum over all ranks.
        """
        row = model_inputs(self.cut(batch), BY_SAMPLE)[ONE_ROW]
        taken_N, _ = row.pop("taken"), row.pop("num_tokens")
        return {**row, "targets": next_targets(batch).flatten()[taken_N].unsqueeze(0)}


class _Longest:
    """The largest position of a row, for rotary embeddings whose frequencies depend on it (LongRoPE, dynamic NTK)."""

    position: torch.Tensor | None = None  # of the current forward pass; None: it computes whole rows

    def find(self, owner: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self.position, context = None, kwargs.get("context")
        if context is not None:
            self.position = kwargs["position_ids"].max()
            dist.all_reduce(self.position, dist.ReduceOp.MAX, group=context.group)

    def add(self, rotary: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if self.position is None:
            return None
        given = inspect.signature(rotary.forward).bind(*args, **kwargs)
        ids_1N = given.arguments["position_ids"]
        given.arguments["position_ids"] = torch.cat([ids_1N, self.position.view(1, 1)], dim=1)
        return given.args, given.kwargs

    def drop(self, rotary: nn.Module, args: Any, cos_and_sin: Any) -> Any:
        return None if self.position is None else tuple(part[:, :-1] for part in cos_and_sin)


def share_longest(model: nn.Module) -> None:
    """Compute rotary embeddings of parts of a row as those of the whole row; in place."""
    for owner in model.modules():
        for rotary in owner.children():
            kinds = getattr(rotary, "rope_type", None)
            if not BY_LONGEST.isdisjoint(kinds.values() if isinstance(kinds, dict) else [kinds]):
                longest = _Longest()
                owner.register_forward_pre_hook(longest.find, with_kwargs=True)
                rotary.register_forward_pre_hook(longest.add, with_kwargs=True)
                rotary.register_forward_hook(longest.drop)


def context_method(model: Any, config: ContextConfig, path: str) -> str:
    """Choose ``ulysses`` or ``all_gather`` for a model that uses SDPA sample by sample.

    Raises:
        ConfigError: The model mixes positions elsewhere, or the degree does not divide its heads.
    """
    kind, backend = model.config.model_type, model.config._attn_implementation
    given, allowed = f"{config.degree} for {kind}", "a model in which only attention mixes positions, with SDPA"
    fits = mixes_by_attention(model)
    require(fits, path, f"{given}, which has other kinds of layers", allowed, "drop context_parallel")
    fix = "drop context_parallel, and model.attn_implementation if it is set"
    require(backend == BY_SAMPLE, path, f"{given} with attention {backend}", allowed, fix)
    text = model.config.get_text_config()
    knows = not getattr(text, "output_router_logits", False) or balance_of(owner_of_head(model))
    require(knows, path, f"{given}, with its own router loss", "output_router_logits: false")
    heads, degree = text.num_attention_heads, config.degree
    if config.method == "ulysses":
        degrees = " | ".join(str(d) for d in range(1, heads + 1) if heads % d == 0)
        given, fix = f"ulysses over {degree} ranks, with {heads} heads", "or method: all_gather, for any degree"
        require(heads % degree == 0, path, given, f"degree: {degrees}", fix)
    if config.method != "auto":
        return config.method
    return "ulysses" if heads % degree == 0 else "all_gather"
