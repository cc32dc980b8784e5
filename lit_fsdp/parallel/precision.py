"""Precision: casts that the engines do not do, and checks of the dtypes that they actually use."""

import contextlib
import importlib.util
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map

from lit_fsdp.config.strategy import DtypeName, DtypeRow, StrategyConfig
from lit_fsdp.errors import ContractError, require
from lit_fsdp.host import cpu_has_bf16
from lit_fsdp.parallel.units import packed_weights

_log = logging.getLogger(__name__)
TORCH_DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Newer torch reduces through reduce_scatter_single, older through reduce_scatter_tensor.
_REDUCTIONS = ("reduce_scatter_single", "reduce_scatter_tensor", "all_reduce")
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
_FP8_CAPABILITY = (8, 9)
_FP8_SKIP = ("lm_head", "embed_out")
_FP8_MULTIPLE = 16  # fp8 kernels take dimensions that are multiples of this


def dtype_name(dtype: torch.dtype) -> str:
    """The short name of a dtype: ``fp32``, or torch's own."""
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))


def has_bf16(device_type: str) -> bool:
    """Whether this process's device has bf16 instructions; assumed for GPUs if this machine has none."""
    if device_type == "cpu":
        return cpu_has_bf16()
    return not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False)


def settle_precision(config: StrategyConfig, device_type: str, on_all: Callable[[bool], bool]) -> StrategyConfig:
    """Resolve ``precision: auto`` equally on all ranks (``on_all`` is a collective), and log the result."""
    given, everywhere = config.precision_config, on_all(has_bf16(device_type))
    settled = config.on(everywhere)
    what = f"{'every' if everywhere else 'not every'} {'CPU' if device_type == 'cpu' else 'GPU'} has bf16 instructions"
    if dist.get_rank() == 0 and given.mode == "auto":
        _log.info("precision auto: %s, as %s", settled.precision_config.mode, what)
    elif dist.get_rank() == 0 and not everywhere and given.row.compute == "bf16":
        how, fix = "about eight times slower than fp32", "auto, or fp32"
        if device_type != "cpu":
            how, fix = "which is emulated and slower than fp32", "auto, fp32 or fp16_mixed"
        text = "precision %s computes in bf16, %s, as %s; set it to %s"
        _log.warning(text, given.mode, how, what, fix)
    return settled


def check_device(config: StrategyConfig, device_type: str, path: str) -> None:
    """Refuse options that this device type (``cpu`` or ``cuda``) does not support."""
    on_cpu = device_type == "cpu"
    wrong = config.cpu_offload and config.engine == "fsdp1" and on_cpu
    require(not wrong, f"{path}.cpu_offload", "true with engine fsdp1 on CPU", "a GPU, or engine fsdp2")
    if config.precision_config.mode == "fp8":
        found = importlib.util.find_spec("torchao") is not None
        require(found, f"{path}.precision", "fp8 without torchao", "fp8 after pip install 'lit-fsdp[fp8]'")
        fits = not on_cpu and torch.cuda.get_device_capability() >= _FP8_CAPABILITY
        require(
            fits, f"{path}.precision", "fp8 on this device", "a newer NVIDIA GPU (compute capability 8.9), or mixed"
        )


def cast_parameters(model: nn.Module, config: StrategyConfig) -> DtypeName | None:
    """Cast parameters to their storage dtypes in place; returns the dtype of a frozen base under adapters, or None."""
    row = config.precision_config.row
    frozen = config.frozen_dtype if any(hasattr(module, "peft_config") for module in model.modules()) else None
    packed = packed_weights(model)
    for param in model.parameters():
        if param.is_floating_point() and id(param) not in packed:
            param.data = param.data.to(TORCH_DTYPES[row.param if frozen is None or param.requires_grad else frozen])
    return frozen


def declared_dtypes(row: DtypeRow, frozen: DtypeName | None) -> dict[str, str]:
    """Declared dtypes of a run, for logs and files; ``frozen`` only with adapters."""
    return {"param": row.param, **({"frozen": frozen} if frozen else {}), "compute": row.compute, "reduce": row.reduce}


