"""Values that come from no file: random weights and computed buffers, one module at a time.

``_init_weights`` of transformers is called on a real copy of one module while everything else stays on meta. Some
models initialize a child from its parent (GPT-2 scales the output projections from the attention block), so the
module's ancestors get their turn too, nearest first, as in ``PreTrainedModel.initialize_weights``; what they write to
their other children lands on meta. It is a copy of the whole tree, from which no tensor of the live model is reached.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from lit_fsdp.errors import CheckpointError


class InitialValues:
    """Initial parameters and buffers of a model on meta, the same for every order, number of ranks and sharding.

    Random values depend on the seed and the module's name only. The module tree is copied at construction, so the
    model may be wrapped, sharded and filled afterwards.
    """

    def __init__(self, model: PreTrainedModel, seed: int) -> None:
        self._seed = seed
        self._modules = dict(copy.deepcopy(model).named_modules(remove_duplicate=False))
        self._last: tuple[str, dict[str, torch.Tensor]] = ("", {})

    def value(self, module_name: str, attribute: str, rows: slice | None = None) -> torch.Tensor:
        """The initial parameter or buffer ``attribute`` of a module, or its ``rows`` in dim 0; see ``Weights.read``.

        The module last asked about is kept, so that asking for all its attributes runs the initializer once.
        """
        last_name, values = self._last
        if last_name != module_name or attribute not in values:
            self._last = ("", {})
            values = self._initialize(module_name)
            self._last = (module_name, values)
        value = values.pop(attribute) if rows is None else values[attribute][rows].clone()
        if value.is_floating_point() and value.isnan().any():
            text = "the model's code (_init_weights) leaves it uninitialized, and no file holds it"
            raise CheckpointError(f"{module_name}.{attribute}: {text}")
        return value

    @torch.no_grad()
    def _initialize(self, name: str) -> dict[str, torch.Tensor]:
        real = _bare_copy(self._modules[name])
        real._parameters = {
            k: None if p is None else nn.Parameter(_blank(p), requires_grad=False) for k, p in real._parameters.items()
        }
        real._buffers = {k: None if b is None else _blank(b) for k, b in real._buffers.items()}
        with seeded(self._seed, name):
            module = real
            while True:
                self._owner(name)._init_weights(module)
                if not name:
                    break
                name, _, child = name.rpartition(".")
                parent = _bare_copy(self._modules[name])
                parent._modules = {**parent._modules, child: module}
                module = parent
        return {k: t.detach() for k, t in [*real._parameters.items(), *real._buffers.items()] if t is not None}

    def _owner(self, name: str) -> PreTrainedModel:
        """The nearest model at or above ``name``: its ``_init_weights`` is the one that counts."""
        while not isinstance(module := self._modules[name], PreTrainedModel):
            name = name.rpartition(".")[0]
        return module


def _bare_copy(module: nn.Module) -> nn.Module:
    """A second object with the same attributes and tensors; sets of tensors and children can be replaced apart."""
    bare = object.__new__(type(module))
    bare.__dict__ = dict(module.__dict__)
    return bare


def _blank(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor of the same (unsharded) shape, filled with not-a-number so that a gap in the code shows."""
    return torch.full(tensor.shape, float("nan") if tensor.is_floating_point() else 0, dtype=tensor.dtype)


@contextmanager
def seeded(seed: int, name: str) -> Iterator[None]:
    """Seed the CPU generator from (seed, name) and put its state back; accelerators are left alone."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=6).digest()
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(int.from_bytes(digest, "big"))
    try:
        yield
    finally:
        torch.set_rng_state(state)
