"""What happens between the backward pass and the optimizer: loss scale, finite gradients, clipping, in one order.

The engines' gradient scalers look at local shards, each in its own way; here one norm over all shards, the one an
unsharded model would have, decides for all ranks, so that a step is taken everywhere or nowhere. Lightning refuses norm
clipping under its FSDP strategy (https://github.com/Lightning-AI/pytorch-lightning/issues/19235).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import Precision
from torch.distributed.tensor import DTensor

from lit_fsdp.checkpoint.ranks import Ranks
from lit_fsdp.config.strategy import NonFinite
from lit_fsdp.errors import NonFiniteGradientError

_log = logging.getLogger(__name__)


class LossScale:
    """A dynamic loss scale for fp16: halved when gradients overflow, doubled after ``growth_interval`` good steps.

    Source: Micikevicius et al., Mixed Precision Training, arXiv:1710.03740, section 3.2.
    """

    smallest = 1.0

    def __init__(self, initial: float = 2.0**16, growth_interval: int = 2000) -> None:
        self.value, self.growth_interval, self.good_steps = initial, growth_interval, 0

    def update(self, overflowed: bool) -> None:
        """Note whether the step just taken overflowed."""
        self.good_steps = 0 if overflowed else self.good_steps + 1
        if overflowed:
            self.value = max(self.smallest, self.value / 2)
        elif self.good_steps == self.growth_interval:
            self.value, self.good_steps = self.value * 2, 0


class StepGuard:
    """Decides, alike on all ranks, whether an optimizer step is taken.

    While a loss scale (of fp16) can still fall, an overflow is skipped under either policy.
    """

    def __init__(self, policy: NonFinite, max_in_a_row: int, loss_scale: LossScale | None = None) -> None:
        self.policy, self.max_in_a_row, self.loss_scale = policy, max_in_a_row, loss_scale
        self.num_skipped_steps = self.num_overflow_steps = self.in_a_row = 0

    def allows(self, grad_norm: float, ranks: Callable[[], list[int]] = list) -> bool:
        """Whether to take the step; ``ranks``, a collective, gives those whose own loss was not finite.

        Raises:
            NonFiniteGradientError: Policy ``error``, or too many skipped steps in a row.
        """
        is_finite = grad_norm - grad_norm == 0
        scale = self.loss_scale
        can_fall = scale is not None and scale.value > scale.smallest
        if scale is not None:
            scale.update(not is_finite)
        if is_finite:
            self.in_a_row = 0
            return True
        if scale is not None and can_fall:
            self.num_overflow_steps += 1
            _log.info("fp16 overflow: step skipped, loss scale now %g", scale.value)
            return False
        culprits = ", ".join(map(str, ranks()))
        where = f"the loss of rank {culprits} was not finite" if culprits else "the loss was finite on every rank"
        if self.policy == "error":
            raise NonFiniteGradientError(
                f"the gradients hold inf or nan (norm {grad_norm}; {where}); parameters and optimizer are as before "
                "this step\n"
                "  allowed: finite gradients (nonfinite_gradients: error)\n"
                "  fix:     lower the learning rate, clip (trainer.gradient_clip_val: 1.0), look at the rows of this "
                "step, or set nonfinite_gradients: skip"
            )
        self.num_skipped_steps += 1
        self.in_a_row += 1
        _log.warning("gradients hold inf or nan, %s: step skipped (%d so far)", where, self.num_skipped_steps)
        if self.in_a_row >= self.max_in_a_row:
            raise NonFiniteGradientError(
                f"{self.in_a_row} optimizer steps in a row were skipped for inf or nan in the gradients\n"
                f"  allowed: fewer than {self.max_in_a_row} (max_skipped_steps)\n"
                "  fix:     lower the learning rate, or resume from an earlier checkpoint"
            )
        return False

    def state_dict(self) -> dict[str, Any]:
        """Counters and loss scale; empty while there is nothing to remember."""
        counts = {name: getattr(self, name) for name in ("num_skipped_steps", "num_overflow_steps", "in_a_row")}
        scale = self.loss_scale
        if scale is not None:
            return {**counts, "loss_scale": scale.value, "good_steps": scale.good_steps}
        return counts if any(counts.values()) else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict`; a scale is taken over only where there is one."""
        for name in ("num_skipped_steps", "num_overflow_steps", "in_a_row"):
            setattr(self, name, int(state.get(name, 0)))
        if self.loss_scale is not None and "loss_scale" in state:
            self.loss_scale.value = float(state["loss_scale"])
            self.loss_scale.good_steps = int(state["good_steps"])


