"""Summary at the end of a verb: steps, losses, checkpoints, memory, and the next command."""

import math
import shlex
from datetime import timedelta
from pathlib import Path

from lightning.pytorch import Trainer

from lit_fsdp.callbacks.checkpoint import Checkpoint
from lit_fsdp.callbacks.records import why_ended
from lit_fsdp.host import GIB
from lit_fsdp.metrics.hardware import peak_device_bytes
from lit_fsdp.metrics.step_metrics import end_of


def summary_of(trainer: Trainer, verb: str, seconds: float, first_step: int) -> str:
    """Summarize ``fit``, ``validate``, ``test`` or ``predict`` after its end.

    Args:
        trainer: The Trainer, with the last logged metrics.
        verb: One of the four.
        seconds: Duration of the verb.
        first_step: Optimizer steps taken before, e.g. by the run that was resumed.
    """
    folder, took = Path(trainer.default_root_dir), str(timedelta(seconds=round(seconds)))
    memory = f", peak memory {peak_device_bytes(trainer.strategy.root_device) / GIB:.2f} GiB per rank"
    saved = next((c for c in trainer.checkpoint_callbacks if isinstance(c, Checkpoint)), trainer.checkpoint_callback)
    can_export = hasattr(trainer.lightning_module, "read_tensor")
    if verb != "fit":
        took = f"of {trainer.ckpt_path} took {took}" if trainer.ckpt_path else f"took {took}"
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    if verb == "predict":
        path = folder / "predictions.jsonl"
        return f"predict {took}{memory}" + (f"; predictions: {path}" if path.is_file() else "")
    prefix = {"validate": "val_", "test": "test_"}.get(verb, "")
    shown = [name for name in metrics if name.startswith(prefix)] if prefix else ["train_loss", "val_loss"]
    numbers = "".join(f", {name} {metrics[name]:.4f}" for name in shown if name in metrics)
    if verb != "fit":
        path = folder / f"{verb}-metrics.csv"
        lines = [f"{verb} {took}{numbers}{memory}" + (f"; written to {path}" if path.is_file() else "")]
        if trainer.ckpt_path and isinstance(saved, Checkpoint) and can_export:
            command = ["export", "--ckpt", str(trainer.ckpt_path), "--out", f"{folder}/export/model"]
            lines.append(f"next: lit-fsdp {shlex.join(command)}")
        return "\n".join(lines)
    step, epochs = trainer.global_step, trainer.max_epochs or -1
    validated = getattr(trainer.progress_bar_callback, "validated_step", step)  # by our bar
    if "val_loss" in metrics and validated not in (-1, step):
        numbers += f" of step {validated}"
    ended = why_ended(trainer)
    if step == first_step and ended:
        return f"{ended} ended the run before its first step"
    if step == first_step:
        if zero := next((name for name in ("max_steps", "max_epochs") if getattr(trainer, name) == 0), ""):
            return f"trainer.{zero} 0: nothing was trained; set a larger number"
        by_steps = 0 < trainer.max_steps <= step
        limit, value = ("max_steps", trainer.max_steps) if by_steps else ("max_epochs", trainer.max_epochs)
        done = step if by_steps else trainer.current_epoch  # more than the limit, if the limit was lowered
        more = f"--ckpt_path last --trainer.{limit} {2 * max(value or 1, done)}"
        if by_steps and 0 < epochs <= trainer.current_epoch:
            more += " --trainer.max_epochs -1"
        return f"already at trainer.{limit} {value}, step {step}: nothing was trained; to train further, add {more}"
    done = step - first_step
    lines = [f"{done} step{'s' if done != 1 else ''} in {took}, to step {step}{numbers}{memory}"]
    if ended:
        end = end_of(trainer)
        lines.append(f"{ended} ended the run" + (f" before step {int(end)}" if end < math.inf else ""))
    elif step < trainer.max_steps and 0 < epochs <= trainer.current_epoch:
        more = f"to train all {trainer.max_steps} steps, set trainer.max_epochs: -1"
        lines.append(f"trainer.max_epochs {epochs} ended the run before trainer.max_steps; {more}")
    for name in ("best", "last"):
        if path_of := getattr(saved, f"{name}_model_path", ""):
            lines.append(f"{name} checkpoint: {path_of}")
    if isinstance(saved, Checkpoint) and can_export and saved.last_model_path:
        word = "best" if saved.best_model_path else "last"
        command = ["export", "--ckpt", f"{folder}/{word}", "--out", f"{folder}/export/{word}"]
        if saved.exported is not None:
            command = ["generate", "--model", str(saved.exported)]
        lines.append(f"next: lit-fsdp {shlex.join(command)}")
    return "\n".join(lines)
