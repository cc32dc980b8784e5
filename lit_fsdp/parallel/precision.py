"""The realised-dtype contract: what the precision mode promises is read back from the live run and compared.

Nothing here sets a dtype: the engines are given the row, and then asked what they did.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from lit_fsdp.config.strategy import DtypeName, DtypeRow, StrategyConfig
from lit_fsdp.errors import ContractError

_log = logging.getLogger(__name__)
TORCH_DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Newer torch reduces through reduce_scatter_single, older through reduce_scatter_tensor.
_REDUCTIONS = ("reduce_scatter_single", "reduce_scatter_tensor", "all_reduce")
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}


def dtype_name(dtype: torch.dtype) -> str:
    """The short name of a dtype: ``fp32``, ``bf16``, … or torch's own."""
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))


def _first(tensor: Any) -> torch.Tensor:
    """Up to 1024 elements of what this rank holds of a tensor."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach().flatten()[:1024]


class DtypeContract:
    """Compares declared and realised dtypes, and keeps both for ``dtypes.json``.

    Args:
        row: What the precision mode promises.
        mode: Its name, for messages.
        gathered: Dtype of a unit's parameters inside its forward: the compute dtype where the engine casts them,
            the dtype at rest under autocast.
    """

    def __init__(self, row: DtypeRow, mode: str, gathered: DtypeName | None = None) -> None:
        self.row, self.mode = row, mode
        self.gathered = gathered or row.compute
        self.realised: dict[str, dict[str, int]] = {}
        self._handles: list[Any] = []
        self._first_step_done = False

    def check_parameters(self, named: Iterable[tuple[str, torch.Tensor]], when: str) -> None:
        """Parameters at rest, e.g. ``when="after set-up"``; raises ContractError naming the first that differs."""
        floating = {name: p.dtype for name, p in named if p.is_floating_point()}
        self._compare(f"parameters {when}", floating, self.row.param)

    def check_buffers(self, named: Iterable[tuple[str, torch.Tensor]], declared: DtypeName | None) -> None:
        """Floating-point buffers against the dtype declared for them; ``None`` declares nothing, and they are noted."""
        floating = {name: buffer.dtype for name, buffer in named if buffer.is_floating_point()}
        if declared is None:
            self._note("buffers", floating)
        else:
            self._compare("buffers", floating, declared)

    def check_gradients(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Gradients as the optimizer is about to see them: the dtype of their parameters."""
        grads = {name: p.grad.dtype for name, p in named if p.grad is not None}
        self._compare("gradients", grads, self.row.param)

    def check_optimizer(
        self, optimizer: torch.optim.Optimizer, names: Mapping[int, str], when: str = "after the first step"
    ) -> None:
        """Floating-point moments of the optimizer, except its 0-dim step counters.

        Args:
            optimizer: Its ``state`` is read; one without state yet is not compared.
            names: Parameter names by ``id``.
            when: For messages and for the key in ``dtypes.json``.
        """
        found = {
            f"{names.get(id(param), '?')}.{key}": value.dtype
            for param, state in optimizer.state.items()
            for key, value in state.items()
            if torch.is_tensor(value) and value.is_floating_point() and value.dim() > 0
        }
        self._compare(f"optimizer state {when}", found, self.row.param)

    def watch(self, units: Mapping[str, nn.Module], fp32_units: Collection[str] = ()) -> None:
        """Record, in the next forward passes, the dtype of gathered parameters and of the outputs of these units.

        Args:
            units: By name; units may lie inside others, whose parameters they are not.
            fp32_units: Those that are gathered in fp32 whatever the mode says.
        """
        for name, module in units.items():
            own = [p for p in module.parameters() if p.is_floating_point()]
            if own:  # after the engine has gathered, and before it frees
                inner = tuple(f"{other.removeprefix(f'{name}.')}." for other in units if other.startswith(f"{name}."))
                dtype = "fp32" if name in fp32_units else self.gathered
                self._handles.append(module.register_forward_pre_hook(self._gathered_hook(name, inner, dtype)))
                self._handles.append(module.register_forward_hook(self._output_hook(name), prepend=True))

    def watch_autocast(self, model: nn.Module) -> None:
        """Compare, in the next forward passes, what linear layers return under autocast with the compute dtype."""

        def hook(module: Any, args: Any, output: torch.Tensor) -> None:
            is_step = torch.is_autocast_enabled(output.device.type)  # a call outside of any step is not
            if is_step and output.shape[-1] == module.out_features:  # a head may return the loss of its rows instead
                self._compare("linear layers under autocast", {type(module).__name__: output.dtype}, self.row.compute)

        linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
        self._handles.extend(module.register_forward_hook(hook, prepend=True) for module in linears)

    @contextlib.contextmanager
    def watch_reductions(self) -> Iterator[None]:
        """Record the dtype of every floating-point reduction the engine issues inside this context.

        The collectives of ``torch.distributed`` are looked up there at call time by both engines.
        """
        if self._first_step_done:
            yield
            return
        seen: dict[str, torch.dtype] = {}
        originals = {name: getattr(dist, name) for name in _REDUCTIONS if hasattr(dist, name)}

        def recording(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                tensor = kwargs.get("tensor", kwargs.get("output", args[0] if args else None))
                if torch.is_tensor(tensor) and tensor.is_floating_point():
                    seen[name if seen.get(name, tensor.dtype) == tensor.dtype else f"{name} again"] = tensor.dtype
                return original(*args, **kwargs)

            return call

        for name, original in originals.items():
            setattr(dist, name, recording(name, original))
        try:
            yield
        finally:
            for name, original in originals.items():
                setattr(dist, name, original)
        if seen:
            self._compare("reductions", seen, self.row.reduce)

    @property
    def watching(self) -> bool:
        """Whether the first optimizer step is still to come."""
        return not self._first_step_done

    def finish_first_step(self) -> None:
        """Stop recording: hooks are removed, later steps cost nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._first_step_done = True

    def report(self) -> dict[str, Any]:
        """Declared and realised dtypes for ``dtypes.json``; what was not observed is absent."""
        declared = {"param": self.row.param, "compute": self.row.compute, "reduce": self.row.reduce}
        return {"mode": self.mode, "declared": declared, "realised": self.realised}

    def _gathered_hook(self, name: str, inner: tuple[str, ...], dtype: str) -> Callable[..., None]:
        what = "gathered parameters in the forward"

        def hook(module: nn.Module, args: Any) -> None:
            named = [(n.replace("_fsdp_wrapped_module.", ""), p) for n, p in module.named_parameters()]
            own = {n: p.dtype for n, p in named if p.is_floating_point() and p.dim() and not n.startswith(inner)}
            self._compare(what, {f"{name}.{n}": found for n, found in own.items()}, dtype)

        return hook

    def _output_hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            tensors = [t for t in tree_leaves(output) if torch.is_tensor(t) and t.is_floating_point()]
            outputs = {f"output {i} of {name}": tensor.dtype for i, tensor in enumerate(tensors)}
            self._note("activations", outputs)  # a block may well keep its residual stream in another dtype

        return hook

    def _note(self, what: str, found: Mapping[str, torch.dtype]) -> None:
        counts = Counter(self.realised.get(what, {}))
        counts.update(dtype_name(dtype) for dtype in found.values())
        if found:
            self.realised[what] = dict(counts)

    def _compare(self, what: str, found: Mapping[str, torch.dtype], declared: str) -> None:
        for name, dtype in found.items():
            if dtype_name(dtype) != declared:
                raise ContractError(
                    f"precision contract broken: {what}: {name} is {dtype_name(dtype)}\n"
                    f"  declared: {declared} (mode {self.mode})\n"
                    "  fix:      remove what casts it (trainer.precision, .half(), .bfloat16(), autocast), or choose "
                    "the precision mode that says so"
                )
        self._note(what, found)


def contract_for(config: StrategyConfig) -> DtypeContract:
    """What a strategy with these arguments promises."""
    precision = config.precision_config
    row = precision.row  # autocast leaves parameters as they are
    return DtypeContract(row, precision.mode, row.compute if config.is_sharded else row.param)


def sample_groups(optimizer: Any) -> list[list[tuple[Any, torch.Tensor]]]:
    """Parameters of each group with a copy of the first elements that this rank holds."""
    return [[(p, _first(p).clone()) for p in group["params"]] for group in optimizer.param_groups]


def warn_of_standstill(optimizer: Any, samples: list[list[tuple[Any, torch.Tensor]]]) -> None:
    """Warn of each group that its gradients should have moved visibly and that stands where its samples say."""
    for index, (group, before) in enumerate(zip(optimizer.param_groups, samples, strict=True)):
        pairs = [(_first(p), old, _first(p.grad)) for p, old in before if p.grad is not None]
        rate = group.get("lr") or 0.0
        should = any(
            bool((rate * grad.abs() > 4 * torch.finfo(old.dtype).eps * old.abs()).any()) for _, old, grad in pairs
        )
        if should and all(torch.equal(new, old) for new, old, _ in pairs):
            kind = type(optimizer).__name__
            _log.warning("parameter group %d of %s has gradients, but the first step did not move it", index, kind)
