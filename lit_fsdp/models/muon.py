"""Muon for the matrices of the blocks, AdamW for embeddings, head, norms and biases."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import AdamW, Muon, Optimizer


class MuonWithAdamW(Optimizer):
    """One optimizer of two: parameter groups with ``use_muon`` are orthogonalized, the others take AdamW's step.

    :class:`lit_fsdp.CausalLMModule` marks the groups. Schedules scale both learning rates alike.

    Args:
        params: Parameter groups, each with ``use_muon``.
        lr: Of Muon's groups.
        weight_decay: Of groups that do not say.
        adamw_lr: Of AdamW's groups.
        betas: AdamW's.
        momentum: This and what follows as :class:`torch.optim.Muon` takes it.

    Source: https://kellerjordan.github.io/posts/muon/
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float = 0.02,
        weight_decay: float = 0.0,
        adamw_lr: float = 3e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
    ) -> None:
        muon: Any = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
        groups = list(params)
        matrices = [dict(group) for group in groups if group["use_muon"]]
        others = [group | {"lr": adamw_lr} for group in groups if not group["use_muon"]]
        self._inner: list[Optimizer] = []
        if matrices:
            self._inner.append(Muon(matrices, lr=lr, weight_decay=weight_decay, **muon))
        if others:
            self._inner.append(AdamW(others, lr=adamw_lr, weight_decay=weight_decay, betas=betas))
        super().__init__(
            [group for inner in self._inner for group in inner.param_groups], {"lr": lr, "weight_decay": weight_decay}
        )
        self._share()

    def _share(self) -> None:
        """Let the two work on the groups and the state of this one, which is what is saved and scheduled."""
        first = 0
        for inner in self._inner:
            count = len(inner.param_groups)
            inner.param_groups, inner.state = self.param_groups[first : first + count], self.state
            first += count

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` gave."""
        super().load_state_dict(state_dict)
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of both."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for inner in self._inner:
            inner.step()
        return loss
