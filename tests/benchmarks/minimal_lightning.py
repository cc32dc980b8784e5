"""The shortest Lightning script that trains a transformers model on sharded processes.

python minimal_lightning.py WORKLOAD_FOLDER OUT.json RANKS
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM
from work import CLIP_NORM, OPTIM

FOLDER, OUT, RANKS = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
QUIET = ("use_distributed_sampler", "logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")


class Module(LightningModule):
    """A causal LM with its mean loss, which ends after its first step."""

    def __init__(self) -> None:
        super().__init__()
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = AutoModelForCausalLM.from_pretrained(FOLDER / "model", dtype=torch.float32).train()
            mesh, policy = self.device_mesh["data_parallel"], MixedPrecisionPolicy(torch.bfloat16, torch.float32)
            for part in (*self.model.model.layers, self.model):
                fully_shard(part, mesh=mesh, mp_policy=policy)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}
        return self.model(**inputs, use_cache=False).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=OPTIM["lr"], fused=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = self.trainer.strategy.reduce(outputs["loss"].detach(), reduce_op="mean")
        if self.trainer.is_global_zero:
            OUT.write_text(json.dumps({"losses": [float(loss)], "times": [time.time()]}))

    def train_dataloader(self) -> DataLoader[Any]:
        batches = torch.load(FOLDER / f"batches-{self.trainer.global_rank}-of-{RANKS}.pt", weights_only=True)
        return DataLoader(batches, batch_size=None)


if __name__ == "__main__":
    options: dict[str, Any] = {"accelerator": "cpu", "devices": RANKS, "max_steps": 1, "gradient_clip_val": CLIP_NORM}
    Trainer(**options, strategy=ModelParallelStrategy(), **dict.fromkeys(QUIET, False)).fit(Module())
