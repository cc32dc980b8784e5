"""Observations of live steps: the parameters that backward passes use, and the dtypes of the first step."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from lit_fsdp.checkpoint.state import local_part
from lit_fsdp.errors import ContractError
from lit_fsdp.metrics.hardware import to_device
from lit_fsdp.parallel.checkpointing import Checkpoints
from lit_fsdp.parallel.precision import moments

_OWN_BACKWARD = "use engine: ddp, or manual optimization for several passes without a graph of their own"
_CHANGE_BETWEEN_STEPS = "change parameters in on_train_batch_start or on_train_batch_end, or use engine: ddp"


class WatchedSteps(Checkpoints):
    """The part of :class:`lit_fsdp.parallel.base.EngineStrategy` that compares live steps with what was declared."""

    world_size: int
    _in_backward = False  # of this class, as only one pass runs at a time and hooks outlive their strategy

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._names: dict[int, str] = {}  # names of the model's parameters by their id
        self._used: set[str] = set()  # names of parameters that this rank's backward passes used since the last step
        self._noted: dict[int, torch.Tensor] = {}
        super().__init__(*args, **kwargs)

    def _watch_unit(self, unit: nn.Module, owners: list[tuple[str, nn.Module]], dtype: str) -> None:
        """Record which parameters of a unit (those of ``owners``) backward passes use, and check its first step."""
        is_fsdp2 = self.config.engine == "fsdp2"
        versions: list[tuple[str, torch.Tensor, int]] = []  # of gathered tensors, which fsdp1 does not let change

        def hook(module: nn.Module, args: Any) -> None:  # fsdp2 keeps the gathered tensors, fsdp1 makes new ones
            named = [(f"{n}.{a}" if n else a, p) for n, owner in owners for a, p in owner._parameters.items()]
            gathered = [(name, p) for name, p in named if p is not None and not isinstance(p, DTensor)]
            versions.clear()  # a recomputed forward can end before its hook
            if self.contract.watching:
                split = [(name, p) for name, p in gathered if p.dim()]
                self.contract.check_parameters("gathered parameters in the forward", split, dtype)
                versions[:] = [(name, p, p._version) for name, p in split if is_fsdp2 and torch.is_grad_enabled()]
            for name, param in gathered:
                if not param.requires_grad:
                    continue

                def note(_: torch.Tensor, name: str = name) -> None:
                    self._used.add(name)

                if not param.is_leaf:
                    param.register_hook(note)
                elif self._noted.get(id(param)) is not param:
                    self._noted[id(param)] = param
                    param.register_post_accumulate_grad_hook(note)

        def check(module: nn.Module, args: Any, output: Any) -> None:
            for name, param, version in versions:
                if param._version != version:
                    text = f"the forward pass changes the parameter {name} in place, which fsdp2 would lose: it is a "
                    raise ContractError(text + f"gathered copy of the shards\n  fix:     {_CHANGE_BETWEEN_STEPS}")
            versions.clear()
            for tensor in tree_leaves(output) if torch.is_grad_enabled() else ():
                if torch.is_tensor(tensor) and tensor.requires_grad and not tensor.is_leaf:
                    tensor.register_hook(self._check_backward)

        unit.register_forward_pre_hook(hook)
        unit.register_forward_hook(check)

    def _check_backward(self, _: torch.Tensor) -> None:
        """Refuse a backward pass that a step runs itself: it frees gathered parameters and reduces gradients.

        Manual optimization may call ``loss.backward()``, but no pass may have a graph of its own.
        """
        module = self.lightning_module
        is_own = torch.is_grad_enabled() or module.automatic_optimization
        if is_own and not self._in_backward and module._trainer is not None and module.trainer.training:
            text = "a step calls torch.autograd.grad or backward() through a unit, whose parameters "
            raise ContractError(f"{text}{self.config.engine} frees after that pass\n  fix:     {_OWN_BACKWARD}")

    def _check_parameters(self, when: str, optimizers: Sequence[Any] = ()) -> None:
        named = list(self.lightning_module.named_parameters())
        self.contract.check_parameters(f"parameters {when}", named)
        for optimizer in optimizers:
            found = moments(optimizer, {id(param): name for name, param in named})
            self.contract.check(f"optimizer state {when}", found, self.contract.row.param)

    def used_params(self, optimizer: Any) -> tuple[list[torch.Tensor | None], torch.Tensor]:
        """The optimizer's parameters, None for others, and per parameter a 0 if no rank has a gradient; collective."""
        if not self.config.is_sharded:  # FSDP fills in zeros, and the optimizer would decay the parameter
            return [], torch.empty(0, device=self.root_device)
        held = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        # in the same order on all ranks, whatever parameters their optimizers have
        params = [held.get(key) for key in self._names]
        return params, self._on_any_rank([p is not None and self._has_grad(p) for p in params])

    def have_gradients(self, params: list[torch.Tensor]) -> list[bool]:
        """Which of these parameters would have a gradient in one process; collective."""
        found = self._on_any_rank([p.grad is not None for p in params] + [self._has_grad(p) for p in params])
        return [bool(there and used) for there, used in found.view(2, -1).T.tolist()]

    def _has_grad(self, param: torch.Tensor) -> bool:
        return self._names[id(param)] in self._used or (param.grad is not None and bool(local_part(param.grad).any()))

    def _on_any_rank(self, flags: list[bool]) -> torch.Tensor:
        found = to_device(flags, torch.uint8, self.root_device)
        if self.world_size > 1:
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return found

    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the backward pass; until the first optimizer step, record the dtypes of reductions."""
        WatchedSteps._in_backward = True
        try:
            with self.contract.watch_reductions():
                return super().backward(closure_loss, *args, **kwargs)  # type: ignore[misc]
        finally:
            WatchedSteps._in_backward = False

    def optimizer_step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Run the optimizer step; after the first one, check the dtypes of gradients and moments."""
        result = super().optimizer_step(optimizer, *args, **kwargs)  # type: ignore[misc]
        self._rng_before_window = None
        if self.config.is_sharded:
            held = (self._names[id(p)] for group in optimizer.param_groups for p in group["params"])
            self._used.difference_update(held)
        if self.contract.watching:
            named = self.lightning_module.named_parameters()
            grads = [(name, param.grad) for name, param in named if param.grad is not None]
            self.contract.check("gradients", grads, self.contract.row.param)
            self._check_parameters("after the first step", [optimizer])
            self.contract.watching = False
        return result
