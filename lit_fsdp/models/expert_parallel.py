"""Expert parallel: the ranks of a group divide a layer's experts, and exchange tokens by all-to-all.

A rank sends the hidden state of a token once to each rank that has some of its experts, with the router's weights. The
receiver applies its experts and sends back the weighted sum of their outputs. The sender adds the sums of all ranks.

Shapes: N tokens of a rank, K experts of each, S = N * K choices of which a rank informs others, T choices that it
receives, M hidden states that it sends, R that it receives, E experts, n ranks.

Source: GShard, arXiv:2006.16668, section 3; one copy per rank as in DeepSeek-V3, arXiv:2412.19437, section 3.2.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

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
        ranks = torch.tensor([rank for rank, experts in enumerate(held) for _ in experts])
        self._places_E = by_rank.argsort()  # index of each expert when ordered by rank
        self._ranks_E = ranks[self._places_E]

    def places(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The index of each expert (E) when ordered by rank, and its rank, on a device."""
        if self._places_E.device != device:
            self._places_E, self._ranks_E = self._places_E.to(device), self._ranks_E.to(device)
        return self._places_E, self._ranks_E

    def exchanged(
        self, counts_E: torch.Tensor, rows_n: torch.Tensor, shape: torch.Size
    ) -> tuple[torch.Tensor, torch.Tensor, Sizes]:
        """Exchange how many choices each rank sends to each expert, and how many hidden states to each rank.

        The ``shape`` is (N, K), for a simulation without values.

        Returns:
            Choices received from each rank for each own expert, hidden states received from each rank, and the numbers
            of both that are sent and received.
        """
        sizes, own = [len(experts) + 1 for experts in self.held], len(self.own) + 1
        parts = zip(counts_E.split([size - 1 for size in sizes]), rows_n.split(1), strict=True)
        given = torch.cat([one for part in parts for one in part])
        found = given.new_empty(self.degree * own)
        dist.all_to_all_single(found, given, [own] * self.degree, sizes, group=self.group)
        counts_nE, received_n = found.view(self.degree, own)[:, :-1], found[own - 1 :: own]
        sent_n = torch.stack([part[:-1].sum() for part in given.split(sizes)])
        numbers = torch.stack([sent_n, counts_nE.sum(1), rows_n, received_n])
        return counts_nE, received_n, Sizes(*numbers.tolist())  # synchronizes with the device in every forward pass


class Sizes(NamedTuple):
    """Numbers by rank that one forward pass exchanges."""

    choices_sent: list[int]
    choices_received: list[int]
    rows_sent: list[int]
    rows_received: list[int]


