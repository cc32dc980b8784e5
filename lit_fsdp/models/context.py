"""Context parallel: the ranks of a group get the same rows, and each keeps a part of the positions of all activations.

The samples of a batch are joined in one row, like packs, and the row is split. Only attention mixes positions. The
method ``ulysses`` exchanges positions for heads, attends to the whole row with a part of the heads and exchanges back;
the method ``all_gather`` gathers all keys and values for each rank's queries, which are one part from the front of the
row and one from its end, so that the causal mask leaves every rank the same work.

Shapes: n ranks of a group, N tokens of the row, H query heads, K key and value heads, D head size.

Sources: arXiv:2309.14509 (Ulysses); arXiv:2407.21783, 3.3.2 (gathered keys and values).
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as collectives

_BY_ATTENTION = {"full_attention", "sliding_attention"}  # of a configuration's layer_types
# torch < 2.15 has only the second name: delete when 2.15 is the minimum
_all_gather = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd


class ContextGroup:
    """The ranks that compute positions of the same rows, and the collectives of their attention.

    Not a dataclass, because Lightning copies those, including the process group, when it moves a batch.

    Attributes:
        group: Their process group.
        method: ``ulysses`` or ``all_gather``.
        degree: Number of ranks.
        rank: This rank's index in the group.
    """

    def __init__(self, group: dist.ProcessGroup, method: str) -> None:
        self.group, self.method = group, method
        self.degree, self.rank = dist.get_world_size(group), dist.get_rank(group)

    @property
    def unit(self) -> int:
        """The number of tokens of a row must be a multiple of this."""
        return self.degree * (1 if self.method == "ulysses" else 2)

    def parts(self, num_tokens: int) -> list[list[tuple[int, int]]]:
        """The positions of each rank, as ascending ranges; the number ``num_tokens`` is a multiple of :attr:`unit`."""
        n = self.degree
        if self.method == "ulysses":
            size = num_tokens // n
            return [[(rank * size, (rank + 1) * size)] for rank in range(n)]
        size = num_tokens // (2 * n)
        return [[(i * size, (i + 1) * size) for i in (rank, 2 * n - 1 - rank)] for rank in range(n)]

    def gathered(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Gather the parts of a row from all ranks along ``dim``, in the order of positions; differentiable."""
        found = _all_gather(x.contiguous(), dim, self.group)
        parts = self.parts(found.shape[dim])
        pieces = found.split([end - start for part in parts for start, end in part], dim=dim)
        starts = [start for part in parts for start, _ in part]
        return torch.cat([pieces[i] for i in sorted(range(len(starts)), key=starts.__getitem__)], dim=dim)

    def to_heads(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Exchange a part of the positions, (1, H, N / n, D), for a part of the heads, (1, H / n, N, D)."""
        heads = tensors[0].shape[1]
        found = []
        for x in tensors:
            more = next(m for m in range(1, heads + 1) if x.shape[1] * m % self.degree == 0 == heads % (x.shape[1] * m))
            found.append(self._exchanged(x.repeat_interleave(more, dim=1) if more > 1 else x))
        return found

    def to_positions(self, out_1NHD: torch.Tensor) -> torch.Tensor:
        """Exchange back to a part of the positions with all heads, (1, N / n, H, D)."""
        return self._exchanged(out_1NHD)

    def _exchanged(self, x: torch.Tensor) -> torch.Tensor:
        """Divide dim 1 over the ranks of the group, and join their parts along dim 2."""
        sizes = [1] * self.degree
        parts = torch.stack(x.chunk(self.degree, dim=1))
        found = collectives.all_to_all_single_autograd(parts, sizes, sizes, self.group)
        return torch.cat(collectives.wait_tensor(found).unbind(), dim=2)

    def summed(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks of the group; each rank differentiates its own term, as all compute the same loss."""
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
    """Whether only attention mixes positions, according to the configuration and the layers."""
    config: Any = model.config
    is_stateful = getattr(model, "_is_stateful", False) or any(isinstance(m, nn.Conv1d) for m in model.modules())
    kinds = set(config.get_text_config().to_dict().get("layer_types") or ())
    return not is_stateful and kinds <= _BY_ATTENTION
