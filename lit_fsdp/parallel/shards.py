"""What each rank keeps between steps, from shapes alone, as the two engines split them.

FSDP2 cuts every parameter along dim 0 into chunks of ``ceil(rows / ranks)`` rows and pads the last ones in storage.
FSDP1 lays the parameters of a unit end to end, each at a multiple of 16 bytes, pads the whole to a multiple of the
ranks and cuts it into equal parts, wherever that falls.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lit_fsdp.config.strategy import StrategyConfig
from lit_fsdp.parallel.precision import TORCH_DTYPES
from lit_fsdp.parallel.units import UnitPlan

_ALIGNMENT_BYTES = 16  # of a parameter inside FSDP1's flat one


@dataclass
class _Held:
    """Elements that one rank holds."""

    params: int = 0
    trainable: int = 0
    stored: int = 0
    """Elements of ``params`` with padding."""
    stored_gradients: int = 0


def state_per_rank(model: nn.Module, plan: UnitPlan, config: StrategyConfig, ranks: int) -> list[dict[str, int]]:
    """What the ranks that share one copy of the model keep between steps; every copy repeats it.

    Counts parameters and gradients at rest with the engine's padding, and AdamW's two moments, all in the precision
    mode's storage dtype; not what is gathered for a moment, nor activations. Nothing is allocated.

    Args:
        model: On meta or not, before it is sharded; the one that ``plan`` was made for.
        plan: Its FSDP units.
        config: Engine and precision.
        ranks: Ranks that share one copy; 1 where nothing is split.

    Returns:
        ``num_params`` (without padding), ``parameter_bytes``, ``gradient_bytes`` and ``optimizer_bytes`` by rank;
        frozen parameters have no moments.
    """
    held = [_Held() for _ in range(ranks)]
    row = config.precision_config.row
    seen: set[int] = set()
    for unit in plan.units:
        module = plan.modules[unit.name] if unit.name else model
        own = [param for param in module.parameters() if id(param) not in seen]
        seen.update(id(param) for param in own)
        if config.engine == "fsdp1":
            _add_flat(held, own, TORCH_DTYPES["fp32" if unit.keeps_fp32 else row.compute].itemsize)
        else:
            _add_by_rows(held, own)
    size = TORCH_DTYPES[row.param].itemsize
    return [
        {
            "num_params": one.params,
            "parameter_bytes": one.stored * size,
            "gradient_bytes": one.stored_gradients * size,
            "optimizer_bytes": 2 * one.trainable * size,
        }
        for one in held
    ]


def _add_by_rows(held: list[_Held], params: Iterable[torch.Tensor]) -> None:
    for param in params:
        rows = param.shape[0] if param.dim() else 1
        per_row = param.numel() // max(1, rows)
        chunk = -(-rows // len(held))
        for rank, one in enumerate(held):
            local = max(0, min(rows, (rank + 1) * chunk) - rank * chunk) * per_row
            one.params += local
            one.stored += chunk * per_row
            one.trainable += local * param.requires_grad
            one.stored_gradients += chunk * per_row * param.requires_grad


def _add_flat(held: list[_Held], params: Sequence[torch.Tensor], itemsize: int) -> None:
    align = _ALIGNMENT_BYTES // itemsize
    starts, end = [], 0
    for param in params:
        end += -end % align
        starts.append(end)
        end += param.numel()
    part = -(-end // len(held))
    is_trained = any(param.requires_grad for param in params)  # one gradient for the whole flat parameter
    for rank, one in enumerate(held):
        one.stored += part
        one.stored_gradients += part * is_trained
        for start, param in zip(starts, params, strict=True):
            first, last = max(start, rank * part), min(start + param.numel(), (rank + 1) * part)
            one.params += max(0, last - first)
            one.trainable += max(0, last - first) * param.requires_grad
