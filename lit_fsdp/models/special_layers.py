"""Linear layers that are more than a product: routers, and layers whose weight the model's code uses directly."""

import functools
import re
import sys
from typing import Any

import torch
from torch import nn

from lit_fsdp.models.attention import source_of

_ROUTER = re.compile(r"router|(^|\.)((moe|\w*expert\w*)_)?gate(\.\w+)?$", re.IGNORECASE)
ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
"""Names of attention layers, and of layers inside them."""
_USED = re.compile(r"(?<!isinstance\()self\.(\w+)\.weight\b(?!\.(?:device|dtype|shape|size|ndim))")
_COMMENT = re.compile(r"#.*")


def router_layers(model: nn.Module) -> set[str]:
    """Names of the linear layers that choose experts, or scale a shared one; empty for models without experts."""
    if not any("expert" in name for name, _ in model.named_modules()):
        return set()
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    found = ((name, _ROUTER.search(name)) for name in linears)
    return {name for name, match in found if match and (match[0] == "router" or not ATTENTION.search(name))}


def bypassed_layers(model: nn.Module) -> set[str]:
    """Names of linear layers with which a wrapper or packed weight would not do what the model does.

    The code around them uses their weight, as in the kernels of state-space layers and in AltUp of Gemma 3n, or their
    own forward pass is no product of inputs and outputs, as in DeepSeek V4.
    """
    found = set()
    for name, module in model.named_modules():
        never_used: Any = getattr(module, "pretraining_tp", 0) == 1  # Bloom uses weights only if it is larger
        used = set() if never_used else _used_weights(type(module))  # type: ignore[arg-type]
        prefix = f"{name}." if name else ""
        found |= {f"{prefix}{own}" for own in used if isinstance(getattr(module, own, None), nn.Linear)}
        if isinstance(module, nn.Linear) and type(module).forward is not nn.Linear.forward and not _is_product(module):
            found.add(name)
    return found


@functools.cache
def _used_weights(cls: type[nn.Module]) -> set[str]:
    """The submodules whose weight a method uses, except those that set initial values."""
    own = [base for base in cls.__mro__ if base not in nn.Module.__mro__ and _uses_weights(base.__module__)]
    methods = [(name, method) for base in own for name, method in vars(base).items() if callable(method)]
    texts = [source_of(method) for name, method in methods if "init" not in name and "reset" not in name]
    return {found for text in texts for found in _USED.findall(_COMMENT.sub("", text))}


@functools.cache
def _uses_weights(module: str) -> bool:
    """Whether the code of a Python module may do so; finding the source of each method takes half a second."""
    text = source_of(sys.modules.get(module))
    return not text or bool(_USED.search(text))  # a notebook has no source, but its functions have


def _is_product(layer: nn.Linear) -> bool:
    try:
        out = layer(torch.empty(1, 2, layer.in_features, device=layer.weight.device, dtype=layer.weight.dtype))
    except (RuntimeError, ValueError, TypeError):
        return False
    return isinstance(out, torch.Tensor) and out.shape == (1, 2, layer.out_features)
