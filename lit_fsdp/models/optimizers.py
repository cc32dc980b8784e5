"""The optimizer that a recipe names: its arguments, the size of its state, and AdamW and Muon for shards."""

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import AdamW, Muon, Optimizer
from torch.optim._muon import _adjust_lr

from lit_fsdp.config.model import ADAMW, OptimConfig
from lit_fsdp.errors import ConfigError, require

_FIELD = "model.optim"


def optimizer_class(optim: OptimConfig) -> type[torch.optim.Optimizer]:
    """Import the class of ``model.optim`` and check that it is an optimizer and accepts the given arguments."""
    path = optim.optimizer
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        fix = "pip install 'lit-fsdp[optim8bit]'" if module.partition(".")[0] == "torchao" else ""
        raise ConfigError(f"{_FIELD}.class_path", path, f"a class that can be imported ({error})", fix) from error
    is_optimizer = isinstance(found, type) and issubclass(found, torch.optim.Optimizer)
    require(is_optimizer, f"{_FIELD}.class_path", path, "a subclass of torch.optim.Optimizer")
    known = inspect.signature(found).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    names = [name for name in known if name not in ("params", "lr", "weight_decay")]
    for key in optim.optimizer_args or {}:
        near = difflib.get_close_matches(key, names, n=1)
        fix, given = f"write {near[0]}" if near else f"drop {key}", f"no argument of {path}"
        require(takes_any or key in known, f"{_FIELD}.init_args.{key}", given, f"one of {', '.join(names)}", fix)
    return found


def is_decayed(name: str, param: nn.Parameter) -> bool:
    """Whether weight decay applies: not to vectors and biases, which experts stack in two dimensions."""
    return param.ndim >= 2 and not name.endswith("bias")


def hidden_matrices(model: Any) -> set[str]:
    """Names of the matrices between embedding and head, for Muon; a single row or column counts as a vector."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    outer = {id(param) for module in ends if module is not None for param in module.parameters()}
    inner = ((name, param) for name, param in model.named_parameters() if id(param) not in outer)
    return {name for name, param in inner if param.ndim == 2 and min(param.shape) > 1 and is_decayed(name, param)}


def state_bytes(optim: OptimConfig, model: nn.Module, itemsize: int) -> tuple[Callable[[nn.Parameter, int], int], str]:
    """Size of the optimizer state per parameter, without step counters; the optimizer class is not imported.

    Returns a function from a parameter (``itemsize`` bytes per element) and a number of its elements to bytes, and the
    class that it describes, which is AdamW if the optimizer is unknown.
    """
    path = optim.optimizer
    if path.startswith("lit_fsdp.") and path.endswith(".MuonWithAdamW"):
        hidden = {id(model.get_parameter(name)) for name in hidden_matrices(model)}
        return lambda param, count: (1 if id(param) in hidden else 2) * count * itemsize, path
    if path == "torchao.optim.AdamW8bit":
        block = int((optim.optimizer_args or {}).get("block_size", 256))
        table = 256 * 4  # values of the codes

        def packed(param: nn.Parameter, count: int) -> int:
            return 2 * (count + count // block * 4 + table if is_packed(count, block) else count * itemsize)

        return packed, path
    return lambda param, count: 2 * count * itemsize, ADAMW


def is_packed(count: int, block_size: int) -> bool:
    """Whether torchao stores the moments of ``count`` elements as 8-bit codes."""
    return count >= 4096 and count % block_size == 0


def orthogonalized(matrix: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
    """Muon's Newton-Schulz iteration on a whole matrix, in the matrix's dtype; torch supports only bf16."""
    a, b, c = group["ns_coefficients"]
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    wide = wide / wide.norm().clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T.contiguous() if matrix.shape[0] > matrix.shape[1] else wide


class ShardAdamW(AdamW):
    """torch's AdamW, stepping this rank's shards as plain tensors; its state consists of DTensors, like the parameters.

    For lists of DTensors torch resolves placements in quadratic time: two seconds in the first step for the 420 factors
    of LoRA.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[torch.Tensor]) -> bool:
        has_complex: bool = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
        return has_complex


