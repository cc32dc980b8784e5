"""``torch.compile`` of one block's forward, inside the engine's hooks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

BACKEND = "inductor"
"""Any name that ``torch.compile`` knows; its own default."""


def compile_forward(forward: Callable[..., Any], memory_budget: float | None = None) -> Callable[..., Any]:
    """The compiled function; it is compiled at its first call, and once for all blocks of the same shape.

    Args:
        forward: A block's forward, with the checkpointed region inside it where there is one.
        memory_budget: Share of activation memory that the compiler may keep, 0 to 1; ``None``: its own choice.
    """
    backend = BACKEND if memory_budget is None else _within_budget(BACKEND, memory_budget)
    return torch.compile(forward, backend=backend)


@functools.lru_cache
def _within_budget(backend: str, budget: float) -> Callable[..., Any]:
    """A backend that splits forward from backward under the budget.

    The setting is global in torch and read while a block is compiled, at its first call: it is in force for exactly
    that long. One object per budget, since compiled code is not shared between backends.
    """
    import torch._functorch.config as functorch_config
    from torch._dynamo.backends.registry import lookup_backend

    compiler: Any = lookup_backend(backend)

    def compile_within_budget(graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        with functorch_config.patch(activation_memory_budget=budget):
            return compiler(graph, inputs, **options)

    return compile_within_budget
