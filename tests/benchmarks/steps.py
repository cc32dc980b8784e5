"""Callbacks that write down what ``lit-fsdp fit`` does; recipes of benchmarks name them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.profiler import ProfilerActivity, profile

from lit_fsdp.metrics.hardware import peak_host_bytes, reset_peak_host_bytes
from lit_fsdp.metrics.step_metrics import step_counts


class Steps(Callback):
    """Clock, loss and supervised tokens per step, peak memory, CPU seconds of the start: ``steps.json`` of the run."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {name: [] for name in ("times", "losses", "supervised")}

    def on_train_batch_start(self, *_: Any) -> None:
        """Note what the process used until the first step."""
        self.found.setdefault("start_cpu_seconds", sum(os.times()[:4]))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Note a step; not the batches of which it is accumulated."""
        if trainer.global_step == len(self.found["times"]):
            return
        if not self.found["times"]:
            reset_peak_host_bytes()  # from here on the optimizer state is there
        counts = step_counts(pl_module.step_totals)  # type: ignore[arg-type]
        mean = counts["loss_sum"] / counts["supervised_tokens"]
        self.found["losses"].append(float(trainer.logged_metrics.get("train_loss", mean)))
        self.found["supervised"].append(counts["supervised_tokens"])
        self.found["times"].append(time.time())
        self.found["peak_bytes"] = peak_host_bytes()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            Path(trainer.default_root_dir, "steps.json").write_text(json.dumps(self.found))


class States(Callback):
    """What this rank holds between steps, as ``states-RANK.json`` in the run folder."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Read it back at the second step: the gradients of the first are still there."""
        if trainer.global_step == 1:
            (optimizer,) = trainer.optimizers
            params = list(pl_module.parameters())
            moments = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
            kinds = (params, [param.grad for param in params], moments)
            sums = [sum(getattr(tensor, "_local_tensor", tensor).nbytes for tensor in kind) for kind in kinds]
            Path(trainer.default_root_dir, f"states-{trainer.global_rank}.json").write_text(json.dumps(sums))


class Tensors(Callback):
    """Peak of the second step's tensors, without those from before it, as ``tensors-RANK.json`` in the run folder."""

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Begin without the gradients of the first step, which are freed anyway."""
        if trainer.global_step == 1:
            trainer.optimizers[0].zero_grad()
            self.profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self.profile.start()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Add up what the allocator was asked for and got back, in order of time."""
        if trainer.global_step != 2:
            return
        self.profile.stop()
        results: Any = self.profile.profiler
        events = list(results.kineto_results.experimental_event_tree())
        for event in events:
            events.extend(event.children)  # the list grows while it is read
        found = [(one.start_time_ns, one.extra_fields) for one in events if one.tag.name == "Allocation"]
        live: dict[int, int] = {}
        total = peak = 0
        for _, change in sorted(found, key=lambda one: one[0]):
            # gloo's threads, which the profiler does not see, free some tensors that they have sent: a block counts
            # until its address is allocated again
            total -= live.pop(change.ptr, 0)
            if change.alloc_size > 0:
                total += change.alloc_size
                live[change.ptr] = change.alloc_size
            peak = max(peak, total)
        Path(trainer.default_root_dir, f"tensors-{trainer.global_rank}.json").write_text(json.dumps(peak))
