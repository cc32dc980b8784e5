"""What a rank really keeps between steps, read from the storages of its tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from tests.dist.jobs import fit, local, module_for


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
    kept, module = Kept(), module_for(folder, model)
    trainer, found = fit(module, strategy, [kept], steps=2)
    optimizer: Any = trainer.optimizers[0]
    moments = [values[name] for values in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    return {
        "audit": found["audit"],
        "kept": {
            "num_params": found["local_numel"] + 3 * _packed_numel(module),
            "parameter_bytes": _storage_bytes(module.parameters()),
            "gradient_bytes": kept.gradient_bytes,
            "optimizer_bytes": sum(local(m).numel() * m.element_size() for m in moments),
            **_scales(module),
        },
    }


def _packed_numel(module: torch.nn.Module) -> int:
    """Numbers on this rank with four weights each."""
    return sum(local(layer.weight).numel() for layer in module.modules() if hasattr(layer, "quant_state"))


def _scales(module: torch.nn.Module) -> dict[str, int]:
    """Bytes that unpack 4-bit weights; the code book of doubly quantized scales is one for all layers."""
    states: list[Any] = [layer.quant_state for layer in module.modules() if hasattr(layer, "quant_state")]
    tensors = [[s.absmax, s.code, *([s.offset, s.state2.absmax] if s.nested else [])] for s in states]
    return {"quantization_bytes": sum(t.nbytes for found in tensors for t in found)} if states else {}


def _storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    storages = {s.data_ptr(): s.nbytes() for s in (local(t).untyped_storage() for t in tensors)}
    return sum(storages.values())
