"""Steps between the backward pass and the optimizer: loss scale, check for finite gradients, clipping.

All ranks decide by one norm over all shards, equal to that of an unsharded model. Lightning refuses norm clipping under
its FSDP strategy (https://github.com/Lightning-AI/pytorch-lightning/issues/19235).
"""

import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import Precision

from lit_fsdp.checkpoint.state import local_part
from lit_fsdp.config.strategy import NonFinite
from lit_fsdp.errors import NonFiniteGradientError
from lit_fsdp.metrics.hardware import to_device
from lit_fsdp.parallel.alike import are_alike, check_alike, marks, options_of

_log = logging.getLogger(__name__)
_SKIPPED_IN_A_ROW = 10
_GROWTH_INTERVAL = 2000
_KEPT = ("num_skipped_steps", "num_overflow_steps", "in_a_row", "good_steps", "loss_scale")


class GuardedSteps(Precision):
    """Lightning precision plugin for all engines: scale, unscale, clip over shards, step only on finite gradients.

    The loss scale of fp16 is halved when gradients overflow, and doubled after 2000 good steps. While it can still
    decrease, steps with overflow are skipped under either policy.

    Source: Micikevicius et al., Mixed Precision Training, arXiv:1710.03740, section 3.2.
    """

    last_grad_norm: torch.Tensor | None = None  # before clipping; an fp32 scalar, equal on all ranks of a copy
    _marks: torch.Tensor  # summed over all ranks; see are_alike
    autocast: tuple[str, torch.dtype] | None = None  # device type and dtype of the LightningModule's steps

    def __init__(self, policy: NonFinite, is_fp16: bool, strategy: Any) -> None:
        self.policy, self.strategy = policy, strategy
        self.loss_scale: float | None = 2.0**16 if is_fp16 else None
        self.good_steps = self.num_skipped_steps = self.num_overflow_steps = self.in_a_row = 0

    def allows(self, grad_norm: float) -> bool:
        """Whether to take the step, equal on all ranks; may raise ``NonFiniteGradientError`` by the policy."""
        if math.isfinite(grad_norm):
            self.in_a_row, self.good_steps = 0, self.good_steps + 1
            if self.loss_scale is not None and self.good_steps % _GROWTH_INTERVAL == 0:
                self.loss_scale *= 2
            return True
        self.good_steps = 0
        if self.loss_scale is not None and self.loss_scale > 1:
            self.loss_scale, self.num_overflow_steps = self.loss_scale / 2, self.num_overflow_steps + 1
            _log.info("fp16 overflow: step skipped, loss scale now %g", self.loss_scale)
            return False
        found = "the gradients contain inf or nan"
        if self.policy == "error":
            fix = "lower the learning rate, clip (trainer.gradient_clip_val: 1.0), or set nonfinite_gradients: skip"
            raise NonFiniteGradientError(f"{found}; parameters are unchanged by this step\n  fix:     {fix}")
        self.num_skipped_steps, self.in_a_row = self.num_skipped_steps + 1, self.in_a_row + 1
        _log.warning("%s: step skipped (%d so far)", found, self.num_skipped_steps)
        if self.in_a_row >= _SKIPPED_IN_A_ROW:
            text = f"{self.in_a_row} optimizer steps in a row were skipped because of inf or nan in the gradients"
            fix = "lower the learning rate, or resume from an earlier checkpoint"
            raise NonFiniteGradientError(f"{text}\n  fix:     {fix}")
        return False

    def state_dict(self) -> dict[str, Any]:
        """Counters and loss scale, for checkpoints."""
        return {name: getattr(self, name) for name in _KEPT if getattr(self, name) is not None}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`; a loss scale is restored only if this run has one."""
        vars(self).update({name: state_dict[name] for name in self.state_dict() if name in state_dict})

    def forward_context(self) -> AbstractContextManager[Any]:
        """The context of every step of the LightningModule."""
        return nullcontext() if self.autocast is None else torch.autocast(*self.autocast)

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass; finishes gradients before ``on_after_backward`` reads them."""
        super().backward(*args, **kwargs)
        self.strategy.average_alone()

    def pre_backward(self, tensor: torch.Tensor, module: Any) -> torch.Tensor:
        """Multiply the loss by the loss scale of fp16."""
        tensor = super().pre_backward(tensor, module)
        return tensor if self.loss_scale is None else tensor * self.loss_scale

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:  # type: ignore[override]
        """Run the backward pass and the hooks, then step, unless the gradients are not finite on any rank."""
        result = closure()
        params, used = self.strategy.used_params(optimizer)
        if self.loss_scale is not None:
            scale_grads(optimizer, 1.0 / self.loss_scale)
        self.last_grad_norm, self._marks = None, torch.zeros(2, dtype=torch.float64, device=self.strategy.root_device)
        self._after_closure(model, optimizer)
        norm = self._measure(optimizer) if self.last_grad_norm is None else self.last_grad_norm
        if self.strategy.has_copies:  # if one copy has non-finite gradients, all copies must skip
            norm = self._all_reduce(norm, optimizer, None)
        # the only synchronization with the device in a step
        norm = norm.to(self._marks).view(1)
        norm_of_all, mark, square, *is_used_at_all = torch.cat([norm, self._marks, used.to(norm)]).tolist()
        if not are_alike(mark, square, self.strategy.world_size):  # such as after a schedule or hook changed options
            check_alike("comparing optimizers", options_of([optimizer]))
        for param, is_used in zip(params, is_used_at_all, strict=True):
            if param is not None and not is_used:
                param.grad = None
        if not self.allows(norm_of_all):
            optimizer._opt_called = True  # else the schedule warns that the optimizer has not stepped
            return result
        self.strategy.reshard()
        optimizer.step(**kwargs)
        return result

    def clip_grad_by_norm(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        """Scale all gradients so that their common 2-norm is at most ``clip_val``."""
        scale_grads(optimizer, torch.clamp(clip_val / (self._measure(optimizer) + 1e-6), max=1.0))

    def clip_grad_by_value(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        """Clamp every gradient element to ``[-clip_val, clip_val]``; needs no communication between shards."""
        self._measure(optimizer)  # clamping would make inf look finite
        for local in _local_grads(optimizer):
            local.clamp_(-clip_val, clip_val)

    def _measure(self, optimizer: Any) -> torch.Tensor:
        """The 2-norm of all gradients together, as an fp32 scalar, equal on all ranks of a copy."""
        local, group = _local_grads(optimizer), self.strategy.shard_group
        if group is not None and dist.get_rank(group):  # 0-dim gradients are not split: count them once
            local = [t for t in local if t.dim()]
        norms = torch._foreach_norm(local, 2, dtype=torch.float32) if local else [torch.zeros(())]
        squared = torch.stack([*norms]).square().sum().to(self.strategy.root_device)
        self.last_grad_norm = (squared if group is None else self._all_reduce(squared, optimizer, group)).sqrt()
        return self.last_grad_norm

    def _all_reduce(self, value: torch.Tensor, optimizer: Any, group: dist.ProcessGroup | None) -> torch.Tensor:
        """Sum a 0-dim tensor over ranks, together with the marks that compare their optimizers."""
        sums = torch.cat([value.view(1).double(), to_device(marks(optimizer), torch.float64, value.device)])
        dist.all_reduce(sums, group=group)
        self._marks = sums[1:]
        return sums[0].to(value.dtype)


def scale_grads(optimizer: Any, factor: torch.Tensor | float) -> None:
    """Multiply an optimizer's gradients, on any device, by a number or a 0-dim tensor."""
    if local := _local_grads(optimizer):  # offloaded gradients are on the host
        torch._foreach_mul_(local, factor.to(local[0].device) if isinstance(factor, torch.Tensor) else factor)


def _local_grads(optimizer: Any) -> list[torch.Tensor]:
    """This rank's parts of an optimizer's gradients, without empty parts."""
    grads = (p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
    local = (local_part(grad) for grad in grads)
    return [grad for grad in local if grad.numel()]
