"""Records the results of each step of a run, for ``lit-fsdp parity``."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lit_fsdp.checkpoint.storage import whole_tensor
from lit_fsdp.config.strategy import LIGHTNING_PRECISION, PrecisionConfig
from lit_fsdp.parallel.units import clean_name
from lit_fsdp.parity.trace import Trace


class StepTrace(Callback):
    """Records loss, gradient norm (with strategies of lit_fsdp) and trained weights after each step.

    The ``file`` is written at the end, with the attributes of a :class:`lit_fsdp.parity.trace.Trace`.
    """

    def __init__(self, file: str) -> None:
        self.file = file

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the initial weights."""
        given = getattr(trainer.strategy, "config", None)
        lightnings = PrecisionConfig(mode=LIGHTNING_PRECISION.get(str(trainer.precision), "low_precision"))
        row = given.precision_config.row if given else lightnings.row
        self.trace = Trace(row.compute, row.reduce)
        self._note(trainer, pl_module, 0.0)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record a completed step."""
        if trainer.global_step == len(self.trace.losses):
            self._note(trainer, pl_module, trainer.callback_metrics.get("train_loss"))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the record."""
        if trainer.is_global_zero:
            torch.save(vars(self.trace), self.file)

    def _note(self, trainer: Trainer, module: LightningModule, loss: Any) -> None:
        trained = {clean_name(name) for name, param in module.named_parameters() if param.requires_grad}
        state = trainer.strategy.lightning_module_state_dict()
        whole = ((name, whole_tensor(state[name])) for name in sorted(trained & state.keys()))  # on all ranks together
        norm = getattr(trainer.precision_plugin, "last_grad_norm", None)
        loss, norm = (None if value is None else float(value) for value in (loss, norm))
        self.trace.add(loss, norm, whole)