class GuardedSteps(Precision):
    """Lightning's precision plugin of all engines: scale, unscale, clip over shards, step only on finite gradients."""

    last_grad_norm: torch.Tensor | None = None
    """Of the last optimizer step, before clipping; an fp32 scalar, equal on all ranks of a copy."""
    autocast: tuple[str, torch.dtype] | None = None
    """Device type and dtype, where the LightningModule's steps run under autocast."""
    _own_loss: torch.Tensor | float = 0.0

    def __init__(self, guard: StepGuard, strategy: Any) -> None:
        self.guard, self.strategy = guard, strategy

    def forward_context(self) -> AbstractContextManager[Any]:
        """Around every step of the LightningModule."""
        return nullcontext() if self.autocast is None else torch.autocast(*self.autocast)

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """The backward pass, before ``on_after_backward`` looks at gradients."""
        with self.strategy.averaging_alone():
            super().backward(*args, **kwargs)

    def pre_backward(self, tensor: torch.Tensor, module: Any) -> torch.Tensor:
        """The loss that is differentiated: times the loss scale of fp16."""
        tensor = super().pre_backward(tensor, module)
        self._own_loss = self._own_loss + tensor.detach()  # read only when something went wrong
        return tensor if self.guard.loss_scale is None else tensor * self.guard.loss_scale.value

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:  # type: ignore[override]
        """Run the backward pass and the hooks, then step, unless the gradients are not finite on any rank."""
        result = closure()
        params, used = self.strategy.used_params(optimizer)
        if self.guard.loss_scale is not None and (local := local_grads(optimizer)):
            torch._foreach_mul_(local, 1.0 / self.guard.loss_scale.value)
        self.last_grad_norm = None
        self._after_closure(model, optimizer)
        norm = self._measure(optimizer) if self.last_grad_norm is None else self.last_grad_norm
        norm = norm.to(self.strategy.root_device, copy=True)
        if self.strategy.has_copies:  # a copy that alone went wrong must not be the only one to skip
            dist.all_reduce(norm)
        # the one time that a step waits for the device
        norm_and_used = torch.cat([norm.view(1), used.to(norm)]).tolist()
        for param, is_used in zip(params, norm_and_used[1:], strict=True):
            if not is_used:
                param.grad = None
        allowed = self.guard.allows(norm_and_used[0], self._ranks_without_finite_loss)
        self._own_loss = 0.0
        if not allowed:
            optimizer._opt_called = True  # else the schedule warns that no step came before its own
            return result
        self.strategy.reshard()
        optimizer.step(**kwargs)
        return result

    def clip_grad_by_norm(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        """Scale all gradients so that their common 2-norm is at most ``clip_val``.

        One that is not finite makes them all so, and the step is not taken.
        """
        scale = torch.clamp(clip_val / (self._measure(optimizer) + 1e-6), max=1.0)
        if local := local_grads(optimizer):
            torch._foreach_mul_(local, scale.to(local[0].device))

    def clip_grad_by_value(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        """Clamp every gradient element to ``[-clip_val, clip_val]``; shards need nothing from each other."""
        self._measure(optimizer)  # clamping would make inf look finite
        for local in local_grads(optimizer):
            local.clamp_(-clip_val, clip_val)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: loss scale and counters."""
        return self.guard.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        self.guard.load_state_dict(state_dict)

    def _measure(self, optimizer: Any) -> torch.Tensor:
        """The 2-norm of all gradients together, as an fp32 scalar, equal on all ranks of a copy."""
        local, group = local_grads(optimizer), self.strategy.shard_group
        if group is not None and dist.get_rank(group):  # without dimensions they are not split: count them once
            local = [t for t in local if t.dim()]
        norms = torch._foreach_norm(local, 2, dtype=torch.float32) if local else [torch.zeros(())]
        squared = torch.stack([*norms]).square().sum().to(self.strategy.root_device)
        if group is not None:
            dist.all_reduce(squared, group=group)
        self.last_grad_norm = squared.sqrt()
        return self.last_grad_norm

    def _ranks_without_finite_loss(self) -> list[int]:
        is_finite = bool(torch.as_tensor(self._own_loss).isfinite().all())
        everyone = Ranks().run("looking for the loss that is not finite", lambda: is_finite)
        return [rank for rank, fine in enumerate(everyone) if not fine]


def local_grads(optimizer: Any) -> list[torch.Tensor]:
    """This rank's parts of an optimizer's gradients, without the empty ones."""
    grads = (p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
    local = (grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads)
    return [grad for grad in local if grad.numel()]
