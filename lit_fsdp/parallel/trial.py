"""Try two optimizer steps on tiny tensors with the engine's layout, before the model is modified."""

import copy
import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, ones
from torch.optim import Optimizer

_SIZE = 4
_STRAYS = 1e-2  # relative deviation of an update; LAMB exceeds it, elementwise optimizers do not deviate


def refusal_of(optimizer: Optimizer, is_flat: bool, is_saved: bool) -> str:
    """Return in one line why an optimizer of any class cannot train its sharded parameters; empty if it can.

    A copy of the optimizer takes the steps; optimizers that cannot be copied are not tried. ``is_flat``: parameters are
    flat parts, as in FSDP1, so a matrix in two parts, as on two ranks, must change like the whole matrix. ``is_saved``:
    its state must consist of tensors and numbers.
    """
    matrix = torch.linspace(-1, 1, _SIZE * _SIZE)
    values = (matrix.view(_SIZE, _SIZE), *matrix.chunk(2)) if is_flat else ()
    try:
        copies = [_copy_on(v.to, optimizer) for v in values] or [_copy_on(_tiny, optimizer)]
    except Exception:  # depends on the attributes of the class; errors appear in the first step
        return ""
    try:
        with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):  # torchao compiles for every shape
            warnings.simplefilter("ignore")
            moved = [_moved(own) for own in copies]
    except Exception as error:
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
    kept = [pair for entry in copies[0].state_dict()["state"].values() for pair in entry.items()] if is_saved else []
    for key, value in kept:
        if not torch.is_tensor(value) and not isinstance(value, (int, float)):
            return f"its state_dict has a {type(value).__name__}, {key}, but checkpoints store only tensors and numbers"
    if is_flat:
        whole, *parts = (torch.stack([one.float().flatten() for one in each]) for each in moved)
        if (torch.cat(parts, dim=1) - whole).norm() > _STRAYS * whole.norm():
            return "it needs whole tensors, but every rank has only flat parts"
    return ""


def _tiny(param: torch.Tensor) -> torch.Tensor:
    """Ones with the layout of ``param`` and two rows per shard, one fewer on the last if shards are uneven."""
    if not isinstance(param, DTensor):
        return torch.ones([min(size, _SIZE) for size in param.shape], dtype=param.dtype, device=param.device)
    (rows, *others), mesh = param.shape, param.device_mesh
    shards = mesh.size(mesh.ndim - 1)
    rows = rows if rows <= 2 * shards else 2 * shards - (rows % shards > 0)
    shape = (rows, *(min(size, _SIZE) for size in others))
    return ones(*shape, dtype=param.dtype, device_mesh=mesh, placements=param.placements).to(param.device)


def _copy_on(make: Callable[..., torch.Tensor], optimizer: Optimizer) -> Any:
    """Copy an optimizer and its state onto tensors made from its parameters, one tensor per group, shape and dtype."""
    held = [
        one for value in vars(optimizer).values() for one in (value if isinstance(value, list | tuple) else [value])
    ]
    optimizers = [optimizer, *(one for one in held if isinstance(one, Optimizer))]  # copies of these lose attributes
    state = defaultdict[Any, Any](dict)
    known: dict[int, Any] = {id(one): object.__new__(type(one)) for one in optimizers}  # used instead of copies
    known[id(optimizer.state)] = state
    for group in optimizer.param_groups:
        alike: dict[Any, nn.Parameter] = {}
        for param in group["params"]:
            value = make(param).clone()
            key = (value.shape, value.dtype, param.requires_grad, isinstance(value, DTensor))
            known[id(param)] = tiny = alike.setdefault(key, nn.Parameter(value, param.requires_grad))
            for name, kept in optimizer.state.get(param, {}).items():  # some classes create state in __init__
                is_like = torch.is_tensor(kept) and kept.shape == param.shape
                state[tiny][name] = torch.zeros_like(tiny) if is_like else copy.deepcopy(kept)
    hooks: dict[str, Any] = {"_optimizer_step_pre_hooks": {}, "_optimizer_step_post_hooks": {}}
    for one in optimizers:
        vars(known[id(one)]).update(copy.deepcopy(vars(one), known) | hooks)
    own = known[id(optimizer)]
    for group in own.param_groups:
        group["params"][:] = dict.fromkeys(group["params"])
        if isinstance(group.get("lr"), float):
            group["lr"] = 0.1  # a warm-up may start at 0
    return own


def _moved(optimizer: Any) -> list[torch.Tensor]:
    """The change of each trained parameter after two steps."""
    if hasattr(optimizer, "train"):  # schedule-free optimizers step only in train mode
        optimizer.train()
    params = [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
    before = [param.detach().clone() for param in params]
    for _ in range(2):
        for param in params:
            param.grad = param.detach().cos() / 8
        type(optimizer).step(optimizer)  # not the instance's step: schedules replace it by one that steps the model
    return [param.detach() - old for param, old in zip(params, before, strict=True)]
