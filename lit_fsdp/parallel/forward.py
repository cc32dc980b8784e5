"""Calls of a sharded module between the hooks of its root, which gather and free parameters."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lit_fsdp.errors import ContractError

_SHARDS = (
    "outside of the forward pass of its FSDP unit a parameter is a shard (DTensor): call the module instead of using"
    " its weight; for a penalty on weights use weight_decay of the optimizer, or the engine ddp"
)


class RedirectedForward:
    """Redirects ``forward`` of a sharded module through the root, which calls back for the forward or a step."""

    def __init__(self, strategy: Any, module: nn.Module) -> None:
        self.strategy, self.forward = strategy, module.forward
        self._method: Callable[..., Any] | None = None
        self._is_inside = False
        functools.update_wrapper(self, module.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._method is not None:
            method, self._method = self._method, None
            return method(*args, **kwargs)
        if self._is_inside:
            return self.forward(*args, **kwargs)
        return self.run(self.forward, *args, **kwargs)

    def run(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a method of the module between the root's hooks; without gradients, free the gathered parameters."""
        before, self._is_inside, self._method = self._is_inside, True, method
        root = self.strategy._root
        try:
            with self.strategy.precision_plugin.forward_context():
                result = root(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as error:
            if "DTensor" in str(error) or "does not have a sharding strategy" in str(error):
                error.add_note(_SHARDS)
            raise
        finally:
            self._is_inside, self._method = before, None
        loss = result.get("loss", None) if isinstance(result, Mapping) else result
        module = self.strategy.lightning_module
        is_loss = getattr(method, "__name__", "") == "training_step" and module.automatic_optimization
        if is_loss and isinstance(loss, DTensor):  # its backward pass would fail, with no word about parameters
            raise ContractError(f"the step returns a DTensor: {_SHARDS}")
        if not torch.is_grad_enabled():
            self.strategy.reshard()
        return result
