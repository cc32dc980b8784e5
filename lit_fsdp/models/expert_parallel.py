"""Expert parallel: the ranks of a group divide a layer's experts, and exchange tokens by all-to-all.

A rank sends the hidden state of a token once for each expert that the router chose, applies its own experts to the
tokens it receives, and sends the results back. The sender weights and sums them in the same order as a single rank.

Shapes: N tokens of a rank, K experts of each, S = N * K choices that it sends, T choices that it receives, E experts,
n ranks.

Source: GShard, arXiv:2006.16668, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as collectives


class ExpertGroup:
    """The ranks that divide the experts of a layer.

    Attributes:
        group: Their process group.
        degree: Number of ranks, n.
        held: The experts of each rank.
        own: The experts of this rank, in the order of its parameters.
    """

    def __init__(self, group: dist.ProcessGroup, held: Sequence[Sequence[int]]) -> None:
        self.group, self.held = group, [list(experts) for experts in held]
        self.degree, self.own = len(held), self.held[dist.get_rank(group)]
        by_rank = torch.tensor([expert for experts in held for expert in experts])
        self._places_E = by_rank.argsort()  # index of each expert when ordered by rank

    def places(self, device: torch.device) -> torch.Tensor:
        """The index of each expert (E) when ordered by rank, on a device."""
        if self._places_E.device != device:
            self._places_E = self._places_E.to(device)
        return self._places_E

    def exchanged(self, counts_E: torch.Tensor, num_choices: int) -> tuple[torch.Tensor, list[int], list[int]]:
        """Exchange how many of all ``num_choices`` each rank sends to each expert.

        Returns:
            Choices received by rank and own expert, flat, and the numbers sent to and received from each rank.
        """
        sizes, own = [len(experts) for experts in self.held], len(self.own)
        counts_nE = counts_E.new_empty(self.degree * own)
        dist.all_to_all_single(counts_nE, counts_E, [own] * self.degree, sizes, group=self.group)
        sums = [part.sum() for part in counts_E.split(sizes)]
        numbers = torch.cat([torch.stack(sums), counts_nE.view(self.degree, own).sum(1)])
        found = numbers.tolist()  # synchronizes with the device in every forward pass
        return counts_nE, found[: self.degree], found[self.degree :]


class Dispatch:
    """Sends the choices of one forward pass to their experts, and back.

    Attributes:
        group: The ranks that divide the experts.
        order_S: The choices, of (N, K) flattened, in the order in which they are sent.
        expert_T: Local index of the expert of each choice that :meth:`there` returns; ascending.
    """

    def __init__(self, group: ExpertGroup, top_k_index_NK: torch.Tensor) -> None:
        self.group, device = group, top_k_index_NK.device
        places_E = group.places(device)
        place_S = places_E[top_k_index_NK.flatten()]
        self.order_S = place_S.argsort(stable=True)
        place_S = place_S[self.order_S]
        ends_E = torch.searchsorted(place_S, torch.arange(len(places_E), device=device), right=True)
        counts_E = ends_E.diff(prepend=ends_E.new_zeros(1))
        counts_nE, self._sent, self._received = group.exchanged(counts_E, len(place_S))
        own_nE = torch.arange(len(group.own), device=device).repeat(group.degree)
        own_T = own_nE.repeat_interleave(counts_nE, output_size=sum(self._received))
        self._order_T = own_T.argsort(stable=True)
        self.expert_T = own_T[self._order_T]

    def there(self, x_SI: torch.Tensor) -> torch.Tensor:
        """Send ``x_SI``, in the order of :attr:`order_S`; returns the inputs of the own experts, (T, I).

        The engine averages gradients of experts over the ranks that hold the same experts, which are one ``degree``-th
        of the ranks that sent them tokens. From here to :meth:`back` gradients are therefore divided by ``degree``.
        """
        # not by FSDP2's set_gradient_divide_factor: gloo needs it with forced sums, and torch 2.11 to 2.15 then divides
        # twice on a mesh of one rank (findings/fsdp2-divides-twice-on-one-shard.sh)
        x_TI = self._exchange(x_SI, self._received, self._sent)[self._order_T]
        return scaled_gradient(x_TI, self.group.degree)

    def back(self, out_TO: torch.Tensor) -> torch.Tensor:
        """Send the experts' outputs back; returns those of this rank's choices, (S, O), in :attr:`order_S`."""
        out_TO = scaled_gradient(out_TO, 1 / self.group.degree)
        return self._exchange(out_TO[inverse(self._order_T)], self._sent, self._received)

    def _exchange(self, x: torch.Tensor, received: list[int], sent: list[int]) -> torch.Tensor:
        found = collectives.all_to_all_single_autograd(x.contiguous(), received, sent, self.group.group)
        return collectives.wait_tensor(found)


def inverse(order_S: torch.Tensor) -> torch.Tensor:
    """The inverse of a permutation."""
    return torch.empty_like(order_S).scatter_(0, order_S, torch.arange(len(order_S), device=order_S.device))


def scaled_gradient(x: torch.Tensor, factor: float) -> torch.Tensor:
    """Return ``x`` unchanged, with its gradient multiplied by ``factor``."""
    return _ScaledGradient.apply(x, factor)


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] * ctx.factor, None
