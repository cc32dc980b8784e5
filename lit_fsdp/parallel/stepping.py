"""What happens between the backward pass and the optimizer: loss scale, finite gradients, clipping, in one order.

The engines' gradient scalers look at local shards, each in its own way; here one norm over all shards decides for all
ranks, so that a step is taken everywhere or nowhere.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from lit_fsdp.config.strategy import NonFinite, StrategyConfig
from lit_fsdp.errors import ConfigError, NonFiniteGradientError
from lit_fsdp.parallel.grad_norm import clip_by_norm, clip_by_value, local_tensors, total_norm

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

    Args:
        policy: ``error`` or ``skip`` for gradients that hold inf or nan.
        max_in_a_row: So many skipped steps in a row end the run.
        loss_scale: Of fp16; while it can still fall, an overflow is skipped under either policy.
    """

    def __init__(self, policy: NonFinite, max_in_a_row: int, loss_scale: LossScale | None = None) -> None:
        self.policy, self.max_in_a_row, self.loss_scale = policy, max_in_a_row, loss_scale
        self.num_skipped_steps = self.num_overflow_steps = self.in_a_row = 0

    def allows(self, grad_norm: float, ranks: Callable[[], list[int]] = list) -> bool:
        """Whether to take the step.

        Args:
            grad_norm: Of the unscaled gradients over all shards; not finite on one rank means on all.
            ranks: Those whose own loss was not finite, asked for only if ``grad_norm`` is not; collective.

        Raises:
            NonFiniteGradientError: Policy ``error``, or too many skipped steps in a row.
        """
        is_finite = grad_norm - grad_norm == 0
        scale = self.loss_scale
        is_overflow = scale is not None and not is_finite and scale.value > scale.smallest
        if scale is not None:
            scale.update(not is_finite)
        if is_finite:
            self.in_a_row = 0
            return True
        if is_overflow:
            self.num_overflow_steps += 1
            assert scale is not None
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


def build_guard(config: StrategyConfig) -> StepGuard:
    """The guard that a strategy's arguments ask for."""
    is_fp16 = config.precision_config.row.compute == "fp16"
    return StepGuard(config.nonfinite_gradients, config.max_skipped_steps or 10, LossScale() if is_fp16 else None)


class GuardedSteps:
    """A mixin for Lightning's precision plugins: scale, unscale, clip over shards, and step only on finite gradients.

    ``shard_group`` are the ranks that together hold one copy of the gradients (``None``: each holds all of it);
    ``has_copies`` says that there are several copies, which must decide alike.
    """

    guard: StepGuard
    shard_group: dist.ProcessGroup | None = None
    has_copies: bool = False
    comm_device: torch.device = torch.device("cpu")
    last_grad_norm: torch.Tensor | None = None
    autocast: tuple[str, torch.dtype] | None = None
    """Device type and dtype, where the LightningModule's steps run under autocast."""
    stepped = False
    """Whether the last step was taken."""
    _own_loss: torch.Tensor | float = 0.0

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Around every step of the LightningModule."""
        context = nullcontext() if self.autocast is None else torch.autocast(self.autocast[0], self.autocast[1])
        with context:
            yield

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """The backward pass, before ``on_after_backward`` looks at gradients."""
        with self.around_backward():
            super().backward(*args, **kwargs)  # type: ignore[misc]

    def pre_backward(self, tensor: torch.Tensor, module: Any) -> torch.Tensor:
        """The loss that is differentiated: times the loss scale of fp16."""
        tensor = super().pre_backward(tensor, module)  # type: ignore[misc]
        self._own_loss = self._own_loss + tensor.detach()  # read only when something went wrong
        return tensor if self.guard.loss_scale is None else tensor * self.guard.loss_scale.value

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run the backward pass and the hooks, then step, unless the gradients are not finite on any rank.

        Raises:
            ConfigError: An optimizer that calls the closure itself (L-BFGS).
        """
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigError("optimizer", "LBFGS", "optimizers that step once per backward pass", "use torch's AdamW")
        result = closure()
        self.after_backward(optimizer)
        scale = self.guard.loss_scale
        if scale is not None:
            for grads in _by_device(_grads(optimizer)):
                torch._foreach_mul_(grads, 1.0 / scale.value)
        self.last_grad_norm = None
        self._after_closure(model, optimizer)  # type: ignore[attr-defined]
        if self.last_grad_norm is None:
            self._measure(optimizer)
        allowed = self.guard.allows(self._agreed_norm(), self._ranks_without_finite_loss)
        self._own_loss, self.stepped = 0.0, allowed
        if not allowed:
            optimizer._opt_called = True  # else the schedule warns that no step came before its own
            return result
        self.before_step()
        optimizer.step(**kwargs)
        return result

    def around_backward(self) -> AbstractContextManager[None]:
        """What the strategy does with each backward pass; it puts its own in place, as of the next two."""
        return nullcontext()

    def after_backward(self, optimizer: Any) -> None:
        """Once all gradients of an optimizer step are there."""

    def before_step(self) -> None:
        """The last thing before parameters change."""

    def clip_grad_by_norm(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        """Scale all gradients so that their common 2-norm is at most ``clip_val``."""
        self.last_grad_norm = clip_by_norm(_grads(optimizer), clip_val, self.shard_group, self.comm_device)

    def clip_grad_by_value(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        """Clamp every gradient element to ``[-clip_val, clip_val]``."""
        self._measure(optimizer)  # clamping would make inf look finite
        clip_by_value(_grads(optimizer), clip_val)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: loss scale and counters."""
        return self.guard.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        self.guard.load_state_dict(state_dict)

    def _measure(self, optimizer: Any) -> None:
        self.last_grad_norm = total_norm(_grads(optimizer), self.shard_group, self.comm_device)

    def _ranks_without_finite_loss(self) -> list[int]:
        is_finite = bool(torch.as_tensor(self._own_loss).isfinite().all())
        if not (dist.is_available() and dist.is_initialized()):
            return [] if is_finite else [0]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, is_finite)
        return [rank for rank, fine in enumerate(everyone) if not fine]

    def _agreed_norm(self) -> float:
        assert self.last_grad_norm is not None
        norm = self.last_grad_norm.to(self.comm_device)
        if self.has_copies:  # a copy that alone went wrong must not be the only one to skip
            dist.all_reduce(norm)
        return float(norm)


def _grads(optimizer: Any) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from (p.grad for p in group["params"] if p.grad is not None)


def _by_device(grads: Iterator[torch.Tensor]) -> list[list[torch.Tensor]]:
    local = local_tensors(grads)
    return [local] if local else []
