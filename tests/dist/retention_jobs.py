"""Runs on a disk as full as a test says, or whose old checkpoints cannot be removed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader

from lit_fsdp import Checkpoint
from lit_fsdp.checkpoint import disk_space, run_folder
from lit_fsdp.checkpoint.run_folder import checkpoints
from lit_fsdp.errors import CheckpointError, ConfigError
from tests.dist.jobs import trainer_for


class WideNet(LightningModule):
    """Large enough that a checkpoint is mostly tensors; one layer is frozen, one bias has rows to spare."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(513, 513) for _ in range(4))
        self.layers[1].requires_grad_(False)
        self.register_buffer("scale", torch.ones(7))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        for layer in self.layers:
            batch = layer(batch).tanh()
        loss = (batch * self.scale.mean()).square().mean()
        self.log("loss", loss.detach(), sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3)


def fit_with_room(
    strategy: dict[str, Any],
    run: str,
    steps: int,
    free: list[int] | None = None,
    broken: str | None = None,
    ckpt_path: str | None = None,
    unseen: int = 0,
    **options: Any,
) -> dict[str, Any]:
    """Train; ``free`` are the free bytes at each look (the last one stays), ``broken`` a folder that cannot go.

    Rank 1 does not see the ``unseen`` newest checkpoints, as on NFS with a stale
    cache.
    """
    torch.manual_seed(3)
    callback: Any = Checkpoint(**options)
    remove = run_folder.remove
    if free is not None:
        disk_space.free_bytes = lambda folder: free.pop(0) if len(free) > 1 else free[0]

    survey = run_folder.survey
    if unseen and os.environ["RANK"] == "1":
        run_folder.survey = lambda folder: survey(folder)[:-unseen]

    def removal(folder: Path) -> None:
        if folder.name == broken:
            raise CheckpointError(f"{folder}: cannot be deleted")
        remove(folder)

    run_folder.remove = removal
    trainer = trainer_for(strategy, [callback], max_steps=steps, default_root_dir=run)
    rows = DataLoader([torch.ones(2, 513)] * steps, batch_size=None)
    error = None
    try:
        trainer.fit(WideNet(), rows, ckpt_path=ckpt_path)
    except (CheckpointError, ConfigError) as caught:
        error = str(caught)
    run_folder.survey = survey
    return {
        "error": error,
        "loaded": str(getattr(trainer.strategy, "loaded_checkpoint", None)),
        "taken": trainer.global_step,
        "estimate": callback._checkpoint_bytes,
        "there": [entry.step for entry in checkpoints(Path(run))],
    }
