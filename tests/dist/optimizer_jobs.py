"""The job of test_optimizers.py: a run with any optimizer, and what a rank keeps for it."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lit_fsdp import CausalLMModule, Checkpoint
from lit_fsdp.errors import ConfigError
from tests.dist.foreign_jobs import ForeignNet, loader
from tests.dist.jobs import Losses, TinyData, trainer_for


def plain_parts(tensor: Any) -> list[torch.Tensor]:
    """What this rank has of a tensor; of 8-bit state the codes, the scales and the table."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return [local.codes, local.scale, local.qmap] if is_traceable_wrapper_subclass(local) else [local]


@torch.no_grad()
def optimized_run(
    folder: str, run: str, strategy: dict[str, Any], steps: int, model: dict[str, Any], ckpt_path: str | None = None
) -> dict[str, Any]:
    """Losses, a hash of parameters and state, the bytes of the state, and how much of it is kept in 8 bits."""
    torch.manual_seed(3)
    losses = Losses()
    callbacks = [losses, Checkpoint(every_steps=3, keep_last=-1)]
    trainer = trainer_for({"precision": "fp32", **strategy}, callbacks, max_steps=steps, default_root_dir=run)
    module = CausalLMModule(name=folder, **model)
    # torchao compiles its step for every shape, which takes a minute and is not what is looked at
    with torch.enable_grad(), torch.compiler.set_stance("force_eager"):
        trainer.fit(module, datamodule=TinyData(), ckpt_path=ckpt_path)
    optimizer: Any = trainer.optimizers[0]
    state = getattr(optimizer, "_optimizer", optimizer).state
    tensors = [t for _, p in sorted(module.named_parameters()) if p in state for t in state[p].values() if t.dim()]
    digest = hashlib.sha256()
    for tensor in (*module.parameters(), *tensors):
        for part in plain_parts(tensor):
            digest.update(part.contiguous().view(torch.uint8).numpy().tobytes() if part.numel() else b"")
    return {
        "losses": losses.values,
        "digest": digest.hexdigest(),
        "state_bytes": sum(part.numel() * part.element_size() for t in tensors for part in plain_parts(t)),
        "in_codes": sum(len(plain_parts(tensor)) > 1 for tensor in tensors),
        "sum_of_state": sum(float(part.double().sum()) for t in tensors for part in plain_parts(t)[:2]),
    }


class Own(torch.optim.Optimizer):
    """Somebody's: elementwise, in a mode that is asked for, with a second tensor from the beginning."""

    mode = False

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        for param in (p for group in self.param_groups for p in group["params"]):
            self.state[param] = {"sum": torch.zeros_like(param), "steps": 0}

    def train(self) -> None:
        self.mode = True

    def updated(self, param: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        state["sum"] += param.grad
        state["steps"] += 1
        return state["sum"] / state["steps"]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if not self.mode:
            raise RuntimeError("not in train mode")
        for group in self.param_groups:
            for param in (p for p in group["params"] if p.grad is not None):
                param.sub_(self.updated(param, self.state[param]), alpha=group["lr"])


class Holding(torch.optim.Optimizer):
    """Steps by another one that it holds, in a mode that torch's copies of optimizers leave out."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        self.inner = [Own(params, lr)]
        self.inner[0].train()
        super().__init__(self.inner[0].param_groups, {})
        self.state = self.inner[0].state

    def step(self, closure: Any = None) -> None:
        self.inner[0].step()


class ByNorm(Own):
    """Divides by the norm of a whole matrix."""

    def updated(self, param: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        return param.grad / param.grad.norm()


class ByMask(Own):
    """Writes where a mask is true."""

    def updated(self, param: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        grad = param.grad.clone()
        grad[grad < 0] = 0
        return grad


class Nested(Own):
    """Keeps its tensor in a mapping."""

    def updated(self, param: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        state["more"] = {"mean": param.grad}
        return param.grad


class Asking(Own):
    """Wants the loss again."""

    def step(self, closure: Any) -> None:
        closure()


def tried(engine: str, folder: str) -> dict[str, str]:
    """By the name of an optimizer, the error and the number of batches that were seen; empty for those that train."""
    found: dict[str, str] = {}
    classes: list[Any] = [Own, Holding, ByNorm, ByMask, Nested, Asking, torch.optim.Rprop, torch.optim.LBFGS]
    classes += [torch.optim.SGD, torch.optim.RAdam, torch.optim.SparseAdam]
    for cls in classes:
        net = ForeignNet()
        options = {"fused": True} if cls is torch.optim.SGD else {}
        net.configure_optimizers = lambda cls=cls, net=net, options=options: cls(net.parameters(), lr=0.1, **options)  # type: ignore[method-assign]
        net.on_train_start = lambda net=net: getattr(net.optimizers().optimizer, "train", int)()  # type: ignore
        torch.manual_seed(1)
        trainer = trainer_for({"engine": engine, "precision": "fp32"}, [ModelCheckpoint(folder)], max_steps=2)
        try:
            trainer.fit(net, loader(range(2)))
            found[cls.__name__] = ""
        except ConfigError as error:
            found[cls.__name__] = f"{error}\n{trainer.fit_loop.total_batch_idx + 1} batches"
    return found
