"""Short real trainings on forked ranks, with something that goes wrong on the way."""

from __future__ import annotations

import logging
import os
import pkgutil
import sys
import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback

from lit_fsdp import Checkpoint
from lit_fsdp.callbacks.stop import StopOnSignal, StopRequested
from lit_fsdp.checkpoint.run_folder import checkpoints
from lit_fsdp.signals import SignalFlags
from tests.dist.jobs import fit, module_for, program
from tests.faults.tracing import Event, StageFile, Tracer, hurt


class StepLog(Callback):
    """Appends ``step loss`` to a file of all attempts after every optimizer step, before it is saved; on rank 0."""

    def __init__(self, path: Path, stage: StageFile) -> None:
        self.path, self.stage, self.seen = path, stage, 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seen = trainer.global_step
        if trainer.is_global_zero:
            with self.path.open("a") as file:
                file.write(f"start {self.seen}\n")

    def on_train_batch_start(self, *_: Any) -> None:
        self.stage.put("training")

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if self.seen < trainer.global_step:
            self.seen = trainer.global_step
            if trainer.is_global_zero:
                with self.path.open("a") as file:
                    file.write(f"{self.seen} {float(trainer.callback_metrics['train_loss'])!r}\n")


def watch(run: str, stage: StageFile, fault: dict[str, Any] | None) -> None:
    """Note the stage of every save; with ``fault``, do harm at the ``nth`` change in ``stage`` of ``step`` or later."""
    seen = 0

    def react(event: Event) -> None:
        nonlocal seen
        stage.put(event.stage)
        if fault is None or os.environ["RANK"] != str(fault["rank"]) or event.stage != fault["stage"]:
            return
        step = fault.get("step")
        if step is None or f"step-{step:08d}" in event.path:
            seen += 1
            if seen == fault.get("nth", 1):
                hurt(fault["how"], event)

    Tracer(Path(run), react)


def train_tracked(
    model: str,
    run: str,
    steps: int,
    log: str,
    strategy: dict[str, Any] | None = None,
    checkpoint: dict[str, Any] | None = None,
    in_save: dict[str, Any] | None = None,
    in_step: dict[str, Any] | None = None,
    hears_signals: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Train up to ``steps``, from the newest checkpoint if there is one; steps and losses go to ``log``.

    ``in_step`` is harm on one rank in the middle of the step after ``step``.
    """
    stage = StageFile(Path(log).with_suffix(f".stage-{os.environ['RANK']}"))
    stage.put("training")
    watch(run, stage, in_save)

    def harm(trainer: Trainer, *rest: Any) -> None:
        if in_step and (trainer.global_rank, trainer.global_step) == (in_step["rank"], in_step["step"]):
            hurt(in_step["how"])

    callbacks: list[Callback] = [StepLog(Path(log), stage), LambdaCallback(on_before_backward=harm)]
    if hears_signals:
        flags = SignalFlags()
        flags.install()
        callbacks.append(StopOnSignal(flags))
    callbacks += [Checkpoint(**{"every_steps": 1, "keep_last": 2, **(checkpoint or {})})]
    resumes = {"ckpt_path": "last" if checkpoints(run) else None, "default_root_dir": run, "seed": 7}
    try:
        trainer, found = fit(module_for(model), strategy or {}, callbacks, None, steps=steps, **resumes, **options)
    except StopRequested as stop:
        sys.exit(stop.exit_code)
    return {"step": trainer.global_step, "digest": found["digest"]}


def crash(words: list[str], cwd: str, where: str) -> None:
    """``lit-fsdp`` as torchrun would start it, raising at ``where`` with the environment's secrets in its words."""

    def fail(*args: Any, **kwargs: Any) -> None:
        token, key = os.environ["HF_TOKEN"], os.environ["WANDB_API_KEY"]
        text = f"made to fail: https://me:{token}@hub/x?token={token} Authorization: Bearer {key}"
        print(text)
        logging.getLogger("somebody").warning(text)
        warnings.warn(text, stacklevel=1)
        raise RuntimeError(text) from KeyError(key)

    if where:
        place, name = where.rsplit(".", 1)
        setattr(pkgutil.resolve_name(place), name, fail)
    program(words, cwd)
