"""What the workers run; each function is called on every rank."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lit_fsdp import CausalLMModule, Checkpoint, fsdp_strategy
from tests.dist.reference import LEARNING_RATE, ROWS, global_batch

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Micro-batches of one rank: global batch g is cut into accumulation steps, each into ranks."""

    def __init__(self, rank: int, ranks: int, accumulate: int) -> None:
        self.rank, self.ranks, self.accumulate = rank, ranks, accumulate

    def __len__(self) -> int:
        return 1000 * self.accumulate

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        step, micro = divmod(index, self.accumulate)
        size = ROWS // self.accumulate // self.ranks
        start = (micro * self.ranks + self.rank) * size
        return {name: tensor[start : start + size] for name, tensor in global_batch(step).items()}


class FromStep(IterableDataset[dict[str, torch.Tensor]]):
    """:class:`Rows` from the Trainer's step on, over epochs of ten global batches."""

    def __init__(self, rows: Rows, trainer: Trainer) -> None:
        self.rows, self.trainer = rows, trainer

    def __len__(self) -> int:
        return 10 * self.rows.accumulate

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for index in range(self.trainer.global_step * self.rows.accumulate, len(self.rows)):
            yield self.rows[index]


class TinyData(LightningDataModule):
    """Feeds :class:`Rows` to whatever Trainer it is given to."""

    def train_dataloader(self) -> DataLoader[Any]:
        """One loader per rank."""
        assert self.trainer is not None
        rows = Rows(self.trainer.global_rank, self.trainer.world_size, self.trainer.accumulate_grad_batches)
        own = torch.Generator()  # a loader would draw from the global one at every epoch
        return DataLoader(FromStep(rows, self.trainer), batch_size=None, generator=own)


class TinyDataWithValidation(TinyData):
    """Adds one validation batch, the same on every rank."""

    def val_dataloader(self) -> DataLoader[Any]:
        """One batch."""
        return DataLoader([global_batch(500)], batch_size=None, generator=torch.Generator())


class Losses(Callback):
    """Collects the logged loss after every optimizer step."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self.step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A resumed run starts later."""
        self.step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Once per optimizer step."""
        if self.step < trainer.global_step:
            self.step = trainer.global_step
            self.values.append(float(trainer.callback_metrics["train_loss"]))


def trainer_for(strategy: dict[str, Any], callbacks: list[Callback], **options: Any) -> Trainer:
    """A quiet Trainer on as many CPU ranks as this job has."""
    import os

    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": int(os.environ["WORLD_SIZE"]),
        "logger": False,
        "enable_checkpointing": any(isinstance(c, Checkpoint) for c in callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "max_epochs": -1,
    }
    return Trainer(strategy=fsdp_strategy(**strategy), callbacks=callbacks, **{**defaults, **options})


def module_for(folder: str, **optim: Any) -> CausalLMModule:
    """Our module on a model folder with the reference's optimizer."""
    options = {"lr": LEARNING_RATE, "schedule": "constant", "weight_decay": 0.1, **optim}
    return CausalLMModule(name=folder, optim=options)


def digest(module: LightningModule, optimizer: torch.optim.Optimizer) -> str:
    """A hash over all local parameters and optimizer tensors of this rank, bit for bit."""
    found = hashlib.sha256()
    for group in optimizer.param_groups:
        for param in group["params"]:
            for tensor in (param, *(v for v in optimizer.state[param].values() if torch.is_tensor(v))):
                local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
                found.update(local.detach().contiguous().view(torch.uint8).numpy().tobytes() if local.dim() else b"")
    return found.hexdigest()


def train_with_checkpoints(
    folder: str,
    run: str,
    strategy: dict[str, Any],
    steps: int,
    ckpt_path: str | None = None,
    every: int | None = 5,
    **options: Any,
) -> dict[str, Any]:
    """A run with dropout that saves every five steps; losses, learning rates and a hash of its state at the end."""
    torch.manual_seed(7)
    losses = Losses()
    trainer = trainer_for(
        strategy,
        [losses, Checkpoint(every_steps=every, keep_last=-1)],
        max_steps=steps,
        default_root_dir=run,
        **options,
    )
    module = module_for(folder, schedule="constant", warmup_steps=8)
    data = TinyDataWithValidation() if "val_check_interval" in options else TinyData()
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    optimizer: Any = trainer.optimizers[0]
    live: Any = trainer.strategy
    return {
        "losses": losses.values,
        "epoch": trainer.current_epoch,
        "lr": optimizer.param_groups[0]["lr"],
        "digest": digest(module, getattr(optimizer, "optimizer", optimizer)),
        "realised": live.contract.report()["realised"],
    }


