"""Rates, data wait, FLOP/s and peak memory, from the counts that each step all-reduces anyway."""

import sys
import time
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lit_fsdp.host import GIB
from lit_fsdp.metrics.flops import ModelFlops, flop_formula
from lit_fsdp.metrics.hardware import device_name, peak_device_bytes, peak_flops, peak_reserved_bytes
from lit_fsdp.metrics.step_metrics import end_of, step_counts
from lit_fsdp.parallel.activation import recomputes
from lit_fsdp.parallel.base import EngineStrategy
from lit_fsdp.parallel.units import clean_name


class Throughput(Callback):
    """Logs rates over all ranks between two logged steps, excluding validation, saving and the first step.

    The clock runs from the end of one batch to the end of the next, so waiting for data counts. The host waits for the
    device at logged steps only, and ranks do not communicate. Token counts exclude padding; the metric
    ``padding_share`` is the share of padding positions. The metric ``data_wait_share`` is local to this rank: the time
    between two forward passes. The metric ``model_tflops_per_rank`` is the work for loss and gradients
    (:mod:`lit_fsdp.metrics.flops`), ``mfu`` its share of the device's dense peak at the compute dtype, and ``hfu`` that
    share including recomputation by activation checkpointing; all devices are assumed to be equal, and unknown values
    are not logged.
    """

    _sum: torch.Tensor | None
    _mark: float | None = None  # None: the clock is paused

    def __init__(self) -> None:
        self._formula: ModelFlops | None = None
        self._reason = "the module contains no transformers model"
        self._words: dict[str, str] = {}
        self._peak: float | None = None
        self._ranks = 1

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Read the shapes of the model before they are sharded."""
        module: Any = pl_module
        if stage != "fit" or not hasattr(module, "step_totals"):  # build() of others may do something else
            return
        try:
            self._formula = flop_formula(module.build().model)
        except Exception as error:  # a statistic must not end a run
            self._reason = " ".join(str(error).split()).partition(". ")[0][:200] or type(error).__name__

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start counting."""
        self._seen_step, self._is_warm, self._mark = trainer.global_step, False, None
        self._begin_again()
        missing = self.read_device(trainer, pl_module)
        if missing and trainer.is_global_zero:
            print(missing, file=sys.stderr)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Count the wait for this batch, or start the clock after a pause."""
        now = time.perf_counter()
        if self._mark is None:
            self._mark = now
        self._waited += now - self._mark

    def on_validation_start(self, *hook: Any) -> None:
        """Pause the clock, also for a save."""
        self._mark = None

    on_save_checkpoint = on_validation_start  # type: ignore[assignment]  # whose names the arguments have

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *batch: Any) -> None:
        """Count this batch; after an optimizer step log every ``log_every_n_steps``, and after the last."""
        totals: torch.Tensor | None = getattr(pl_module, "step_totals", None)
        is_step, self._seen_step = trainer.global_step != self._seen_step, trainer.global_step
        counts = None
        if is_step and totals is not None and self._is_warm:
            self._steps += 1
            self._sum = totals if self._sum is None else self._sum + totals
            is_last = trainer.global_step == end_of(trainer)
            if is_last or trainer.global_step % max(1, trainer.log_every_n_steps) == 0:  # type: ignore[attr-defined]
                counts = step_counts(self._sum.tolist())  # waits for the device
        now = time.perf_counter()
        self._seconds += 0.0 if self._mark is None else now - self._mark
        self._mark = now
        if counts is not None and counts["slots"]:  # zero for subclasses with their own training step
            self._log(trainer, pl_module, counts)
        elif is_step and not self._is_warm:
            self._is_warm = True
            self._begin_again()

    def _log(self, trainer: Trainer, pl_module: LightningModule, counts: dict[str, float]) -> None:
        seconds, device = max(self._seconds, 1e-9), trainer.strategy.root_device
        found = {
            **{f"{name}_per_second": counts[name] / seconds for name in ("tokens", "supervised_tokens", "samples")},
            "step_seconds": seconds / self._steps,
            "padding_share": 1 - counts["tokens"] / max(1.0, counts["slots"]),
            "data_wait_share": self._waited / seconds,
            **self.rates(counts, seconds),
            "peak_memory_gib": peak_device_bytes(device) / GIB,
        }
        reserved = peak_reserved_bytes(device)
        pl_module.log_dict(found if reserved is None else found | {"peak_reserved_gib": reserved / GIB})
        self._begin_again()

    def _begin_again(self) -> None:
        self._sum, self._seconds, self._waited, self._steps = None, 0.0, 0.0, 0

    def read_device(self, trainer: Trainer, pl_module: LightningModule) -> str:
        """Read the device's peak and the recomputation of the live blocks; return why MFU is unknown, if so."""
        if self._formula is None:
            return f"MFU is not logged, as FLOPs are not counted: {self._reason}"
        live = {clean_name(name): module for name, module in pl_module.named_modules()}
        blocks: dict[str, Any] = {name: live.get(f"model.{name}") for name in self._formula.blocks}
        self._words = {name: recomputes(getattr(block, "module", block)) for name, block in blocks.items() if block}
        self._ranks, device, multiplies = trainer.world_size, trainer.strategy.root_device, _multiplies(trainer)
        name = device_name(device)
        self._peak = peak_flops(name, multiplies)
        text = f"MFU (share of the peak rate) is not logged: the {multiplies} rate of {name} is unknown"
        return "" if self._peak else text

    def rates(self, counts: Mapping[str, float], seconds: float) -> dict[str, float]:
        """The known values of ``model_tflops_per_rank``, ``mfu`` and ``hfu``; counts are over all ranks."""
        if self._formula is None:
            return {}
        useful = self._formula.train_flops(counts) / seconds / self._ranks
        found = {"model_tflops_per_rank": useful / 1e12}
        if self._peak is not None:
            found["mfu"] = useful / self._peak
            again = self._formula.recomputed_flops(counts, self._words)
            if again is not None:
                found["hfu"] = (useful + again / seconds / self._ranks) / self._peak
        return found


def _multiplies(trainer: Trainer) -> str:
    """Dtype of matrix products: the compute dtype, or tf32 instead of fp32 if torch allows it."""
    if isinstance(trainer.strategy, EngineStrategy):
        precision = trainer.strategy.config.precision_config
        dtype = "fp8" if precision.mode == "fp8" else precision.row.compute
    else:
        word = str(trainer.precision)
        dtype = "bf16" if "bf16" in word else "fp16" if word.startswith("16") else "fp32"
    return "tf32" if dtype == "fp32" and torch.get_float32_matmul_precision() != "highest" else dtype