def cast_inputs(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast every floating-point tensor that ``module.forward`` is given, in plain containers."""
    module.register_forward_pre_hook(
        lambda _module, args, kwargs: (_cast(args, dtype), _cast(kwargs, dtype)), with_kwargs=True
    )


def cast_outputs(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast every floating-point tensor that ``module.forward`` returns, in plain containers and model outputs."""
    module.register_forward_hook(lambda _module, _args, output: _cast(output, dtype))


def _cast(values: Any, dtype: torch.dtype) -> Any:
    return tree_map(lambda x: x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x, values)


def apply_float8(model: nn.Module, skip: Sequence[str] | None, path: str) -> None:
    """Replace linear layers by torchao's float8 layers in place, except those with a word of ``skip`` in their path."""
    words = _FP8_SKIP if skip is None else tuple(skip)
    linears = [(name, m) for name, m in model.named_modules() if type(m) is nn.Linear]
    fitting = [name for name, m in linears if not (m.in_features % _FP8_MULTIPLE or m.out_features % _FP8_MULTIPLE)]
    names = {name for name in fitting if not any(word in name for word in words)}
    allowed = f"linear layers whose sizes are multiples of {_FP8_MULTIPLE} and that fp8_skip does not match"
    require(names, f"{path}.fp8_skip", "no layers left to compute in fp8", allowed)
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    # a weight's gradient is a sum over rows, whose number may not be a multiple of 16
    config = Float8LinearConfig(pad_inner_dim=True)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _module, name: name in names)


class DtypeContract:
    """Compares declared and realized dtypes, and keeps both for ``dtypes.json``."""

    def __init__(self, config: StrategyConfig) -> None:
        self.row, self.mode = config.precision_config.row, config.precision_config.mode
        self.frozen: DtypeName | None = None  # of frozen parameters, if declared separately
        self.packed: dict[str, str] = {}  # by name, of packed weights, which are never cast
        self.is_error = config.contract != "warn"
        self.realized: dict[str, dict[str, int]] = {}
        self.watching = True  # until the first optimizer step; later ones cost nothing
        self._warned: set[str] = set()

    def check(self, what: str, named: Iterable[tuple[str, torch.Tensor]], declared: str | None) -> None:
        """Count the dtypes of these floating-point tensors, and compare each with the declared dtype, if any.

        Raises:
            ContractError: A tensor has another dtype and ``contract`` is not ``warn``, which logs it once instead.
        """
        found = [(name, dtype_name(tensor.dtype)) for name, tensor in named if tensor.is_floating_point()]
        wrong = next((f"{name} is {dtype}" for name, dtype in found if declared not in (None, dtype)), "")
        if wrong and (self.is_error or what not in self._warned):
            text = (
                f"precision contract broken: {what}: {wrong}\n"
                f"  declared: {declared} (mode {self.mode})\n"
                "  fix:      remove the cast (.half(), .bfloat16(), autocast), choose the precision mode that "
                "declares it, or set contract: warn"
            )
            if self.is_error:
                raise ContractError(text)
            self._warned.add(what)
            _log.warning("%s", text)
        if found:
            self.realized[what] = dict(Counter(self.realized.get(what, {})) + Counter(dtype for _, dtype in found))

    def check_parameters(
        self, what: str, named: Iterable[tuple[str, torch.Tensor]], declared: str | None = None
    ) -> None:
        """:meth:`check` trained, frozen and packed parameters separately, by storage or (unpacked) gathered dtype."""
        kinds: dict[tuple[str, str], list[tuple[str, torch.Tensor]]] = {}
        for name, param in named:
            kind: tuple[str, str] = ("", declared or self.row.param)
            if name in self.packed:
                kind = ("packed ", self.packed[name])
            elif self.frozen is not None and not param.requires_grad:
                kind = ("frozen ", declared or self.frozen)
            kinds.setdefault(kind, []).append((name, param))
        for (which, dtype), params in kinds.items():
            self.check(f"{which}{what}", params, dtype)

    @contextlib.contextmanager
    def watch_reductions(self) -> Iterator[None]:
        """Check the dtype of every reduction until the first step, by wrapping torch's collectives."""
        seen: dict[tuple[str, torch.dtype], torch.Tensor] = {}  # empty tensors with these dtypes
        originals = {name: getattr(dist, name) for name in _REDUCTIONS if self.watching and hasattr(dist, name)}

        def recording(name: str) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                tensor = kwargs.get("tensor", kwargs.get("output", args[0] if args else None))
                if torch.is_tensor(tensor):
                    seen[name, tensor.dtype] = torch.empty(0, dtype=tensor.dtype)
                return originals[name](*args, **kwargs)

            return call

        for name in originals:
            setattr(dist, name, recording(name))
        try:
            yield
        finally:
            for name, original in originals.items():
                setattr(dist, name, original)
        self.check("reductions", [(name, like) for (name, _), like in seen.items()], self.row.reduce)

    def report(self) -> dict[str, Any]:
        """Declared and realized dtypes for ``dtypes.json``; dtypes that were not observed are absent."""
        return {"mode": self.mode, "declared": declared_dtypes(self.row, self.frozen), "realized": self.realized}


def moments(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of an optimizer's state by name, without 0-dim step counters; parameters by id are in ``names``."""
    for param, state in optimizer.state.items():
        for key, value in state.items():
            if torch.is_tensor(value) and value.dim():
                yield f"{names.get(id(param), '?')}.{key}", value
