"""An accelerator ``sim`` without hardware: fake tensors that know their device, what they hold beside them, streams.

The host is real. Of each tensor on the device a second one on the host holds the values; the device itself has none.
"""

from __future__ import annotations

import contextlib
import traceback
import types
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.testing._internal.distributed.fake_pg import FakeProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

aten = torch.ops.aten
_ROOT = str(Path(__file__).parents[2])
_PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)
_INDEXED = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)
_NO_VALUES = (DataDependentOutputException, DynamicOutputShapeException)


class Stream:
    """A queue of the device, and how many operations of each queue have ended before its next one."""

    stream_id, device_index, device_type = 0, 0, 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.ended: Counter[Any] = Counter()
        self.freed: list[tuple[Stream, int, str]] = []

    def begin(self) -> int:
        """Count an operation, which comes after all that the host has waited for."""
        self.ended |= HOST.ended
        self.ended[self] += 1
        return self.ended[self]

    def wait_stream(self, other: Stream | Event) -> None:
        """Let what follows come after ``other``."""
        self.ended |= other.ended

    wait_event = wait_stream

    def record_event(self, event: Event | None = None) -> Event:
        """An event that this stream reaches now."""
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Let the host wait, if it has not for something later."""
        if self.ended - HOST.ended:
            note_wait("synchronize")
        HOST.ended |= self.ended


class Event:
    """A point of a stream."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.ended: Counter[Any] = Counter()

    def record(self, stream: Stream | None = None) -> None:
        """The point that has been reached now."""
        self.ended = (stream or NOW[-1]).ended.copy()

    def wait(self, stream: Stream | None = None) -> None:
        """Let a stream wait."""
        (stream or NOW[-1]).wait_event(self)

    synchronize = Stream.synchronize

    def query(self) -> bool:
        """Whether it is over."""
        return True


HOST = Stream()
NOW = [Stream()]
"""The compute stream, and those that a ``with`` has put on top."""
WAITS: Counter[str] = Counter()
"""What made the host wait for the device, and where."""
RACES: list[str] = []
"""Memory that its stream may write over while another one still uses it."""


def note_wait(what: str) -> None:
    """Let the host wait for the stream of now, and note the lines of ours and of the libraries that asked for it."""
    HOST.ended |= NOW[-1].ended
    frames = [frame for frame in traceback.extract_stack() if frame.filename != __file__]
    ours = [f for f in frames if "/lit_fsdp/" in f.filename or "/lightning/" in f.filename or "/fsdp/" in f.filename]
    at = [f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in ours[:-4:-1]]
    WAITS[f"{what} < {' < '.join(at)}"] += 1


