"""The job that trains with activations kept, recomputed, moved or compiled, and counts gathers and graphs."""

from __future__ import annotations

from typing import Any

import torch

from lit_fsdp.module import CausalLMModule
from lit_fsdp.parallel import activation
from lit_fsdp.parallel.activation import recomputes
from tests.dist.jobs import Losses, TinyData, digest, module_for, trainer_for


class Gathers:
    """Counts all-gathers that either engine issues; as a context."""

    names = ("all_gather", "all_gather_single", "all_gather_into_tensor")  # the engines' words, by release of torch

    def __enter__(self) -> Gathers:
        """Count from here on."""
        import torch.distributed as dist

        self.number = 0
        self._before = {name: getattr(dist, name) for name in self.names if hasattr(dist, name)}
        for name, function in self._before.items():
            setattr(dist, name, self._counted(function))
        return self

    def _counted(self, function: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.number += 1
            return function(*args, **kwargs)

        return counted

    def __exit__(self, *reason: object) -> None:
        """As before."""
        import torch.distributed as dist

        for name, function in self._before.items():
            setattr(dist, name, function)


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
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    losses = Losses()
    trainer = trainer_for(strategy, [losses], max_steps=4)
    module = module_for(folder)
    if theirs:
        module.__class__ = SwitchedOn
    with Gathers() as gathers:
        trainer.fit(module, datamodule=TinyData())
    optimizer: Any = trainer.optimizers[0]
    blocks: list[Any] = [m for m in module.modules() if type(m).__name__.endswith("LlamaDecoderLayer")]
    return {
        "losses": losses.values,
        "digest": digest(module, getattr(optimizer, "optimizer", optimizer)),
        "recomputes": [recomputes(block) for block in blocks],
        "gathers": gathers.number,
        "graphs": {"unique_graphs": counters["stats"]["unique_graphs"], "breaks": len(counters["graph_break"])},
    }


def fit_twice(folder: str, engine: str) -> list[list[str]]:
    """What the blocks do under one Trainer and, in the same module, under the next one, which keeps everything."""
    strategies = [
        {"engine": engine, "precision": "fp32", "activation_checkpointing": mode} for mode in ("full", "none")
    ]
    trainers = [trainer_for(strategy, [], max_steps=1) for strategy in strategies]  # the first fit forgets WORLD_SIZE
    module, found = module_for(folder), []
    for trainer in trainers:
        trainer.fit(module, datamodule=TinyData())
        live: Any = trainer.strategy
        found.append([recomputes(block) for block in live.plan.blocks])
    return found
