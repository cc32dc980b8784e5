"""Units in live runs: named, with experts, under frozen weights, and wrapped by the module itself."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.data import DataLoader

from lit_fsdp.config.strategy import WrapConfig
from lit_fsdp.parallel.units import UnitPlan, engines_already_there, plan_units, units_already_wrapped
from tests.dist.foreign import StepLosses, foreign_rows
from tests.dist.jobs import Losses, TinyData, module_for, trainer_for

NUM_STEPS = 6


class LoRALinear(nn.Module):
    """A frozen linear layer plus a small trainable product."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down = nn.Linear(width, 2, bias=False)
        self.up = nn.Linear(2, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of both."""
        return self.base(x) + self.up(self.down(x))


class AdapterBlock(nn.Module):
    """A frozen norm, an adapted layer and, if asked for, nothing to train at all."""

    def __init__(self, width: int, is_frozen: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width).requires_grad_(False)
        self.mlp = nn.Linear(width, width).requires_grad_(False) if is_frozen else LoRALinear(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """With a residual."""
        return x + torch.tanh(self.mlp(self.norm(x)))


class AdapterNet(LightningModule):
    """Frozen input and head, blocks with adapters, and one block that is frozen as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(12, 16).requires_grad_(False)
        self.layers = nn.ModuleList(AdapterBlock(16, is_frozen=i == 1) for i in range(3))
        self.head = nn.Linear(16, 1).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A prediction per row."""
        x = self.entry(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """The mean over this rank's rows."""
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
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(5)
    losses = StepLosses()
    trainer = trainer_for(strategy, [losses], max_steps=NUM_STEPS)
    module = AdapterNet()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    size = 8 // ranks
    rows = [tuple(p[rank * size : (rank + 1) * size] for p in foreign_rows(step)) for step in range(NUM_STEPS)]
    trainer.fit(module, DataLoader(rows, batch_size=None))
    live: Any = trainer.strategy
    state = live.lightning_module_state_dict()
    after = {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in state.items()}
    return {
        "losses": losses.values,
        "units": live.audit["units"],
        "changed": sorted(name for name, start in before.items() if not torch.equal(start, after[name])),
        "names": sorted(after),
        "trainable": sorted(clean for clean, p in _named(module) if p.requires_grad),
    }


def _named(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name.replace("_fsdp_wrapped_module.", ""), p) for name, p in module.named_parameters()]


def train_with_units(folder: str, strategy: dict[str, Any], steps: int = 5) -> dict[str, Any]:
    """Losses, and the units of the plan, the audit and the live model."""
    torch.manual_seed(0)
    losses = Losses()
    trainer = trainer_for(strategy, [losses], max_steps=steps)
    trainer.fit(module_for(folder), datamodule=TinyData())
    live: Any = trainer.strategy
    return {
        "losses": losses.values,
        "planned": sorted(unit.name for unit in live.plan.units),
        "realized": sorted(live.realized_units()),
        "audit": live.audit,
    }


class Expert(nn.Module):
    """One of several."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As wide as before."""
        return torch.tanh(self.linear(x))


class ExpertBlock(nn.Module):
    """All experts, weighted by a router."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(12, 3)
        self.experts = nn.ModuleList(Expert() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Every expert sees every row."""
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
        """A prediction per row."""
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    training_step = AdapterNet.training_step
    configure_optimizers = AdapterNet.configure_optimizers


def train_expert_net(strategy: dict[str, Any], one_per_rank: bool = False) -> dict[str, Any]:
    """Losses and live units of somebody's mixture of experts."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(5)
    losses = StepLosses()
    trainer = trainer_for(strategy, [losses], max_steps=NUM_STEPS)
    size = 8 // ranks
    rows = [tuple(p[rank * size : (rank + 1) * size] for p in foreign_rows(step)) for step in range(NUM_STEPS)]
    trainer.fit(ExpertNet(OneExpertBlock if one_per_rank else ExpertBlock), DataLoader(rows, batch_size=None))
    live: Any = trainer.strategy
    return {"losses": losses.values, "realized": sorted(live.realized_units())}


def wrapped_by_hand(engine: str) -> dict[str, Any]:
    """The plan of a net that wraps its blocks and the experts in them itself, and of the same net before."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(5)
    net = ExpertNet()
    net.layers[0].router.requires_grad_(False)
    wrap = WrapConfig(patterns=["layers.*", "layers.*.experts.*"])
    before = plan_units(net, wrap)
    for layer in list(net.layers):
        if engine == "fsdp2":
            for expert in layer.experts:
                fully_shard(expert, mesh=mesh)
            fully_shard(layer, mesh=mesh)
        else:
            layer.experts = nn.ModuleList(_fsdp1(expert, mesh) for expert in layer.experts)
    if engine == "fsdp1":
        net.layers = nn.ModuleList(_fsdp1(layer, mesh) for layer in net.layers)
    after = plan_units(net, WrapConfig(manual=True))
    return {
        "names": sorted(units_already_wrapped(net)),
        "engines": sorted(engines_already_there(net)),
        "before": _rows(before),
        "after": _rows(after),
        "source": after.source,
        "blocks": [type(block).__name__.removeprefix("FSDP") for block in after.blocks],
    }


def _fsdp1(module: nn.Module, mesh: Any) -> nn.Module:
    return FullyShardedDataParallel(module, device_mesh=mesh, device_id=torch.device("cpu"), use_orig_params=True)


def _rows(plan: UnitPlan) -> list[Any]:
    units = [(u.name, u.class_name, u.num_params, u.num_trainable, u.num_bytes, u.is_block) for u in plan.units]
    return [*units, plan.num_params]
