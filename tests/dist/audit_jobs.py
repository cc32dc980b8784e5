"""What a rank really keeps between steps, read from the storages of its tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from tests.dist.jobs import TinyData, module_for, trainer_for
from tests.dist.lora_jobs import lora_module


class Kept(Callback):
    """Bytes of storages behind parameters, gradients and AdamW's moments, each storage once."""

    def __init__(self) -> None:
        self.gradient_bytes = 0

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Gradients are there only now."""
        self.gradient_bytes = _storage_bytes(p.grad for p in pl_module.parameters() if p.grad is not None)


def kept_by_a_rank(
    folder: str, strategy: dict[str, Any], num_nodes: int = 1, model: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The audit of two steps, and what this rank holds after them."""
    kept = Kept()
    trainer = trainer_for(strategy, [kept], max_steps=2)
    module = lora_module(folder, **model) if model else module_for(folder)
    trainer.fit(module, datamodule=TinyData())
    live: Any = trainer.strategy
    optimizer: Any = trainer.optimizers[0]
    state = getattr(optimizer, "optimizer", optimizer).state
    moments = [values[name] for values in state.values() for name in ("exp_avg", "exp_avg_sq")]
    return {
        "audit": live.audit,
        "kept": {
            "num_params": sum(_local(p).numel() for p in module.parameters()) + 3 * _packed_numel(module),
            "parameter_bytes": _storage_bytes(module.parameters()),
            "gradient_bytes": kept.gradient_bytes,
            "optimizer_bytes": sum(_local(m).numel() * m.element_size() for m in moments),
            **_scales(module),
        },
    }


def _packed_numel(module: torch.nn.Module) -> int:
    """Numbers on this rank with four weights each."""
    return sum(_local(layer.weight).numel() for layer in module.modules() if hasattr(layer, "quant_state"))


def _scales(module: torch.nn.Module) -> dict[str, int]:
    """Bytes that unpack 4-bit weights; the code book of doubly quantized scales is one for all layers."""
    states: list[Any] = [layer.quant_state for layer in module.modules() if hasattr(layer, "quant_state")]
    tensors = [[s.absmax, s.code, *([s.offset, s.state2.absmax] if s.nested else [])] for s in states]
    return {"quantization_bytes": sum(t.nbytes for found in tensors for t in found)} if states else {}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    storages = {s.data_ptr(): s.nbytes() for s in (_local(t).untyped_storage() for t in tensors)}
    return sum(storages.values())
