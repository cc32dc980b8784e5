"""Writes down what each of the first steps of a run comes to, for ``lit-fsdp parity``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.distributed.tensor import DTensor

from lit_fsdp.config.strategy import LIGHTNING_PRECISION, DtypeRow, PrecisionConfig
from lit_fsdp.parallel.base import EngineStrategy
from lit_fsdp.parallel.units import clean_name
from lit_fsdp.parity.trace import sampled, write_step


class StepTrace(Callback):
    """Writes loss, gradient norm and trained weights after each step, and ends the run after so many.

    Args:
        folder: What is written to; see :func:`lit_fsdp.parity.trace.write_step`.
        steps: After which the run ends; its schedule is not changed.
    """

    def __init__(self, folder: str, steps: int) -> None:
        self.folder, self.steps = Path(folder), steps
        self._seen = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write down the weights that it starts from."""
        self._write(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write down a step that has been taken."""
        if trainer.global_step != self._seen:
            self._seen = trainer.global_step
            self._write(trainer, pl_module)
            trainer.should_stop = trainer.should_stop or self._seen >= self.steps

    def _write(self, trainer: Trainer, module: LightningModule) -> None:
        trained = {clean_name(name) for name, param in module.named_parameters() if param.requires_grad}
        weights = {}
        for name, tensor in sorted(trainer.strategy.lightning_module_state_dict().items()):
            if name in trained:
                on_device = tensor.to(trainer.strategy.root_device)  # what is offloaded could not be gathered
                weights[name] = sampled(on_device.full_tensor() if isinstance(on_device, DTensor) else on_device)
        if trainer.is_global_zero:
            loss = trainer.callback_metrics.get("train_loss", 0.0 if self._seen == 0 else math.nan)
            norm = getattr(trainer.precision_plugin, "last_grad_norm", None)
            write_step(
                self.folder, self._seen, float(loss), None if norm is None else float(norm), weights, _dtypes(trainer)
            )


def _dtypes(trainer: Trainer) -> DtypeRow:
    if isinstance(trainer.strategy, EngineStrategy):
        return trainer.strategy.config.precision_config.row
    mode = LIGHTNING_PRECISION.get(str(trainer.precision), "low_precision")  # of somebody else's strategy
    return PrecisionConfig(mode=mode).row
