"""Units in live runs, and a mixture whose ranks call different experts."""

from __future__ import annotations

import os
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn

from tests.dist.foreign_jobs import ForeignNet, StepLosses, loader
from tests.dist.jobs import fit, module_for, trainer_for


def train_with_units(folder: str, strategy: dict[str, Any], steps: int = 5) -> dict[str, Any]:
    """What a run finds, and the units of the plan and of the live model."""
    trainer, found = fit(module_for(folder), strategy, steps=steps)
    live: Any = trainer.strategy
    units = {"planned": sorted(u.name for u in live.plan.units), "realized": sorted(live.realized_units())}
    return {**found, **units}


def train_families(folders: list[str], strategies: list[dict[str, Any]], steps: int = 3) -> dict[str, list[Any]]:
    """Losses of each model folder under each strategy, with its blocks recomputed, or what was said instead."""
    found: dict[str, list[Any]] = {}
    for folder in folders:
        for strategy in strategies:
            given = {"precision": "fp32", "activation_checkpointing": "full", **strategy}
            try:
                found.setdefault(folder, []).append(fit(module_for(folder), given, steps=steps)[1]["losses"])
            except Exception as error:
                found.setdefault(folder, []).append(repr(error)[:300])
    return found


class OneExpertBlock(nn.Module):
    """Three experts, of which every rank calls another one; the last one is nobody's."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(12, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(3))
        self.called = int(os.environ.get("RANK", "0"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.experts[self.called](x) * self.router(x).mean()


class ExpertNet(LightningModule):
    """Somebody's mixture of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(OneExpertBlock() for _ in range(2))
        self.head = nn.Linear(12, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    training_step = ForeignNet.training_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """With decay: a parameter with a gradient of zeros shrinks."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)


def train_expert_net(strategy: dict[str, Any], steps: int) -> dict[str, Any]:
    """Losses and live units of somebody's mixture of experts, on this rank's part of each eight rows."""
    torch.manual_seed(5)
    losses = StepLosses()
    trainer = trainer_for(strategy, [losses], max_steps=steps)
    trainer.fit(ExpertNet(), loader(range(steps)))
    live: Any = trainer.strategy
    return {"losses": losses.values, "realized": sorted(live.realized_units())}
