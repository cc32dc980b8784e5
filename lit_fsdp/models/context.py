"""Context parallel: the ranks of a group get the same rows, and each holds a part of the positions of all activations.

The samples of a batch are laid out one after another in one row, as packs are, and that row is cut. Attention alone
mixes positions. ``ulysses`` exchanges heads for positions, attends to the whole row with a part of the heads and
exchanges back; ``all_gather`` brings all keys and values to each rank's queries, which are one part from the front of
the row and one from its end, so that the causal mask leaves as much to do everywhere.

Shapes: n ranks of a group, N tokens of the row, H heads of queries, K of keys and values, D size of a head.

Sources: arXiv:2309.14509 (Ulysses); arXiv:2407.21783, 3.3.2 (gathered keys and values).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as collectives
from torch.nn import functional as F

from lit_fsdp.config.strategy import ContextConfig
from lit_fsdp.errors import require

_BY_ATTENTION = {"full_attention", "sliding_attention"}  # of a configuration's layer_types
# torch < 2.15 has the second name only: delete when that is the minimum
_all_gather = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd


class ContextGroup:
    """The ranks that compute the positions of the same rows, and how their attention meets.

    Not a dataclass: Lightning copies those, with the group, where it moves a batch.

    Attributes:
        group: Their process group.
        method: ``ulysses`` or ``all_gather``.
        degree: Their number.
        rank: This rank's place among them.
    """

    def __init__(self, group: dist.ProcessGroup, method: str) -> None:
        self.group, self.method = group, method
        self.degree, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def parts(self, num_tokens: int) -> list[list[tuple[int, int]]]:
        """The positions of each rank, as ranges that ascend; ``num_tokens`` is a multiple of what :meth:`cut` makes."""
        n = self.degree
        if self.method == "ulysses":
            size = num_tokens // n
            return [[(rank * size, (rank + 1) * size)] for rank in range(n)]
        size = num_tokens // (2 * n)
        return [[(i * size, (i + 1) * size) for i in (rank, 2 * n - 1 - rank)] for rank in range(n)]

    def cut(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """A batch with this rank's part of its row as :data:`~lit_fsdp.models.loss.ONE_ROW`; best on the host.

        The row is filled up with a sample without targets until it can be cut. ``counts`` are the batch's on the first
        rank and zeros on others, so that sums over ranks count each token once.
        """
        from lit_fsdp.models.loss import ONE_ROW
        from lit_fsdp.models.packing import one_row

        row = dict(batch.get(ONE_ROW) or one_row(batch))
        num, unit = row["input_ids"].shape[1], self.degree * (1 if self.method == "ulysses" else 2)
        if more := -num % unit:
            device, last = row["input_ids"].device, F.pad(row["cu_seq_lens"], (0, 1), value=num + more)
            positions = torch.arange(more, device=device)[None]
            row["position_ids"] = torch.cat([row["position_ids"], positions], dim=1)
            row["input_ids"] = F.pad(row["input_ids"], (0, more))
            row["taken"] = F.pad(row["taken"], (0, more), value=-1)  # the end of a row, which has no target
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
        """What a model of transformers in the sharded module takes of this rank's part of padded or packed rows.

        ``batch`` has ``input_ids`` and ``labels`` (B, T), and ``attention_mask`` or, as our packs, ``position_ids``,
        ``cu_seq_lens`` and ``longest``. Beside the inputs comes ``targets`` (1, N / n), the token that each position
        predicts, of the same sample; -100 where there is none. The loss of a row is the sum over all ranks.
        """
        from lit_fsdp.models.attention import BY_SAMPLE
        from lit_fsdp.models.loss import ONE_ROW, next_targets
        from lit_fsdp.models.packing import model_inputs

        row = model_inputs(self.cut(batch), BY_SAMPLE)[ONE_ROW]
        taken_N, _ = row.pop("taken"), row.pop("num_tokens")
        return {**row, "targets": next_targets(batch).flatten()[taken_N].unsqueeze(0)}

    def gathered(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """What all ranks hold of a row along ``dim``, in the order of its positions; it has a graph."""
        found = _all_gather(x.contiguous(), dim, self.group)
        parts = self.parts(found.shape[dim])
        pieces = found.split([end - start for part in parts for start, end in part], dim=dim)
        starts = [start for part in parts for start, _ in part]
        return torch.cat([pieces[i] for i in sorted(range(len(starts)), key=starts.__getitem__)], dim=dim)

    def to_heads(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """All positions of a part of the heads, (1, H / n, N, D), of a part of the positions, (1, H, N / n, D)."""
        heads = tensors[0].shape[1]
        found = []
        for x in tensors:
            more = next(m for m in range(1, heads + 1) if x.shape[1] * m % self.degree == 0 == heads % (x.shape[1] * m))
            found.append(self._exchanged(x.repeat_interleave(more, dim=1) if more > 1 else x, split=1, join=2))
        return found

    def to_positions(self, out_1NHD: torch.Tensor) -> torch.Tensor:
        """The way back: a part of the positions of all heads, (1, N / n, H, D)."""
        return self._exchanged(out_1NHD, split=1, join=2)

    def _exchanged(self, x: torch.Tensor, split: int, join: int) -> torch.Tensor:
        sizes = [1] * self.degree
        parts = torch.stack(x.chunk(self.degree, dim=split))
        found = collectives.all_to_all_single_autograd(parts, sizes, sizes, self.group)
        return torch.cat(collectives.wait_tensor(found).unbind(), dim=join)

    def summed(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks of the group; each differentiates its own term, as all compute the same loss."""
        return _Summed.apply(x, self.group)


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return *grads, None


def mixes_by_attention(model: nn.Module) -> bool:
    """Whether attention alone mixes positions, as far as the configuration and the layers tell."""
    config: Any = model.config
    is_stateful = getattr(model, "_is_stateful", False) or any(isinstance(m, nn.Conv1d) for m in model.modules())
    kinds = set(config.get_text_config().to_dict().get("layer_types") or ())
    return not is_stateful and kinds <= _BY_ATTENTION


def context_method(model: Any, config: ContextConfig, path: str) -> str:
    """``ulysses`` or ``all_gather`` for a model, whose attention is SDPA sample by sample.

    Raises:
        ConfigError: The model mixes positions elsewhere, or the degree does not divide its heads.
    """
    from lit_fsdp.models.attention import BY_SAMPLE
    from lit_fsdp.models.loss import balance_of, owner_of_head

    kind, backend = model.config.model_type, model.config._attn_implementation
    given, allowed = f"{config.degree} for {kind}", "a model in which attention alone mixes positions, by SDPA"
    fits = mixes_by_attention(model)
    require(fits, path, f"{given}, which has layers of another kind", allowed, "drop context_parallel")
    fix = "drop model.attn_implementation" if backend != BY_SAMPLE else ""
    require(backend == BY_SAMPLE, path, f"{given} with attention {backend}", allowed, fix or "drop context_parallel")
    text = model.config.get_text_config()
    knows = not getattr(text, "output_router_logits", False) or balance_of(owner_of_head(model))
    require(knows, path, f"{given}, with a router's loss of its own", "output_router_logits: false")
    heads, degree = text.num_attention_heads, config.degree
    if config.method == "ulysses":
        degrees = " | ".join(str(d) for d in range(1, heads + 1) if heads % d == 0)
        given, fix = f"ulysses over {degree} ranks, with {heads} heads", "or method: all_gather, which takes any"
        require(heads % degree == 0, path, given, f"degree: {degrees}", fix)
    if config.method != "auto":
        return config.method
    return "ulysses" if heads % degree == 0 else "all_gather"
