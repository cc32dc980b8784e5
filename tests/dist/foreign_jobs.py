"""Somebody else's modules under the factory, with the Trainer's own options and callbacks."""

from __future__ import annotations

import logging
import logging.handlers
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch import callbacks as lightnings
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import grad_norm
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from lit_fsdp import grad_norms
from lit_fsdp.errors import ConfigError
from tests.dist.jobs import here, trainer_for


def foreign_rows(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight rows of a regression."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, 12, generator=generator)
    return x, x.sum(dim=1, keepdim=True).sin()


def own_part(step: int, parts: int = 1, part: int = 0) -> tuple[torch.Tensor, ...]:
    """This rank's share of eight rows, or of one of the parts they are cut into."""
    rank, ranks = here()
    size = 8 // ranks // parts
    start = (part * ranks + rank) * size
    return tuple(rows[start : start + size] for rows in foreign_rows(step))


def loader(steps: Iterable[int]) -> DataLoader[Any]:
    """This rank's share of these steps."""
    return DataLoader([own_part(step) for step in steps], batch_size=None)  # type: ignore[arg-type]


class ForeignNet(LightningModule):
    """Somebody's module: knows nothing of ours, holds a parameter itself and calls itself in its step."""

    def __init__(self) -> None:
        super().__init__()
        blocks = (torch.nn.Sequential(torch.nn.Linear(12, 12), torch.nn.Tanh()) for _ in range(3))
        self.layers = torch.nn.ModuleList(blocks)
        self.head = torch.nn.Linear(12, 1)
        self.scale = torch.nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x) * self.scale.mean()

    def reset_parameters(self) -> None:
        torch.nn.init.ones_(self.scale)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss.detach(), sync_dist=True)
        return loss

    def test_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> None:
        self.log("test_loss", mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class ForeignNetWithValidation(ForeignNet):
    """Adds what people add: steps of other verbs and a schedule, by which the learning rate halves at every step."""

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0])

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class StepLosses(Callback):
    """The mean of the micro-batch losses of each optimizer step, and the number of validation batches."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self.validation_batches = 0
        self._window: list[float] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._window.append(float(trainer.callback_metrics["loss"]))
        if len(self._window) == trainer.accumulate_grad_batches:
            self.values.append(sum(self._window) / len(self._window))
            self._window = []

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        self.validation_batches += 1


class TellsNorms(ForeignNet):
    """Asks for the norms of its gradients before each step; one layer has none."""

    def __init__(self) -> None:
        super().__init__()
        self.never, self.found = torch.nn.Linear(3, 3), {}

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) + 0 * self.head.bias.sum()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        asked = [(self, power) for power in (1, 2, "inf")] + [(self.layers, 2)]
        self.found = {f"{power}{n}": grad_norms(part, power) for n, (part, power) in enumerate(asked)}
        if self.trainer.world_size == 1 or self.trainer.strategy.shard_group is None:
            self.found |= {f"{power}{n}": grad_norm(part, power) for n, (part, power) in enumerate(asked)}


def norms(strategy: dict[str, Any]) -> dict[str, Any]:
    """Norms of the second step, Lightning's own in place of ours where gradients are whole; and what is said of it."""
    torch.manual_seed(11)
    net, said = TellsNorms(), logging.handlers.BufferingHandler(100)
    logging.getLogger("lit_fsdp.parallel.norms").addHandler(said)
    trainer_for({"precision": "fp32", **strategy}, [], max_steps=2).fit(net, loader(range(2)))
    norms = {word: {key: float(value) for key, value in of.items()} for word, of in net.found.items()}
    return {"said": [record.getMessage() for record in said.buffer], **norms}


