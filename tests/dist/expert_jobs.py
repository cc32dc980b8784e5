"""Runs in which ranks divide experts: what each step computes, and what ranks send each other for it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lit_fsdp import CausalLMDataModule, Checkpoint, EMAWeights
from lit_fsdp.models.experts import grouped_experts
from tests.dist.jobs import Losses, fit, keep_whole, module_for


class _Sent(TorchDispatchMode):
    """Counts what this rank passes on to others, collectives as rings."""

    num_bytes = 0.0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, found = str(op), op(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        if "allgather" in name or "reduce_scatter" in name:
            sizes = sorted(tensor.nbytes for tensor in tensors)
            self.num_bytes += sizes[-1] - sizes[0]
        elif "all_to_all_single" in name and "wait" not in name:
            rank, sent = dist.get_rank(), args[2]
            own = sent[rank % len(sent)] * tensors[0][0].nbytes if sent and len(tensors[0]) else 0
            self.num_bytes += tensors[0].nbytes - own
        return found


class Steps(Losses):
    """Collects losses, norms of gradients and, after training, whole weights; counts what the last step has sent."""

    def __init__(self, route: str | None) -> None:
        super().__init__()
        self.norms: list[float] = []
        self.sent, self.route, self.routed = _Sent(), route, 0
        self.gathered: set[int] = set()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        for name, module in pl_module.named_modules():
            if self.route is not None and name.endswith("mlp.gate"):
                module.register_forward_hook(self._routed)
        for experts in grouped_experts(pl_module).values():
            experts.register_forward_pre_hook(self._gathered)

    def _gathered(self, experts: Any, args: Any) -> None:
        self.gathered.add(experts.down_proj.shape[0])

    def _routed(self, router: Any, args: Any, output: Any) -> Any:
        """All tokens to the first two experts, but one of the first rank; or on the first rank alone to these."""
        logits, weights, chosen = output
        self.routed += 1
        chosen = torch.zeros_like(chosen) + torch.arange(2)
        if self.route == "tail" and not dist.get_rank():
            chosen[0] = torch.arange(2) + 2
        return logits, weights, chosen

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == trainer.max_steps - 1:
            self.sent.__enter__()

    def on_train_batch_end(self, trainer: Trainer, *rest: Any) -> None:
        if trainer.global_step == trainer.max_steps:
            self.sent.__exit__(None, None, None)
        super().on_train_batch_end(trainer, *rest)
        if len(self.norms) < len(self.values):
            self.norms.append(float(trainer.strategy.precision_plugin.last_grad_norm))  # type: ignore[attr-defined]


def divided(
    folder: str,
    run: str | None = None,
    strategy: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    steps: int = 10,
    route: str | None = None,
    optim: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """A run in fp32; with ``run`` it is saved there in the middle, with its whole weights at the end as ``live.pt``."""
    found_steps, ema = Steps(route), EMAWeights(decay=0.5)
    saving = [] if run is None else [ema, Checkpoint(every_steps=steps // 2, keep_last=-1)]
    module = module_for(folder, model, **{"eps": 1e-4, **(optim or {})})
    given = {"precision": "fp32", **(strategy or {})}
    rows = None if data is None else CausalLMDataModule(**data)
    trainer, found = fit(module, given, [found_steps, *saving], rows, steps=steps, default_root_dir=run, **options)
    if run is not None:
        keep_whole(trainer, f"{run}/live.pt", trainer.strategy.lightning_module_state_dict())
        keep_whole(trainer, f"{run}/averages.pt", ema.state_dict()["weights"])
    experts = next(iter(grouped_experts(module).values()))
    group = getattr(experts, "expert_group", None)
    return {
        **found,
        "norms": found_steps.norms,
        "routed": found_steps.routed,
        "sent": found_steps.sent.num_bytes,
        "gathered": sorted(found_steps.gathered),
        "own": None if group is None else group.own,
        "meshes": sorted({str(param.device_mesh) for param in module.parameters() if hasattr(param, "device_mesh")}),
    }
