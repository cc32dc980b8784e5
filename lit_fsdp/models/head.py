"""The head of a causal LM: what happens to its logits, and how something else is computed in its place.

The model is always called as a whole, so that hooks and all-gathers happen; only the head's own forward is another one
while it runs. What the model does with logits afterwards (scaling, soft-capping) is found by running the code of its
forward between two stand-ins: a body that gives nothing and a head that gives known numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

_PROBED = 4096  # columns at least; a model that cuts or masks some of the vocabulary shows it in them


class HeadUse(NamedTuple):
    """How a model uses its head."""

    scale: float
    """Factor on the logits."""
    cap: float | None
    """Bound of the logits: ``cap * tanh(scale * logits / cap)``."""


class UnknownHead(ValueError):
    """The model does something to its logits, or with its head, that is not known here."""


def is_plain_linear(head: nn.Module) -> bool:
    """Whether the head is a product with its weight and nothing else: no adapter, no quantised or float8 weight."""
    return (
        isinstance(head, nn.Linear)
        and type(head).forward is nn.Linear.forward
        and "forward" not in head.__dict__
        and type(head.weight) in (nn.Parameter, torch.Tensor, DTensor)
    )


def owner_of_head(model: nn.Module) -> nn.Module:
    """The module that has a body and an output head, inside whatever is around it.

    Raises:
        UnknownHead: There is none.
    """
    for module in model.modules():
        get = getattr(type(module), "get_output_embeddings", None)
        if get is not None and isinstance(get(module), nn.Module):
            return module
    raise UnknownHead("it has no output head (get_output_embeddings)")


def head_of(model: nn.Module) -> nn.Module:
    """The module whose forward makes logits of hidden states, without FSDP1's wrapper.

    Raises:
        UnknownHead: There is none.
    """
    owner: Any = owner_of_head(model)
    return _unwrapped(owner.get_output_embeddings())


def _unwrapped(module: nn.Module) -> nn.Module:
    inner = module._modules.get("_fsdp_wrapped_module")
    return module if inner is None else _unwrapped(inner)


def learn_head(model: nn.Module) -> HeadUse:
    """What ``model`` does with the logits of its head, from its own forward.

    Nothing of the model is computed: meta tensors and shards suffice, and no hook runs.

    Args:
        model: Not changed; for a moment two of its modules are replaced.

    Raises:
        UnknownHead: Anything but a factor and a soft cap on all logits, or a forward that cannot be followed.
    """
    owner: Any = owner_of_head(model)
    head, body = owner.get_output_embeddings(), getattr(owner, "base_model", None)
    if not isinstance(body, nn.Module) or body is owner:
        raise UnknownHead("its body is not a module of its own")
    vocab_size = int(getattr(owner.config.get_text_config(), "vocab_size", _PROBED))
    values = torch.linspace(-60.0, 60.0, vocab_size, dtype=torch.float64)
    values[:2] = torch.tensor([1e-3, 1e4])  # shows the slope at zero, and the bound
    stand_in = _KnownLogits(values)
    try:
        with _replaced(owner, {body: _NoBody(body), head: stand_in}), torch.no_grad():
            found = type(owner).forward(owner, input_ids=torch.zeros(1, 2, dtype=torch.int64)).logits
    except Exception as error:  # whatever a forward of any architecture may do with stand-ins
        raise UnknownHead(f"its forward could not be followed ({type(error).__name__}: {error})") from error
    if stand_in.calls != 1:
        raise UnknownHead(f"its forward calls the head {stand_in.calls} times")
    return _fit(values, found)


def _fit(given: torch.Tensor, found: torch.Tensor) -> HeadUse:
    if found.device != given.device or found.shape != (1, 2, len(given)):
        raise UnknownHead(f"it makes {tuple(found.shape)} of logits of shape {(1, 2, len(given))}")
    tolerance = 1e-6 if found.dtype == torch.float32 else 1e-12
    got = found.double()
    for cap in (None, float(got[0, 0, 1])):
        use = HeadUse(_slope(given[0], got[0, 0, 0], cap), cap)
        wanted = use.scale * given if cap is None else cap * torch.tanh(use.scale * given / cap)
        if torch.allclose(got, wanted.expand_as(got), rtol=tolerance, atol=0.0):
            return use
    raise UnknownHead("it changes its logits by something else than a factor and a soft cap")


def _slope(given: torch.Tensor, got: torch.Tensor, cap: float | None) -> float:
    slope = float(got / given) if cap is None else float(cap * torch.atanh(got / cap) / given)
    near = round(slope, 5)  # of 1.0 the arithmetic above leaves 0.9999999
    return near if abs(slope - near) <= 1e-9 * abs(slope) else slope


@contextmanager
def in_place_of_forward(head: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Inside, calling ``head`` runs its hooks and ``forward``; afterwards it is as it was."""
    before = head.__dict__.get("forward")
    head.forward = forward
    try:
        yield
    finally:
        if before is None:
            del head.forward
        else:
            head.forward = before


@contextmanager
def _replaced(owner: nn.Module, stand_ins: dict[nn.Module, nn.Module]) -> Iterator[None]:
    places = [
        (module._modules, name, child)
        for module in owner.modules()
        for name, child in module._modules.items()
        if child in stand_ins
    ]
    try:
        for children, name, child in places:
            assert child is not None
            children[name] = stand_ins[child]
        yield
    finally:
        for children, name, child in places:
            children[name] = child


class _Nothing(tuple):
    """What a body returns: hidden states first, and None under any other name."""

    last_hidden_state: torch.Tensor

    def __getattr__(self, name: str) -> Any:
        if name == "last_hidden_state":
            return self[0]
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class _NoBody(nn.Module):
    """In the place of the body and of any module in it; other attributes are the body's own."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.__dict__["body"] = body  # not as a child

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.__dict__["body"], name)
        return self if isinstance(found, nn.Module) else found

    def forward(self, *args: Any, **kwargs: Any) -> _Nothing:
        return _Nothing((torch.zeros(1, 2, 1),))


class _KnownLogits(nn.Module):
    def __init__(self, values_V: torch.Tensor) -> None:
        super().__init__()
        self.values_V, self.calls = values_V, 0
        self.weight = torch.zeros(1)  # some forwards look up its dtype

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.values_V.expand(*hidden.shape[:-1], -1).clone()
