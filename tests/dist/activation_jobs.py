"""The job that trains with activations kept, recomputed, moved or compiled, and counts gathers and graphs."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from lit_fsdp.module import CausalLMModule
from lit_fsdp.parallel import activation
from lit_fsdp.parallel.activation import recomputes
from tests.dist.jobs import fit, module_for


class Gathers:
    """Counts all-gathers that either engine issues from here on."""

    names = ("all_gather", "all_gather_single", "all_gather_into_tensor")  # the engines' words, by release of torch

    def __init__(self) -> None:
        self.number = 0
        for name in self.names:
            if hasattr(dist, name):
                setattr(dist, name, self._counted(getattr(dist, name)))

    def _counted(self, function: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.number += 1
            return function(*args, **kwargs)

        return counted


class SwitchedOn(CausalLMModule):
    """Somebody's model with transformers' own checkpointing on."""

    def configure_model(self) -> None:
        """Flags only; what they name newer releases of transformers call otherwise."""
        super().configure_model()
        assert self.model is not None
        for child in self.model.modules():
            if hasattr(child, "gradient_checkpointing"):
                child.gradient_checkpointing = True  # type: ignore[assignment]


def train_activations(folder: str, strategy: dict[str, Any], theirs: bool = False) -> dict[str, Any]:
    """Four steps; losses, a hash of the state, gathers, and what the blocks did."""
    from torch._dynamo.utils import counters

    activation.BACKEND = "aot_eager"
    module, gathers = module_for(folder), Gathers()
    if theirs:
        module.__class__ = SwitchedOn
    _, found = fit(module, strategy, steps=4)
    blocks: list[Any] = [m for m in module.modules() if type(m).__name__.endswith("LlamaDecoderLayer")]
    return found | {
        "recomputes": [recomputes(block) for block in blocks],
        "gathers": gathers.number,
        "graphs": {"unique_graphs": counters["stats"]["unique_graphs"], "breaks": len(counters["graph_break"])},
    }