class Dispatch:
    """Sends the tokens of one forward pass to their experts, and the results back.

    Attributes:
        group: The ranks that divide the experts.
        expert_T: Local index of the expert of each choice that :meth:`there` returns; ascending.
    """

    def __init__(self, group: ExpertGroup, top_k_index_NK: torch.Tensor) -> None:
        self.group, device, (self._num, num_choices) = group, top_k_index_NK.device, top_k_index_NK.shape
        places_E, ranks_E = group.places(device)
        expert_S = top_k_index_NK.flatten()
        place_S = places_E[expert_S]
        self._order_S = place_S.argsort(stable=True)
        place_S = place_S[self._order_S]
        ends_E = torch.searchsorted(place_S, torch.arange(len(places_E), device=device), right=True)
        counts_E = ends_E.diff(prepend=ends_E.new_zeros(1))
        row_S = ranks_E[expert_S[self._order_S]] * self._num + self._order_S // num_choices
        is_sent = torch.zeros(group.degree * self._num, dtype=torch.bool, device=device).index_fill_(0, row_S, True)
        is_sent_nN = is_sent.view(group.degree, -1)
        counts_nE, rows_n, self._sizes = group.exchanged(counts_E, is_sent_nN.sum(1), top_k_index_NK.shape)
        sizes = self._sizes
        self._token_M = torch.nonzero_static(is_sent, size=sum(sizes.rows_sent)).flatten() % self._num
        index_S = (is_sent_nN.cumsum(1) - 1).flatten()[row_S]  # among those sent to the same rank
        index_T = index_S.new_empty(sum(sizes.choices_received))
        dist.all_to_all_single(index_T, index_S, sizes.choices_received, sizes.choices_sent, group=group.group)
        start_n = rows_n.cumsum(0) - rows_n  # of each rank's rows among those received
        row_T = index_T + start_n.repeat_interleave(counts_nE.sum(1), output_size=len(index_T))
        own_nE = torch.arange(len(group.own), device=device).repeat(group.degree)
        own_T = own_nE.repeat_interleave(counts_nE.flatten(), output_size=len(index_T))
        self._order_T = own_T.argsort(stable=True)
        self.expert_T, self._row_T = own_T[self._order_T], row_T[self._order_T]

    def there(self, x_NI: torch.Tensor, weights_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Send hidden states and the router's weights; returns those of the own experts, (T, I) and (T, 1).

        The engine averages gradients of experts over the ranks that have the same experts, which are one ``degree``-th
        of the ranks that sent them tokens. From here to :meth:`back` gradients are therefore divided by ``degree``.
        """
        # not by FSDP2's set_gradient_divide_factor: gloo needs it with forced sums, and torch 2.11 to 2.15 then divides
        # twice on a mesh of one rank (findings/fsdp2-divides-twice-on-one-shard.sh)
        sizes, factor = self._sizes, self.group.degree
        x_RI = self._exchange(_Spread.apply(x_NI, self._token_M), sizes.rows_received, sizes.rows_sent)
        weights_S1 = weights_NK.reshape(-1, 1)[self._order_S]
        weights_T1 = self._exchange(weights_S1, sizes.choices_received, sizes.choices_sent)[self._order_T]
        return _Spread.apply(scaled_gradient(x_RI, factor), self._row_T), scaled_gradient(weights_T1, factor)

    def back(self, out_TO: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Send the sums of the experts' weighted outputs back in ``dtype``; returns the sums over ranks, (N, O)."""
        sizes = self._sizes
        out_TO = scaled_gradient(out_TO, 1 / self.group.degree)
        out_RO = _Summed.apply(out_TO, self._row_T, sum(sizes.rows_received)).to(dtype)
        out_MO = self._exchange(out_RO, sizes.rows_sent, sizes.rows_received)
        return _Summed.apply(out_MO, self._token_M, self._num)

    def _exchange(self, x: torch.Tensor, received: list[int], sent: list[int]) -> torch.Tensor:
        found = collectives.all_to_all_single_autograd(x.contiguous(), received, sent, self.group.group)
        return collectives.wait_tensor(found)


class _Spread(torch.autograd.Function):
    """Gather rows of a tensor; the backward pass adds the gradients of each row in fp32."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows)
        ctx.num = len(x)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (rows,) = ctx.saved_tensors
        return _summed(grads[0], rows, ctx.num), None


class _Summed(torch.autograd.Function):
    """Add rows in fp32 to those of the result, of which there are ``num``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: torch.Tensor, num: int) -> torch.Tensor:
        ctx.save_for_backward(rows)
        return _summed(x, rows, num)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0].index_select(0, *ctx.saved_tensors), None, None


def _summed(x: torch.Tensor, rows: torch.Tensor, num: int) -> torch.Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.new_zeros(num, *x.shape[1:], dtype=wide).index_add_(0, rows, x.to(wide)).to(x.dtype)


def share_sent(num_experts: int, degree: int, num_choices: int) -> float:
    """The expected share of tokens that are sent to a rank, if all choices of experts are equally likely."""
    return 1 - math.comb(num_experts - num_experts // degree, num_choices) / math.comb(num_experts, num_choices)


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