def train(folder: str, strategy: dict[str, Any], steps: int = 10, **options: Any) -> dict[str, Any]:
    """Losses, audit, dtypes and gathered parameters (as sums) of a short run."""
    torch.manual_seed(0)
    losses = Losses()
    trainer = trainer_for(strategy, [losses], max_steps=steps, **options)
    module = module_for(folder)
    trainer.fit(module, datamodule=TinyData())
    live: Any = trainer.strategy
    local = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in module.parameters())
    return {
        "losses": losses.values,
        "audit": live.audit,
        "dtypes": live.contract.report(),
        "local_numel": local,
        "type": type(live).__name__,
    }


def foreign_rows(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight rows of a regression."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, 12, generator=generator)
    return x, x.sum(dim=1, keepdim=True).sin()


class ForeignNet(LightningModule):
    """Somebody's module: knows nothing of ours, holds a parameter itself and calls itself in its step."""

    def __init__(self) -> None:
        super().__init__()
        blocks = (torch.nn.Sequential(torch.nn.Linear(12, 12), torch.nn.Tanh()) for _ in range(3))
        self.layers = torch.nn.ModuleList(blocks)
        self.head = torch.nn.Linear(12, 1)
        self.scale = torch.nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A prediction per row."""
        for layer in self.layers:
            x = layer(x)
        return self.head(x) * self.scale.mean()

    def reset_parameters(self) -> None:
        """For those who build it on meta."""
        torch.nn.init.ones_(self.scale)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """The mean over this rank's rows."""
        x, y = batch
        loss = torch.nn.functional.mse_loss(self(x), y)
        self.log("loss", loss.detach(), sync_dist=True)
        return loss

    def test_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> None:
        """After fit, in the same Trainer."""
        x, y = batch
        self.log("test_loss", torch.nn.functional.mse_loss(self(x), y), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class MetaForeignNet(LightningModule):
    """The same, built on meta in configure_model."""

    def configure_model(self) -> None:
        """On meta; the strategy fills it."""
        if not hasattr(self, "net"):
            with torch.device("meta"):
                self.net = ForeignNet()

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """The mean over this rank's rows."""
        loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss.detach(), sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class StepLosses(Callback):
    """The mean of the micro-batch losses of each optimizer step."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self._window: list[float] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Once per micro-batch."""
        self._window.append(float(trainer.callback_metrics["loss"]))
        if len(self._window) == trainer.accumulate_grad_batches:
            self.values.append(sum(self._window) / len(self._window))
            self._window = []


def train_foreign(
    strategy: dict[str, Any], steps: int, accumulate_grad_batches: int = 1, meta: bool = False, **options: Any
) -> dict[str, Any]:
    """Train somebody's module; on rank 1 it starts from other weights, which must not matter."""
    import os

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(11 if meta else 11 + rank)
    losses = StepLosses()
    trainer = trainer_for(
        strategy, [losses], max_steps=steps, accumulate_grad_batches=accumulate_grad_batches, **options
    )
    size = 8 // ranks // accumulate_grad_batches
    batches = []
    for step in range(steps):
        for micro in range(accumulate_grad_batches):
            start = (micro * ranks + rank) * size
            batches.append(tuple(part[start : start + size] for part in foreign_rows(step)))
    module = MetaForeignNet() if meta else ForeignNet()
    trainer.fit(module, DataLoader(batches, batch_size=None))
    live: Any = trainer.strategy
    found = {"losses": losses.values, "units": [unit["name"] for unit in live.audit["units"]]}
    if not meta:
        tested = trainer.test(module, DataLoader(batches[:1], batch_size=None), verbose=False)
        found["test_loss"] = tested[0]["test_loss"]
    return found


def train_and_keep_weights(folder: str, run: str, strategy: dict[str, Any], weights: str) -> None:
    """Three steps, a checkpoint, and the live weights gathered tensor by tensor, as a file of rank 0."""
    import torch.distributed as dist

    torch.manual_seed(0)
    trainer = trainer_for(strategy, [Checkpoint(every_steps=3)], max_steps=3, default_root_dir=run)
    module = module_for(folder)
    trainer.fit(module, datamodule=TinyData())
    state = trainer.strategy.lightning_module_state_dict()
    full = {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in state.items()}
    if dist.get_rank() == 0:
        torch.save({name.removeprefix("model."): tensor for name, tensor in full.items()}, weights)
