"""Precision: what the engines leave to us is cast here, and what they did is read back and compared.

The contract sets no dtype: the engines are given the mode's row, and then asked what they did.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from lit_fsdp.config.strategy import StrategyConfig
from lit_fsdp.errors import ContractError, require
from lit_fsdp.host import cpu_has_bf16

_log = logging.getLogger(__name__)
TORCH_DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Newer torch reduces through reduce_scatter_single, older through reduce_scatter_tensor.
_REDUCTIONS = ("reduce_scatter_single", "reduce_scatter_tensor", "all_reduce")
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
_FP8_CAPABILITY = (8, 9)
_FP8_SKIP = ("lm_head", "embed_out")
_FP8_MULTIPLE = 16  # fp8 kernels take dimensions that are multiples of this


def dtype_name(dtype: torch.dtype) -> str:
    """The short name of a dtype: ``fp32``, ``bf16``, … or torch's own."""
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))


# -- the device


def has_bf16(device_type: str) -> bool:
    """Whether this process's device has bf16 instructions; without a GPU here, those of a job are taken to."""
    if device_type == "cpu":
        return cpu_has_bf16()
    return not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False)


def settle_precision(config: StrategyConfig, device_type: str, on_all: Callable[[bool], bool]) -> StrategyConfig:
    """Decide what ``precision: auto`` is, alike on all ranks, whose machines may differ, and say so on rank 0.

    Any other mode stays, with a warning where a CPU has to emulate its bf16.

    Args:
        config: The factory's arguments.
        device_type: ``cpu`` or ``cuda``.
        on_all: Whether something holds on all ranks; collective.
    """
    given, own = config.precision_config, has_bf16(device_type)
    everywhere = on_all(own)
    settled = config.on(everywhere)
    if dist.get_rank() != 0:
        return settled
    place = f"{'this' if everywhere or not own else 'another'} {'CPU' if device_type == 'cpu' else 'GPU'}"
    what = f"{place} has {'' if everywhere else 'no '}bf16 instructions"
    if given.mode == "auto":
        _log.info("precision auto: %s, as %s", settled.precision_config.mode, what)
    elif device_type == "cpu" and not everywhere and given.row.compute == "bf16":
        _log.warning(
            "precision %s computes in bf16, about eight times slower than fp32, as %s (AVX512-BF16, AMX or Arm BF16); "
            "set the strategy's precision to auto, or fp32", given.mode, what
        )  # fmt: skip
    return settled


def check_device(config: StrategyConfig, device_type: str, path: str) -> None:
    """Refuse what this kind of device cannot do.

    Args:
        config: The factory's arguments.
        device_type: ``cpu`` or ``cuda``.
        path: Where the strategy's arguments stand in the recipe.

    Raises:
        ConfigError: FSDP1's CPU offload or NCCL without an accelerator, fp8 without a GPU that multiplies in it or
            without torchao.
    """
    on_cpu, backend = device_type == "cpu", config.process_group_backend or ""
    wrong = config.cpu_offload and config.engine == "fsdp1" and on_cpu
    given = "true with engine fsdp1 on CPU"
    require(not wrong, f"{path}.cpu_offload", given, "a GPU, or engine fsdp2", "set engine: fsdp2")
    fix = "drop process_group_backend"
    wrong = on_cpu and "nccl" in backend
    require(not wrong, f"{path}.process_group_backend", f"{backend} on CPU", "gloo", fix)
    wrong = not on_cpu and backend == "gloo"
    require(not wrong, f"{path}.process_group_backend", "gloo on GPUs", "nccl | cpu:gloo,cuda:nccl", fix)
    if config.precision_config.mode == "fp8":
        found = importlib.util.find_spec("torchao") is not None
        allowed, fix = "fp8 with torchao installed", "pip install 'lit-fsdp[fp8]'"
        require(found, f"{path}.precision", "fp8 without torchao", allowed, fix)
        given = "fp8 on a CPU" if on_cpu else f"fp8 on {torch.cuda.get_device_name()}"
        fits = not on_cpu and torch.cuda.get_device_capability() >= _FP8_CAPABILITY
        require(fits, f"{path}.precision", given, "an NVIDIA Hopper GPU or newer", "set precision: mixed")


