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
    saves = any(isinstance(c, Checkpoint) for c in callbacks)
    return lightnings_trainer(
        callbacks, **{"strategy": fsdp_strategy(**strategy), "enable_checkpointing": saves, **options}
    )


def lightnings_trainer(callbacks: list[Callback], **options: Any) -> Trainer:
    """The same with a strategy of Lightning's own, DDP by default."""
    import os

    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": int(os.environ["WORLD_SIZE"]),
        "strategy": "ddp",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "max_epochs": -1,
    }
    return Trainer(callbacks=callbacks, **{**defaults, **options})


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
        "realized": live.contract.report()["realized"],
    }


class Told(Callback):
    """Collects what the optimizer is told at each step: groups of everything but parameters."""

    def __init__(self) -> None:
        self.steps: list[list[dict[str, Any]]] = []

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Once per step."""
        self.steps.append([{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups])


def train_and_tell(
    folder: str, run: str, strategy: dict[str, Any], optim: dict[str, Any], steps: int, ckpt_path: str | None = None
) -> list[list[dict[str, Any]]]:
    """A run that is saved at its end: what the optimizer was told at each step."""
    told = Told()
    trainer = trainer_for(strategy, [told, Checkpoint()], max_steps=steps, default_root_dir=run)
    trainer.fit(CausalLMModule(name=folder, optim=optim), datamodule=TinyData(), ckpt_path=ckpt_path)
    return told.steps


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


def command(words: list[str], cwd: str) -> dict[str, Any]:
    """``lit-fsdp`` as one of several ranks that somebody else started, as torchrun would: exit code, out, err."""
    import contextlib
    import io
    import os

    from lit_fsdp.__main__ import main

    before, out, err = os.getcwd(), io.StringIO(), io.StringIO()
    os.chdir(cwd)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code: Any = main(words)
    except SystemExit as end:  # after --print_config
        code = end.code
    finally:
        os.chdir(before)
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}
