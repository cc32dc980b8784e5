"""``lit-fsdp fit`` itself, with the time of every optimizer step written down.

    python timed_fit.py OUT.json fit --config RECIPE.yaml ...

Lightning starts the other ranks with this very command line; only rank 0 writes.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from pathlib import Path
from typing import Any

from lit_fsdp.__main__ import main
from lit_fsdp.callbacks.throughput import Throughput
from lit_fsdp.host import is_first_process


def record_steps(times: list[float], cpu: list[float], losses: list[float]) -> None:
    """Note clock, CPU seconds of this process and loss at the end of each step, of one forward each."""
    original = Throughput.on_train_batch_end

    @functools.wraps(original)
    def timed(self: Throughput, trainer: Any, pl_module: Any, *args: Any) -> None:
        original(self, trainer, pl_module, *args)
        losses.append(float(pl_module.step_totals[1] / pl_module.step_totals[0]))
        times.append(time.time())
        cpu.append(time.process_time())

    Throughput.on_train_batch_end = timed  # type: ignore[method-assign]


if __name__ == "__main__":
    recorded: dict[str, list[float]] = {"times": [], "cpu": [], "losses": []}
    writes = is_first_process()  # asked now: the launcher will set LOCAL_RANK here too
    record_steps(**recorded)
    code = main(sys.argv[2:])
    if writes:
        Path(sys.argv[1]).write_text(json.dumps(recorded))
    sys.exit(code)