# -- casts


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast all floating-point parameters (buffers stay) to their storage dtype in place; ties are kept."""
    done: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is None or not param.is_floating_point() or param.dtype == dtype:
                continue
            if id(param) not in done:
                done[id(param)] = nn.Parameter(param.detach().to(dtype), param.requires_grad)
            setattr(module, name, done[id(param)])  # an LSTM keeps a second list of them


def cast_buffers(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast all floating-point buffers in place, once: rotary frequencies lose positions in bf16, so it is a choice."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(dtype)


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


def without_autocast(module: nn.Module, device_type: str) -> None:
    """Let ``module.forward`` choose its dtypes by its weights alone, whatever autocast is on around it."""
    entered: list[Any] = []

    def enter(_module: nn.Module, _args: Any) -> None:
        entered.append(torch.autocast(device_type, enabled=False))
        entered[-1].__enter__()

    def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
        if entered:
            entered.pop().__exit__(None, None, None)

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)


def fp32_norms(model: nn.Module, config: StrategyConfig) -> list[nn.Module]:
    """Norms with weights that stay fp32: all that the recipe asks for, and batch norms, where torch mixes no dtypes."""
    precision = config.precision_config
    mixes = config.is_sharded and not config.wrap_config.manual and precision.row.compute != precision.row.param
    return [
        m
        for m in model.modules()
        if "norm" in type(m).__name__.lower()
        and any(p is not None for p in m._parameters.values())
        and not list(m.children())
        if precision.keep_norms_fp32 or (mixes and isinstance(m, nn.modules.batchnorm._BatchNorm))
    ]


def apply_float8(model: nn.Module, skip: Sequence[str] | None, path: str, emulate: bool = False) -> list[str]:
    """Replace the model's linear layers by torchao's float8 ones in place, before it is sharded.

    Args:
        model: On meta or not; parameters are kept as they are.
        skip: Parts of paths of layers to leave alone; default: the output head.
        path: Of ``precision`` in the recipe.
        emulate: Compute with casts instead of fp8 kernels, on any device, for tests.

    Returns:
        Paths of the layers replaced.

    Raises:
        ConfigError: Nothing is left to replace.
    """
    words = _FP8_SKIP if skip is None else tuple(skip)
    linears = {name: m for name, m in model.named_modules() if type(m) is nn.Linear}
    names = {
        name
        for name, m in linears.items()
        if not any(word in name for word in words)
        and not (m.in_features % _FP8_MULTIPLE or m.out_features % _FP8_MULTIPLE)
    }
    allowed = f"linear layers whose sizes are multiples of {_FP8_MULTIPLE} and that fp8_skip leaves"
    fix = "set precision: mixed, or shorten fp8_skip"
    require(names, f"{path}.fp8_skip", "nothing left to compute in fp8", allowed, fix)
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(emulate=emulate)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _module, name: name in names)
    return sorted(names)


# -- the contract


class DtypeContract:
    """Compares declared and realized dtypes, and keeps both for ``dtypes.json``.

    Args:
        config: The factory's arguments, with a precision mode that promises a row of dtypes.
    """

    def __init__(self, config: StrategyConfig) -> None:
        self.row, self.mode = config.precision_config.row, config.precision_config.mode
        self._gathered = self.row.compute if config.is_sharded else self.row.param  # autocast leaves them as they are
        self.is_error = config.contract != "warn"
        """Whether a difference ends the run; else it is said once per kind."""
        self.realized: dict[str, dict[str, int]] = {}
        self._warned: set[str] = set()
        self._handles: list[Any] = []
        self._first_step_done = False

    def check_parameters(self, named: Iterable[tuple[str, torch.Tensor]], when: str) -> None:
        """Parameters at rest, e.g. ``when="after set-up"``; raises ContractError naming the first that differs."""
        self._compare(f"parameters {when}", {n: p.dtype for n, p in named if p.is_floating_point()}, self.row.param)

    def check_buffers(self, named: Iterable[tuple[str, torch.Tensor]], declared: str | None) -> None:
        """Floating-point buffers against the dtype declared for them; ``None`` declares nothing, and they are noted."""
        floating = {name: buffer.dtype for name, buffer in named if buffer.is_floating_point()}
        if declared is None:
            self._note("buffers", floating)
        else:
            self._compare("buffers", floating, declared)

    def check_gradients(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Gradients as the optimizer is about to see them: the dtype of their parameters."""
        self._compare("gradients", {n: p.grad.dtype for n, p in named if p.grad is not None}, self.row.param)

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

    def watch(self, units: Mapping[str, nn.Module], fp32_units: Iterable[str] = ()) -> None:
        """Record, in the next forward passes, the dtype of gathered parameters and of the outputs of these units.

        Args:
            units: By name; units may lie inside others, whose parameters they are not.
            fp32_units: Those that are gathered in fp32 whatever the mode says.
        """
        for name, module in units.items():
            if any(p.is_floating_point() for p in module.parameters()):  # after the gather, and before it is freed
                inner = tuple(f"{other.removeprefix(f'{name}.')}." for other in units if other.startswith(f"{name}."))
                dtype = "fp32" if name in fp32_units else self._gathered
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
        """Declared and realized dtypes for ``dtypes.json``; what was not observed is absent."""
        declared = {"param": self.row.param, "compute": self.row.compute, "reduce": self.row.reduce}
        return {"mode": self.mode, "declared": declared, "realized": self.realized}

    def _gathered_hook(self, name: str, inner: tuple[str, ...], dtype: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            named = [(n.replace("_fsdp_wrapped_module.", ""), p) for n, p in module.named_parameters()]
            own = [(n, p) for n, p in named if p.is_floating_point() and p.dim() and not n.startswith(inner)]
            self._compare("gathered parameters in the forward", {f"{name}.{n}": p.dtype for n, p in own}, dtype)

        return hook

    def _output_hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            tensors = [t for t in tree_leaves(output) if torch.is_tensor(t) and t.is_floating_point()]
            outputs = {f"output {i} of {name}": tensor.dtype for i, tensor in enumerate(tensors)}
            self._note("activations", outputs)  # a block may well keep its residual stream in another dtype

        return hook

    def _note(self, what: str, found: Mapping[str, torch.dtype]) -> None:
        counts = Counter(self.realized.get(what, {}))
        counts.update(dtype_name(dtype) for dtype in found.values())
        if found:
            self.realized[what] = dict(counts)

    def _compare(self, what: str, found: Mapping[str, torch.dtype], declared: str) -> None:
        name = next((name for name, dtype in found.items() if dtype_name(dtype) != declared), None)
        if name is not None and (self.is_error or what not in self._warned):
            text = (
                f"precision contract broken: {what}: {name} is {dtype_name(found[name])}\n"
                f"  declared: {declared} (mode {self.mode})\n"
                "  fix:      remove what casts it (trainer.precision, .half(), .bfloat16(), autocast), choose the "
                "precision mode that says so, or set contract: warn"
            )
            if self.is_error:
                raise ContractError(text)
            self._warned.add(what)
            _log.warning("%s", text)
        self._note(what, found)
