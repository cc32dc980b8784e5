"""FLOP/s of a live run, and their share of what the device could do: MFU and HFU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn

from lit_fsdp.metrics.flops import ModelFlops, flop_formula
from lit_fsdp.metrics.hardware import peak_flops
from lit_fsdp.parallel.activation import recomputes
from lit_fsdp.parallel.base import EngineStrategy


class FlopMeter:
    """Counts as :mod:`lit_fsdp.metrics.flops` says: per rank, and against the peak of this rank's device.

    ``model_tflops_per_rank`` is the work that loss and gradients need, ``mfu`` its share of the device's dense peak at
    the compute dtype, ``hfu`` that share with what activation checkpointing computes again. All devices are taken to
    be of one kind.
    """

    def __init__(self) -> None:
        self._formula: ModelFlops | None = None
        self._reason = "the module holds no transformers model"
        self._words: dict[str, str] = {}
        self._peak: float | None = None
        self._ranks = 1
        self._knows_recomputed = True

    def read_shapes(self, pl_module: LightningModule) -> None:
        """Find the formula, from a ``CausalLMModule`` that is not sharded yet."""
        build = getattr(pl_module, "build", None)
        model = getattr(build(), "model", None) if callable(build) else None
        if not isinstance(model, nn.Module):
            return
        try:
            self._formula = flop_formula(model)
        except Exception as error:  # a statistic ends no run, whatever an architecture has in its config
            self._reason = " ".join(str(error).split()).partition(". ")[0][:200] or type(error).__name__

    def read_device(self, trainer: Trainer, pl_module: LightningModule) -> list[str]:
        """Find the device's peak and what the live blocks recompute; returns what cannot be known, as sentences."""
        if self._formula is None:
            return [f"MFU –: FLOPs are not counted: {self._reason}"]
        live = {name.replace("_fsdp_wrapped_module.", ""): module for name, module in pl_module.named_modules()}
        live_blocks = {name: live[f"model.{name}"] for name in self._formula.blocks if f"model.{name}" in live}
        self._words = {name: recomputes(getattr(block, "module", block)) for name, block in live_blocks.items()}
        self._ranks = trainer.world_size
        device, multiplies = trainer.strategy.root_device, _multiplies(trainer)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()
        self._peak = peak_flops(name, multiplies)
        self._knows_recomputed = self._knows(trainer)
        if self._peak is None:
            return [f"MFU –: no peak rate is known for {multiplies} on {name}"]
        return [] if self._knows_recomputed else ["HFU –: what is recomputed is up to the compiler or to chosen ops"]

    def rates(self, counts: Mapping[str, float], seconds: float) -> dict[str, float]:
        """Those of ``model_tflops_per_rank``, ``mfu`` and ``hfu`` that are known; the counts are over all ranks."""
        if self._formula is None:
            return {}
        useful = self._formula.train_flops(counts) / seconds / self._ranks
        found = {"model_tflops_per_rank": useful / 1e12}
        if self._peak is None:
            return found
        found["mfu"] = useful / self._peak
        again = self._formula.recomputed_flops(counts, self._words) if self._knows_recomputed else None
        if again is not None:
            found["hfu"] = (useful + again / seconds / self._ranks) / self._peak
        return found

    def _knows(self, trainer: Trainer) -> bool:
        strategy = trainer.strategy
        if isinstance(strategy, EngineStrategy) and strategy.config.activation_config.ops is not None:
            return False  # products may be among the ops that are not kept
        return all(word.partition(",")[0] in ("no", "full", "selective") for word in self._words.values())


def _multiplies(trainer: Trainer) -> str:
    """What the device's products are made of: the compute dtype; for fp32, tf32 where torch was told that it may be."""
    if isinstance(trainer.strategy, EngineStrategy):
        precision = trainer.strategy.config.precision_config
        dtype = "fp8" if precision.mode == "fp8" else precision.row.compute
    else:
        word: Any = trainer.precision
        dtype = "bf16" if "bf16" in str(word) else "fp16" if str(word).startswith("16") else "fp32"
    if dtype == "fp32" and torch.get_float32_matmul_precision() != "highest":
        return "tf32"
    return dtype