class _WholeMuon(Muon):
    """torch's Muon, iterating on whole matrices, each on one rank; iterating on shards would give other updates."""

    dtype = torch.bfloat16  # a class attribute, because copies of optimizers lose instance attributes

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Gather one matrix per rank of a copy, iterate each on its rank, and broadcast the results."""
        for group in self.param_groups:
            held: tuple[list[Any], list[Any], list[Any]] = ([], [], [])
            self._init_group(group, *held)
            params, momentum, lr = held[0], group["momentum"], float(group["lr"])
            mesh = getattr(params[0], "device_mesh", None) if params else None
            ranks = None if mesh is None else mesh.get_group(mesh.ndim - 1)
            size, here = (1, 0) if ranks is None else (dist.get_world_size(ranks), dist.get_rank(ranks))
            for first in range(0, len(params), size):
                some = list(zip(*held, strict=True))[first : first + size]
                mine: Any = None
                for owner, (_, grad, buffer) in enumerate(some):
                    buffer.lerp_(grad, 1 - momentum)
                    update = (grad.lerp(buffer, momentum) if group["nesterov"] else buffer).to(self.dtype)
                    whole = update if mesh is None else update.to(mesh.device_type).full_tensor()
                    mine = whole if owner == here else mine
                mine = mine if mine is None else orthogonalized(mine, group)  # after all gathers, so in parallel
                for owner, (param, grad, _) in enumerate(some):
                    found = mine
                    if mesh is not None:
                        if owner != here:
                            found = torch.empty(param.shape, dtype=self.dtype, device=mesh.device_type)
                        dist.broadcast(found, group=ranks, group_src=owner)
                        found = distribute_tensor(found, mesh, param.placements, src_data_rank=None).to(grad.device)
                    param.mul_(1 - lr * group["weight_decay"])
                    param.add_(found, alpha=-_adjust_lr(lr, group["adjust_lr_fn"], param.shape))


class _PreciseMuon(_WholeMuon):
    dtype = torch.float32


class MuonWithAdamW(Optimizer):
    """Muon for parameter groups with ``use_muon``, AdamW for the other groups, as one optimizer.

    :class:`lit_fsdp.CausalLMModule` marks the groups. Schedules scale both learning rates. Each matrix is
    orthogonalized whole, on one rank of a copy, so that ranks and engines differ only in how gradients are summed.

    Args:
        params: Parameter groups, each with ``use_muon``.
        lr: Learning rate of Muon's groups.
        weight_decay: Default for groups without their own.
        adamw_lr: Learning rate of AdamW's groups.
        betas: AdamW's betas.
        iterates_in: ``bf16``, as in torch, where the summation order of gradients changes an update by some percent;
            or ``fp32``, where it changes it by some 1e-5: :class:`lit_fsdp.CausalLMModule` uses it in fp32 runs.
        muon: Further arguments of :class:`torch.optim.Muon`.

    Source: https://kellerjordan.github.io/posts/muon/
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float = 0.02,
        weight_decay: float = 0.0,
        adamw_lr: float = 3e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        iterates_in: Literal["bf16", "fp32"] = "bf16",
        **muon: Any,
    ) -> None:
        groups = list(params)
        matrices = [dict(group) for group in groups if group["use_muon"]]
        others = [group | {"lr": adamw_lr} for group in groups if not group["use_muon"]]
        self._inner: list[Optimizer] = []
        if matrices:
            kind = _PreciseMuon if iterates_in == "fp32" else _WholeMuon
            self._inner.append(kind(matrices, lr=lr, weight_decay=weight_decay, **muon))
        if others:
            self._inner.append(ShardAdamW(others, lr=adamw_lr, weight_decay=weight_decay, betas=betas))
        super().__init__([group for inner in self._inner for group in inner.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Make both optimizers use this one's groups and state, which are saved and scheduled."""
        first = 0
        for inner in self._inner:
            count = len(inner.param_groups)
            inner.param_groups, inner.state = self.param_groups[first : first + count], self.state
            first += count

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of ``state_dict``."""
        super().load_state_dict(state_dict)
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step both optimizers."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for inner in self._inner:
            inner.step()
        return loss