def plain_losses(net: Any, steps: Iterable[int], clip: Callable[[Any], object] = list) -> list[float]:
    """Losses of these steps in a plain loop over whole batches, in one process."""
    made, losses, schedule = net.configure_optimizers(), [], None
    if isinstance(made, dict):
        made, schedule = made["optimizer"], made["lr_scheduler"]["scheduler"]
    for step in steps:
        x, y = foreign_rows(step)
        loss = mse_loss(net(x), y)
        loss.backward()
        clip(net.parameters())
        made.step()
        made.zero_grad()
        if schedule is not None:
            schedule.step()
        losses.append(float(loss.detach()))
    return losses


def train_foreign(
    strategy: dict[str, Any],
    callbacks: dict[str, dict[str, Any]] | None = None,
    folder: str | None = None,
    validates: bool = False,
    ckpt_path: str | None = None,
    dropout: float = 0.0,
    batches: int = 4,
    **options: Any,
) -> dict[str, Any]:
    """So many batches per epoch under Lightning's own callbacks and options; what a plain loop can be compared with.

    On rank 1 the module starts from other weights, which must not matter.
    """
    torch.manual_seed(11 + here()[0])
    losses = StepLosses()
    named = [getattr(lightnings, name)(**arguments) for name, arguments in (callbacks or {}).items()]
    if folder is not None:
        options |= {"logger": CSVLogger(folder, name="", version=""), "log_every_n_steps": 1}
    trainer = trainer_for(strategy, [losses, *named], **options)
    module = ForeignNetWithValidation() if validates else ForeignNet()
    module.layers.append(torch.nn.Dropout(dropout))
    parts = trainer.accumulate_grad_batches
    rows: Any = [own_part(step, parts, part) for step in range(batches) for part in range(parts)]
    more = loader(range(100, 105)) if validates else None
    try:
        trainer.fit(module, DataLoader(rows, batch_size=None), more, ckpt_path=ckpt_path)
    except ConfigError as error:
        return {"error": str(error)}
    live: Any = trainer.strategy
    saver: Any = next((one for one in named if isinstance(one, lightnings.ModelCheckpoint)), None)
    return {
        "losses": losses.values,
        "units": [unit["name"] for unit in live.audit["units"]],
        "steps": trainer.global_step,
        "epochs": trainer.current_epoch,
        "val_loss": float(trainer.callback_metrics["val_loss"]) if validates else None,
        "validation_batches": losses.validation_batches,
        "best": Path(saver.best_model_path).name if saver else None,
        "kept": sorted(Path(path).name for path in saver.best_k_models) if saver else None,
        "test_loss": trainer.test(module, loader([0]), verbose=False)[0]["test_loss"],
    }


class OnDTensors(ForeignNet):
    """Comes with a layer under tensor parallelism."""

    def configure_model(self) -> None:
        mesh = init_device_mesh("cpu", (here()[1],))
        parallelize_module(self.layers[1][0], mesh, ColwiseParallel())


class OneScheduler(ForeignNetWithValidation):
    """With a scheduler as it is given."""

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.given = given

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        kind = (
            torch.optim.lr_scheduler.ReduceLROnPlateau if "monitor" in self.given else torch.optim.lr_scheduler.StepLR
        )
        made: Any = kind(optimizer, patience=0) if "monitor" in self.given else kind(optimizer, 1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": made, **self.given}}


def idle(cases: list[tuple[dict[str, Any], dict[str, Any]]], engine: str) -> list[list[str]]:
    """What is warned of each scheduler in a run with these options, eight batches per epoch."""
    said: list[list[str]] = []
    log, handler = logging.getLogger("lit_fsdp.parallel.base"), logging.Handler()
    handler.emit = lambda record: said[-1].append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    for given, options in cases:
        said.append([])
        trainer = trainer_for({"engine": engine, "precision": "fp32"}, [], **options)
        trainer.fit(OneScheduler(**given), loader(range(8)), loader([100]))
    return said


def on_dtensors(engine: str) -> str:
    """The error of a module under tensor parallelism."""
    try:
        trainer_for({"engine": engine, "precision": "fp32"}, [], max_steps=1).fit(OnDTensors(), loader([0]))
    except ConfigError as error:
        return str(error)
    return ""
