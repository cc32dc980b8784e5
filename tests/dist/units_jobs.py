"""Units in live runs: named, with experts, under frozen weights, and wrapped by the module itself."""

from __future__ import annotations

import os
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader

from tests.dist.foreign_jobs import StepLosses, own_part
from tests.dist.jobs import fit, module_for, trainer_for, whole

NUM_STEPS = 6


class LoRALinear(nn.Module):
    """A frozen linear layer plus a small trainable product."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down = nn.Linear(width, 2, bias=False)
        self.up = nn.Linear(2, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class AdapterBlock(nn.Module):
    """A frozen norm, an adapted layer and, if asked for, nothing to train at all."""

    def __init__(self, width: int, is_frozen: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width).requires_grad_(False)
        self.mlp = nn.Linear(width, width).requires_grad_(False) if is_frozen else LoRALinear(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.mlp(self.norm(x)))


class AdapterNet(LightningModule):
    """Frozen input and head, blocks with adapters, and one block that is frozen as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(12, 16).requires_grad_(False)
        self.layers = nn.ModuleList(AdapterBlock(16, is_frozen=i == 1) for i in range(3))
        self.head = nn.Linear(16, 1).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.entry(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss.detach(), sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Over all parameters and with decay: a frozen one with a gradient of zeros would shrink."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)


def is_adapter(name: str) -> bool:
    """Whether a parameter of :class:`AdapterNet` is to be trained."""
    return ".down." in name or ".up." in name


def train_adapters(strategy: dict[str, Any]) -> dict[str, Any]:
    """Losses, the audit, and which parameters differ in any bit from their start."""
    torch.manual_seed(5)
    module = AdapterNet()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    trainer, losses = _fit(module, strategy)
    live: Any = trainer.strategy
    after = {name: whole(tensor) for name, tensor in live.lightning_module_state_dict().items()}
    return {
        "losses": losses,
        "units": live.audit["units"],
        "changed": sorted(name for name, start in before.items() if not torch.equal(start, after[name])),
        "names": sorted(after),
        "trainable": sorted(
            n.replace("_fsdp_wrapped_module.", "") for n, p in module.named_parameters() if p.requires_grad
        ),
    }


def _fit(module: LightningModule, strategy: dict[str, Any]) -> tuple[Trainer, list[float]]:
    """On this rank's part of each eight rows."""
    losses = StepLosses()
    trainer = trainer_for(strategy, [losses], max_steps=NUM_STEPS)
    trainer.fit(module, DataLoader([own_part(step) for step in range(NUM_STEPS)], batch_size=None))
    return trainer, losses.values


def train_with_units(folder: str, strategy: dict[str, Any], steps: int = 5) -> dict[str, Any]:
    """What a run finds, and the units of the plan and of the live model."""
    trainer, found = fit(module_for(folder), strategy, steps=steps)
    live: Any = trainer.strategy
    units = {"planned": sorted(u.name for u in live.plan.units), "realized": sorted(live.realized_units())}
    return {**found, **units}


class Expert(nn.Module):
    """One of several."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class ExpertBlock(nn.Module):
    """All experts, weighted by a router."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(12, 3)
        self.experts = nn.ModuleList(Expert() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.router(x).softmax(dim=-1)
        return x + sum(weights[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


class OneExpertBlock(ExpertBlock):
    """Of the experts one alone is called."""

    def __init__(self) -> None:
        super().__init__()
        self.called = int(os.environ.get("RANK", "0"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank another expert; the last one is nobody's."""
        return x + self.experts[self.called](x) * self.router(x).mean()


class ExpertNet(LightningModule):
    """Somebody's mixture of experts."""

    def __init__(self, block: type[nn.Module] = ExpertBlock) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(2))
        self.head = nn.Linear(12, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    training_step = AdapterNet.training_step
    configure_optimizers = AdapterNet.configure_optimizers


def train_expert_net(strategy: dict[str, Any], one_per_rank: bool = False) -> dict[str, Any]:
    """Losses and live units of somebody's mixture of experts."""
    torch.manual_seed(5)
    trainer, losses = _fit(ExpertNet(OneExpertBlock if one_per_rank else ExpertBlock), strategy)
    live: Any = trainer.strategy
    return {"losses": losses, "realized": sorted(live.realized_units())}