class _Module(types.ModuleType):
    """What torch asks of ``torch.sim``."""

    Stream, Event = Stream, Event
    memory = types.SimpleNamespace(_record_memory_history=lambda *a, **k: None, _dump_snapshot=lambda path: None)

    def __getattr__(self, name: str) -> Any:
        answers = {
            **dict.fromkeys(("is_available", "is_initialized", "is_bf16_supported"), True),
            **dict.fromkeys(("current_device", "max_memory_allocated", "max_memory_reserved"), 0),
            **dict.fromkeys(("set_device", "manual_seed_all", "manual_seed", "set_rng_state", "empty_cache"), None),
            **{"device_count": 1, "_is_in_bad_fork": False, "get_device_name": "Simulated"},
            "get_amp_supported_dtype": [torch.bfloat16, torch.float16],
            "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        }
        if name not in answers:
            raise AttributeError(name)
        return lambda *args, **kwargs: answers[name]

    def current_stream(self, *args: Any) -> Stream:
        return NOW[-1]

    def synchronize(self, *args: Any) -> None:
        NOW[-1].synchronize()

    @contextlib.contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        NOW.append(stream or NOW[-1])
        try:
            yield
        finally:
            NOW.pop()


class Device(TorchDispatchMode):
    """Everything on ``sim`` as fake tensors, whose attribute ``value`` is the same on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.pinned: set[int] = set()
        self.recorded: set[tuple[int, Stream]] = set()
        self.uses: dict[int, tuple[Stream, dict[Stream, int]]] = {}
        torch.Tensor.record_stream = lambda tensor, stream: self.record(tensor, stream)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented
        is_here = any(isinstance(one, FakeTensor) for one in tree_leaves((args, kwargs)))
        target = torch.device(kwargs["device"]).type if kwargs.get("device") is not None else None
        if not is_here and target != "sim":
            return self._on_host(op, args, kwargs)
        if op is aten._to_copy.default and (not is_here or target == "cpu"):
            if not kwargs.get("non_blocking"):
                note_wait(f"copy to the {'host' if is_here else 'device'}")
            self._use([args[0]])
            copied = op(_value(args[0]), **{**kwargs, "device": "cpu", "non_blocking": False, "pin_memory": False})
            return copied if is_here else self.wrap(copied)
        if op is aten.copy_.default and not (isinstance(args[0], FakeTensor) and isinstance(args[1], FakeTensor)):
            if not (args[2] if len(args) > 2 else kwargs.get("non_blocking")):
                note_wait("copy from one to the other")
            self._use(args[:2])
            _value(args[0]).copy_(_value(args[1]))
            return args[0]
        try:
            out = self.fake.dispatch(op, types, args, kwargs)  # not entered, which takes longer than an operation
        except _NO_VALUES:
            note_wait(op.__name__)
            self._use(args)
            return tree_map(self.wrap, _on_values(op, args, kwargs))
        if op in _INDEXED and any(one is not None and one.dtype == torch.bool for one in args[1]):
            note_wait("index by mask")
        self._use((args, kwargs, out))
        for made, value in zip(tree_leaves(out), tree_leaves(_on_values(op, args, kwargs)), strict=True):
            if isinstance(made, FakeTensor):
                made.value = value
        return out

    def _on_host(self, op: Any, args: Any, kwargs: Any) -> Any:
        pins = kwargs.pop("pin_memory", None)
        if op is aten.is_pinned.default:
            return args[0].untyped_storage()._cdata in self.pinned
        if op._opname == "monitored_barrier_":  # which gloo alone has
            return None
        out = args[0].clone() if op is aten._pin_memory.default else op(*args, **kwargs)
        if pins or op is aten._pin_memory.default:
            self.pinned.add(out.untyped_storage()._cdata)
        return out

    def wrap(self, value: Any) -> Any:
        """A tensor of the device with these values; other things as they are."""
        if not isinstance(value, torch.Tensor):
            return value
        with self.fake:
            made: Any = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="sim")
        made.value = value
        self._use([made])
        return made

    def _use(self, tensors: Any) -> None:
        """Note on which stream these are used, and made if they are new."""
        now, storages = NOW[-1], [t.untyped_storage() for t in tree_leaves(tensors) if isinstance(t, FakeTensor)]
        time = now.begin()
        for storage in storages:
            if storage._cdata not in self.uses:
                weakref.finalize(storage, self.free, storage._cdata)
                RACES.extend(what for other, at, what in now.freed if now.ended[other] < at)
                now.freed = []
            self.uses.setdefault(storage._cdata, (now, {}))[1][now] = time

    def record(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Let memory be free only once a stream, that is done with it for good, has come so far."""
        if isinstance(tensor, FakeTensor):
            self.recorded.add((tensor.untyped_storage()._cdata, stream))

    def free(self, key: int) -> None:
        """Give memory back to the stream that it is of, whose next tensor may lie there."""
        owner, uses = self.uses.pop(key)
        name = "the compute stream" if owner is NOW[0] else "a side stream"
        unsafe = (one for one in uses.items() if one[0] is not owner and (key, one[0]) not in self.recorded)
        owner.freed += [(other, time, f"memory of {name}") for other, time in unsafe]
        self.recorded = {one for one in self.recorded if one[0] != key}


def _value(tensor: Any) -> Any:
    return tensor.value if isinstance(tensor, FakeTensor) else tensor


def _on_values(op: Any, args: Any, kwargs: Any) -> Any:
    """What an operation gives on the host; a collective as if every rank had what this one has."""
    args, kwargs = tree_map(_value, (args, kwargs))
    if kwargs.get("device") is not None:
        kwargs["device"] = torch.device("cpu")
    together = _TOGETHER.get(op._opname) if op.namespace in ("c10d", "_c10d_functional") else None
    return op(*args, **kwargs) if together is None else together(*args)


def _all_reduced(tensors: Any, group: Any, reduce: Any, *_: Any) -> Any:
    for tensor in tensors:
        if dist.ReduceOp.unbox(reduce) == dist.ReduceOp.SUM:
            tensor.mul_(dist.ProcessGroup.unbox(group).size())
    return tensors, None


def _all_gathered(wholes: Any, parts: Any, *_: Any) -> Any:
    for whole, part in zip(wholes, parts, strict=True):
        for one in whole:
            one.copy_(part)
    return wholes, None


def _scattered(part: torch.Tensor, whole: torch.Tensor, group: Any, reduce: Any, *_: Any) -> Any:
    part.copy_(whole.view(-1)[: part.numel()].view_as(part))
    return _all_reduced([part], group, reduce)[0][0], None


_TOGETHER: dict[str, Any] = {
    "allreduce_": _all_reduced,
    "broadcast_": lambda tensors, *_: (tensors, None),
    "barrier": lambda *_: None,
    "allgather_": _all_gathered,
    "_allgather_base_": lambda whole, part, *_: (
        whole.copy_(part.repeat(whole.numel() // part.numel(), *part.shape[1:])),
        None,
    ),
    "_reduce_scatter_base_": _scattered,
    "gather_": lambda *args: _all_gathered(*args)[1],
    "scatter_": lambda parts, wholes, *_: (
        [part.copy_(whole[0]) for part, whole in zip(parts, wholes, strict=True)],
        None,
    ),
    "wait_tensor": lambda tensor: tensor,
    "all_gather_into_tensor": lambda part, size, *_: torch.cat([part] * size),
}


def register() -> None:
    """Make the device known, with a backend of groups that has nothing for the host, as NCCL has not; once."""
    _setup_privateuseone_for_python_backend("sim", _Module("sim"))
    torch.accelerator.synchronize = lambda *args: NOW[-1].synchronize()
    torch._C._set_only_lift_cpu_tensors(True)

    alike = FakeProcessGroup.Options()
    alike.simulate_uniform_ranks = True

    def create(common: Any, options: Any) -> Any:
        return FakeProcessGroup._create_internal(common.group_rank, common.group_size, alike)

    def create_on_host(common: Any, options: Any) -> Any:
        return create(common, options)

    dist.Backend.register_backend("simccl", create, extended_api=True, devices=["sim"])
    dist.distributed_c10d._create_gloo_process_group = create_on_host
    by_storage = StateDictStager._offload_tensor

    def stage(stager: Any, tensor: Any, memo: Any, non_blocking: bool = False) -> Any:
        is_here = isinstance(tensor, FakeTensor)  # whose storage torch would copy, and that has nothing
        return (
            tensor.to("cpu", non_blocking=non_blocking) if is_here else by_storage(stager, tensor, memo, non_blocking)
        )

    StateDictStager._offload_tensor = stage
    FakeTensor.tolist = torch.Tensor.tolist = _tolist
    torch.utils.swap_tensors = _put  # by which modules move
    torch.Tensor.data = property(_DATA.__get__, _put)
    global _AUTOCAST
    _AUTOCAST = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
    _AUTOCAST.fallback(torch.library.fallthrough_kernel)


_DATA: Any = torch.Tensor.data
_TOLIST: Any = torch.Tensor.tolist


def _tolist(tensor: Any) -> Any:
    """One copy, as torch does it for tensors that have values."""
    if isinstance(tensor, FakeTensor):
        note_wait("tolist")
    return _TOLIST(_value(tensor))


def _put(tensor: Any, data: torch.Tensor) -> None:
    """Let a tensor have other data; torch refuses to put what is fake in place of what is not."""
    if isinstance(data, FakeTensor) == isinstance(tensor, FakeTensor):
        _DATA.__set__(tensor, data)
    else:
        held, is_param = dict(vars(tensor)), isinstance(tensor, torch.nn.Parameter)
        other = data.detach().requires_grad_(tensor.requires_grad)
        tensor.__class__, other.__class__ = type(other), type(tensor)
        torch._C._swap_tensor_impl(tensor, other)
        vars(tensor).update({**vars(other), **held, "_is_param": is_param})
    if isinstance(data, FakeTensor):
        tensor.value = data.value
