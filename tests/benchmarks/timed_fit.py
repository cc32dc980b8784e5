"""``lit-fsdp fit`` itself, with the time of every optimizer step written down.

    python timed_fit.py OUT.json fit --config RECIPE.yaml ...

The other ranks are started with this very command line, before rank 0 imports anything heavy; only rank 0 writes, so
nothing heavy is imported here until then.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from pathlib import Path
from typing import Any

from lit_fsdp.__main__ import main
from lit_fsdp.host import is_first_process
from lit_fsdp.launch.ranks import RANKS


def record_steps(recorded: dict[str, Any]) -> None:
    """Note clock, loss and supervised tokens at the end of each optimizer step, and peak memory."""
    from lit_fsdp.callbacks.throughput import Throughput
    from lit_fsdp.metrics.hardware import peak_host_bytes, reset_peak_host_bytes
    from lit_fsdp.metrics.step_metrics import step_counts

    original = Throughput.on_train_batch_end

    @functools.wraps(original)
    def timed(self: Throughput, trainer: Any, pl_module: Any, *args: Any) -> None:
        original(self, trainer, pl_module, *args)
        if trainer.global_step == len(recorded["times"]):
            return  # inside an accumulation
        if not recorded["times"]:
            reset_peak_host_bytes()  # from here on the optimizer state is there
        counts = step_counts(pl_module.step_totals)
        recorded["losses"].append(counts["loss_sum"] / counts["supervised_tokens"])
        recorded["supervised"].append(counts["supervised_tokens"])
        recorded["times"].append(time.time())
        recorded["peak_bytes"] = peak_host_bytes()

    Throughput.on_train_batch_end = timed  # type: ignore[method-assign]


if __name__ == "__main__":
    recorded: dict[str, Any] = {name: [] for name in ("times", "losses", "supervised")}
    writes = is_first_process()  # asked now: the launcher will set LOCAL_RANK here too
    start = RANKS.start

    def start_then_record(trainer: Any) -> None:
        start(trainer)
        record_steps(recorded)

    RANKS.start = start_then_record  # type: ignore[method-assign]
    code = main(sys.argv[2:])
    if writes:
        Path(sys.argv[1]).write_text(json.dumps(recorded))
    sys.exit(code)
