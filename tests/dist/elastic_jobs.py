"""Jobs of test_elastic.py: real rows through the real data module, and everything that must come back, written down."""

from __future__ import annotations

import hashlib
import itertools
import signal
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback

from lit_fsdp import CausalLMDataModule, CausalLMModule, Checkpoint
from lit_fsdp.callbacks.stop import StopOnSignal, StopRequested
from lit_fsdp.signals import SignalFlags
from tests.dist.jobs import Losses, digest, local, module_for, trainer_for

ROWS, STEPS_PER_EPOCH = 45, 6  # of the 69 rows 45 fit: five global batches of eight, and one of five


class FrozenModule(CausalLMModule):
    """Ours, with embeddings and the first block frozen."""

    def build(self) -> CausalLMModule:
        """Freeze before anything is sharded."""
        super().build()
        for name, param in self.named_parameters():
            if "embed_tokens" in name or "layers.0." in name:
                param.requires_grad_(False)
        return self


class ThreeGroups(CausalLMModule):
    """Ours, with three parameter groups, each with its own learning rate and weight decay, and a schedule."""

    def configure_optimizers(self) -> Any:
        """Attention, other matrices, vectors."""
        named = [(name, param) for name, param in self.named_parameters() if param.requires_grad]
        kind = {name: 0 if "attn" in name else 1 if "norm" not in name else 2 for name, _ in named}
        groups = [
            {"params": [p for n, p in named if kind[n] == 0], "lr": 2e-3, "weight_decay": 0.1, "betas": (0.8, 0.9)},
            {"params": [p for n, p in named if kind[n] == 1], "lr": 3e-3, "weight_decay": 0.01},
            {"params": [p for n, p in named if kind[n] == 2], "lr": 5e-3, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW([group for group in groups if group["params"]])
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 10))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


KINDS: dict[str, type[CausalLMModule]] = {"ours": CausalLMModule, "frozen": FrozenModule, "groups": ThreeGroups}


class Witness(Callback):
    """Writes down the rows of each step; at some steps it saves, and keeps the gathered state."""

    def __init__(self, at: list[int], checkpoint: Checkpoint) -> None:
        self.at, self.checkpoint = at, checkpoint
        self.states: dict[int, dict[str, str]] = {}
        self.rows: list[tuple[int, list[int]]] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """What a resumed run starts from."""
        if trainer.global_step:
            self.states[trainer.global_step] = gathered(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.rows.append((trainer.global_step, batch["row"].tolist()))

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        step = trainer.global_step
        if step in self.at and step not in self.states:
            self.states[step] = gathered(trainer)
            self.checkpoint.save(trainer)


def gathered(trainer: Trainer) -> dict[str, str]:
    """A hash of every parameter and optimizer tensor, put together from the ranks' own parts; groups and schedule.

    Both engines split a parameter in the order of its elements over neighboring ranks, so that the parts of the first
    copy, one after the other, are the whole. Nothing of what saves a checkpoint is used here.
    """
    strategy: Any = trainer.strategy
    shards = strategy.mesh.size(strategy.mesh.ndim - 1)
    optimizer: Any = getattr(trainer.optimizers[0], "_optimizer", trainer.optimizers[0])
    names = {id(p): n.replace("_fsdp_wrapped_module.", "") for n, p in trainer.lightning_module.named_parameters()}
    mine = {names[id(param)]: param for param in trainer.lightning_module.parameters()}
    for group in optimizer.param_groups:
        for param in group["params"]:
            mine |= {f"{names[id(param)]}/{key}": value for key, value in optimizer.state.get(param, {}).items()}
    own = {name: torch.as_tensor(local(value)).detach().contiguous().flatten() for name, value in mine.items()}
    parts: list[Any] = [None] * trainer.world_size
    dist.all_gather_object(parts, {name: value.view(torch.uint8).numpy().tobytes() for name, value in own.items()})
    found: dict[str, str] = {}
    for name in sorted(set().union(*parts)):
        copies = [
            b"".join(part.get(name, b"") for part in parts[start : start + shards])
            for start in range(0, trainer.world_size, shards)
        ]
        if name.endswith("/step"):  # one number, on every rank that holds a part
            copies = sorted({part[name] for part in parts if name in part})
        assert len(set(copies)) == 1, f"{name}: the copies differ"
        found[name] = hashlib.sha256(copies[0]).hexdigest()
    for index, group in enumerate(optimizer.param_groups):
        found[f"group {index}"] = repr({key: value for key, value in sorted(group.items()) if key != "params"})
    found["schedule"] = repr([config.scheduler.last_epoch for config in trainer.lr_scheduler_configs])
    return found


def elastic_run(
    folder: str,
    run: str,
    strategy: dict[str, Any],
    kind: str,
    micro: int,
    steps: int,
    ckpt_path: str | None = None,
    data: dict[str, Any] | None = None,
    save_at: list[int] | None = None,
    interrupt: tuple[int, str] | None = None,
) -> dict[str, Any]:
    """Train on generated rows; losses, rates, rows, and the gathered states where it saved or began.

    ``interrupt`` is a micro-batch, and whether the last rank gets a signal there or all fail.
    """
    torch.manual_seed(5)
    losses, flags, checkpoint = Losses(), SignalFlags(), Checkpoint(every_steps=None, keep_last=-1)
    witness = Witness(save_at or [], checkpoint)
    callbacks: list[Any] = [losses, witness, StopOnSignal(flags), checkpoint]
    if interrupt:
        at, how = interrupt
        batches = itertools.count(1)

        def signal_or_raise(trainer: Trainer, *rest: Any) -> None:
            is_now = next(batches) == at
            if is_now and how == "raise":
                raise RuntimeError("killed here")
            if is_now and trainer.global_rank == trainer.world_size - 1:
                flags.receive(signal.SIGTERM)

        callbacks.insert(0, LambdaCallback(on_train_batch_start=signal_or_raise))
    trainer = trainer_for({"precision": "fp32", **strategy}, callbacks, max_steps=steps, default_root_dir=run)
    module = module_for(folder, warmup_steps=4)
    module.__class__ = KINDS[kind]
    given = {"max_seq_length": 40, "global_batch_size": 8, "micro_batch_size": micro, **(data or {})}
    rows = CausalLMDataModule(**{"train": "generated:69", "seed": 3, "cache_dir": f"{run}/../cache", **given})
    stopped = None
    try:
        trainer.fit(module, datamodule=rows, ckpt_path=ckpt_path)
    except (StopRequested, RuntimeError) as error:
        stopped = [getattr(error, "exit_code", str(error)), trainer.global_step]
    live: Any = trainer.strategy
    return {
        "digest": digest(module, trainer.optimizers[0]),
        "realized": live.contract.report()["realized"],
        "losses": losses.values,
        "rates": [[group["lr"] for group in groups] for groups in losses.groups],
        "rows": witness.rows,
        "states": {str(step): state for step, state in witness.states.items()},
        "stopped": stopped,
        "accumulate": trainer.accumulate_grad_batches,
    }
