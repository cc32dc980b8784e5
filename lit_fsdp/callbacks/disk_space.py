"""Room for checkpoints: asked for before the first step and before each save, answered alike on every rank."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lit_fsdp.checkpoint import retention
from lit_fsdp.checkpoint.find import checkpoints
from lit_fsdp.checkpoint.manifest import MANIFEST
from lit_fsdp.checkpoint.ranks import Ranks
from lit_fsdp.checkpoint.space import Budget, Contents, Plan, free_bytes, saved_tensors
from lit_fsdp.config.run import CheckpointConfig, validation_steps
from lit_fsdp.errors import CheckpointError, ConfigError
from lit_fsdp.parallel.base import EngineStrategy
from lit_fsdp.parallel.units import clean_name

_log = logging.getLogger(__name__)


class DiskSpace:
    """Refuses a run, or a save, for which the run folder's file system or ``max_total_gib`` has no room.

    Args:
        config: The ``checkpoint`` section.
        free: How many bytes are free where a folder lies; asked on rank 0.
    """

    def __init__(self, config: CheckpointConfig, free: Callable[[Path], int] = free_bytes) -> None:
        self.config, self.free = config, free
        self._budget: Budget | None = None
        self._own_steps: set[int] = set()

    @property
    def contents(self) -> Contents | None:
        """What one checkpoint consists of, after :meth:`check_run`."""
        return None if self._budget is None else self._budget.contents

    def check_run(self, trainer: Trainer, module: LightningModule) -> None:
        """Compare before step 1 for all checkpoints that will be kept at a time; collective.

        Raises:
            CheckpointError: Not enough room, on every rank.
            ConfigError: ``max_total_gib`` is too small, on every rank.
        """
        strategy: Any = trainer.strategy
        if not isinstance(strategy, EngineStrategy):
            return  # its checkpoints are not ours, and their size is not known here
        contents = _contents(trainer, module)
        run_folder = Path(trainer.default_root_dir)
        self._budget = budget = Budget(self.config, run_folder, contents, lambda folder: self.free(folder))
        plan = _plan(trainer)

        def check() -> None:
            if plan.total_steps is None or trainer.global_step < plan.total_steps:
                _log.info(budget.check_run(checkpoints(run_folder), plan))

        raise_alike(check, "looking for disk space")

    def check_save(self, step: int) -> None:
        """Compare for the checkpoint of ``step``, which is written next; collective.

        Raises:
            CheckpointError: Not enough room, on every rank.
            ConfigError: ``max_total_gib`` is too small, on every rank.
        """
        budget = self._budget
        if budget is None:
            return

        def check() -> None:
            retention.sweep(budget.run_folder / "checkpoints")
            there = checkpoints(budget.run_folder)
            own = [entry for entry in there if entry.step in self._own_steps]
            written = [entry.num_bytes + (entry.path / MANIFEST).stat().st_size for entry in own]
            budget.check_save(there, written)

        raise_alike(check, "looking for disk space")
        self._own_steps.add(step)


def raise_alike(step: Callable[[], None], what: str) -> None:
    """Run ``step`` on rank 0 and raise its CheckpointError or ConfigError, word for word, on every rank.

    Args:
        step: Not collective.
        what: Begins the error when it fails otherwise.
    """

    def attempt() -> Exception | None:
        try:
            step()
        except (CheckpointError, ConfigError) as error:
            return error
        return None

    error = Ranks().first(what, attempt)
    if error is not None:
        raise error


def _contents(trainer: Trainer, module: LightningModule) -> Contents:
    strategy: Any = trainer.strategy
    model = strategy.lightning_module_state_dict()  # collective under FSDP1
    params = [(clean_name(name), param) for name, param in module.named_parameters()]
    tensors, assumed = saved_tensors(model, params, trainer.optimizers)
    files: Mapping[str, Any] = {}
    if trainer.is_global_zero:
        own: Any = getattr(module, "checkpoint_files", None)
        files = {**(own() if own else {}), **strategy.checkpoint_files}
    return Contents(
        tensors=tensors,
        layout=strategy.config.state_dict,
        world_size=trainer.world_size,
        shards=strategy.mesh.size(strategy.mesh.ndim - 1) if strategy.config.is_sharded else 1,
        file_bytes=[len(file) if isinstance(file, bytes) else Path(file).stat().st_size for file in files.values()],
        assumed=assumed,
    )


def _plan(trainer: Trainer) -> Plan:
    limits = [trainer.max_steps] if trainer.max_steps > 0 else []
    if trainer.max_epochs is not None and trainer.max_epochs > 0 and math.isfinite(trainer.estimated_stepping_batches):
        limits.append(int(trainer.estimated_stepping_batches))
    total, interval, per_epoch = min(limits, default=None), trainer.val_check_batch, trainer.num_training_batches
    if total is None or interval is None or not math.isfinite(interval):  # it goes by the clock
        return Plan(total, trainer.enable_validation)
    batches = int(per_epoch) if math.isfinite(per_epoch) else None
    accumulate, every_n = trainer.accumulate_grad_batches, trainer.check_val_every_n_epoch
    found = validation_steps(total, int(interval), accumulate, batches, every_n)
    return Plan(total, trainer.enable_validation, found)
