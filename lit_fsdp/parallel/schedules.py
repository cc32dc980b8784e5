"""Find schedulers that Lightning would not step before the end of a run."""

import math
from collections.abc import Iterable
from typing import Any

_FIX = 'return {"optimizer": ..., "lr_scheduler": {"scheduler": ..., "interval": "step"}} from configure_optimizers'


def idle_schedulers(trainer: Any, configs: Iterable[Any]) -> list[str]:
    """Describe each scheduler that does not step before the last optimizer step of a run, so has no effect.

    Lightning steps schedulers with interval ``epoch`` after whole epochs, and those with interval ``step`` after an
    optimizer step at a *batch* of the epoch whose number is divisible by ``frequency``. Unknown lengths, such as that
    of a loader, are assumed to be long enough.
    """
    batches, accumulate, epochs = trainer.num_training_batches, trainer.accumulate_grad_batches, trainer.max_epochs
    if math.isinf(batches) or trainer.fast_dev_run or not trainer.lightning_module.automatic_optimization:
        return []
    steps = math.ceil(batches / accumulate)
    last = min([n for n in (trainer.max_steps, steps * (epochs or 0)) if n > 0], default=math.inf)
    found = []
    for config in configs:
        fix, name, every = _FIX, type(config.scheduler).__name__, config.frequency
        if config.interval == "epoch":
            first: float = every * steps
            at = f"after every {every} epochs of {steps} steps" if every > 1 else f"after every epoch of {steps} steps"
        else:
            numbers = (n for n in range(every, batches + 1, every) if n % accumulate == 0 or n == batches)
            first = math.ceil(next(numbers, 0) / accumulate) or math.inf
            at = f"at batch numbers divisible by {every} that end an optimizer step ({batches} batches per epoch)"
        if first >= last > 1:
            end = f"this run ends after {last} steps" if first < math.inf else "no batch matches"
            found.append(f"{name} has no effect: Lightning steps it {at}, but {end}; {fix}")
    return found
