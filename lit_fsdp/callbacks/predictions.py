"""Scores of ``predict`` as one file in row order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer


class PredictionWriter(Callback):
    """Gathers what each rank scored and writes ``predictions.jsonl`` to the run folder, one line per row."""

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keep this rank's rows."""
        self._rows.extend(outputs)

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write all rows, sorted, on rank 0."""
        parts: list[Any] = [self._rows]
        if dist.is_available() and dist.is_initialized():
            parts = [None] * trainer.world_size
            dist.all_gather_object(parts, self._rows)
        if trainer.is_global_zero:
            rows = sorted((row for part in parts for row in part), key=lambda row: row["row"])
            path = Path(trainer.default_root_dir) / "predictions.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        self._rows = []
