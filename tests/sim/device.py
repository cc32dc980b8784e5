"""An accelerator ``sim`` without hardware: fake tensors, which know their device, with values beside; and streams."""

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
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch._subclasses.fake_tensor import FakeTensor as Fake
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.testing._internal.distributed.fake_pg import FakeProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

aten = torch.ops.aten
_INDEXED = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)
_DATA, _TOLIST, _STAGE = (torch.Tensor.data, torch.Tensor.tolist, StateDictStager._offload_tensor)  # torch's own
_ANSWERS = {
    **dict.fromkeys("is_available is_initialized device_count".split(), 1),
    **dict.fromkeys("current_device max_memory_allocated max_memory_reserved _is_in_bad_fork".split(), 0),
    **dict.fromkeys("set_device manual_seed_all set_rng_state".split()),
    **{"get_device_name": "Simulated", "get_amp_supported_dtype": [torch.bfloat16, torch.float16]},
    "get_rng_state": torch.zeros(16, dtype=torch.uint8),
}
_KEPT: list[Any] = []


class Stream:
    """A queue of the device, or an event in it: how many operations of each queue have ended before what follows."""

    stream_id, device_index, device_type = 0, 0, 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.ended: Counter[Any] = Counter()
        self.freed: list[tuple[Stream, int]] = []

    def begin(self) -> int:
        self.ended |= HOST.ended  # an operation comes after all that the host has waited for
        self.ended[self] += 1
        return self.ended[self]

    def wait_stream(self, other: Stream) -> None:
        self.ended |= other.ended

    wait_event = wait_stream

    def record_event(self) -> Stream:
        Stream.record(event := Stream(), self)
        return event

    def record(self, stream: Stream | None = None) -> None:
        self.ended = (stream or NOW[-1]).ended.copy()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or NOW[-1]).wait_stream(self)

    def synchronize(self) -> None:
        if self.ended - HOST.ended:  # else the host has waited for something later
            note_wait("synchronize")
        HOST.ended |= self.ended


HOST, NOW = Stream(), [Stream()]
WAITS: Counter[str] = Counter()  # what made the host wait for the device, and where
RACES: list[str] = []  # memory that its stream gave away while another one was not done with it


def note_wait(what: str) -> None:
    """Let the host wait for the stream of now, and note the lines of ours and of the libraries that asked for it."""
    HOST.ended |= NOW[-1].ended
    folders = ("/lit_fsdp/", "/lightning/", "/fsdp/")
    frames = [frame for frame in traceback.extract_stack() if any(name in frame.filename for name in folders)]
    WAITS[" < ".join([what, *(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in frames[:-4:-1])])] += 1


class _Module(types.ModuleType):
    Stream = Event = Stream
    memory = types.SimpleNamespace(_record_memory_history=lambda *a, **k: None)

    def __getattr__(self, name: str) -> Any:
        if name not in _ANSWERS:
            raise AttributeError(name)
        return lambda *args, **kwargs: _ANSWERS[name]

    current_stream = staticmethod(lambda *_: NOW[-1])
    synchronize = staticmethod(lambda *_: NOW[-1].synchronize())

    @contextlib.contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        NOW.append(stream or NOW[-1])
        yield
        NOW.pop()


class Device(TorchDispatchMode):
    """Everything on ``sim`` as fake tensors, whose attribute ``value`` is the same on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.pinned: set[int] = set()
        self.uses: dict[int, tuple[Stream, dict[Stream, int]]] = {}
        torch.Tensor.record_stream = lambda tensor, stream: self.record(tensor, stream)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if any(kind not in (torch.Tensor, torch.nn.Parameter, Fake) for kind in types):
            return NotImplemented
        is_here = any(isinstance(one, Fake) for one in tree_leaves((args, kwargs)))
        target = None if kwargs.get("device") is None else torch.device(kwargs["device"]).type
        if not is_here and target != "sim":
            kwargs.pop("pin_memory", None)
            if op._opname in ("is_pinned", "monitored_barrier_"):  # gloo alone has the second
                return args[0].untyped_storage()._cdata in self.pinned if op is aten.is_pinned.default else None
            out = args[0].clone() if op is aten._pin_memory.default else op(*args, **kwargs)
            self.pinned |= {out.untyped_storage()._cdata} if op is aten._pin_memory.default else set()
            return out
        copies = op is aten._to_copy.default and (not is_here or target == "cpu")
        if copies or (op is aten.copy_.default and not (isinstance(args[0], Fake) and isinstance(args[1], Fake))):
            if not kwargs.get("non_blocking", args[2] if len(args) > 2 else False):
                note_wait(f"copy to the {'host' if isinstance(args[0 if copies else 1], Fake) else 'device'}")
            self._use(args)
            if not copies:
                _value(args[0]).copy_(_value(args[1]))
                return args[0]
            copied = op(_value(args[0]), **{**kwargs, "device": "cpu", "non_blocking": False, "pin_memory": False})
            return copied if is_here else self.wrap(copied)
        try:
            out = self.fake.dispatch(op, types, args, kwargs)  # not entered, which takes longer than an operation
        except (DataDependentOutputException, DynamicOutputShapeException):
            note_wait(op.__name__)
            self._use(args)
            return tree_map(self.wrap, _on_values(op, args, kwargs))
        if op in _INDEXED and any(one is not None and one.dtype == torch.bool for one in args[1]):
            note_wait("index by mask")
        self._use((args, kwargs, out))
        for made, value in zip(tree_leaves(out), tree_leaves(_on_values(op, args, kwargs)), strict=True):
            if isinstance(made, Fake):
                made.value = value
        return out

    def wrap(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        with self.fake:
            made: Any = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="sim")
        made.value = value
        self._use([made])
        return made

    def _use(self, tensors: Any) -> None:
        """Note on which stream these are used, and made if they are new: perhaps in memory that was given back."""
        now, storages = NOW[-1], [t.untyped_storage() for t in tree_leaves(tensors) if isinstance(t, Fake)]
        time = now.begin()
        for storage in storages:
            if storage._cdata not in self.uses:
                weakref.finalize(storage, self._free, storage._cdata)
                owner = "the compute stream" if now is NOW[0] else "a side stream"
                RACES.extend(f"memory of {owner}" for other, at in now.freed if now.ended[other] < at)
                now.freed = []
            self.uses.setdefault(storage._cdata, (now, {}))[1][now] = time

    def record(self, tensor: torch.Tensor, stream: Stream) -> None:
        if isinstance(tensor, Fake):  # whose memory is given back no sooner than the stream is done with it
            self.uses[tensor.untyped_storage()._cdata][1].pop(stream, None)

    def _free(self, key: int) -> None:
        owner, uses = self.uses.pop(key)
        owner.freed += [one for one in uses.items() if one[0] is not owner]


def _value(tensor: Any) -> Any:
    return tensor.value if isinstance(tensor, Fake) else tensor


def _on_values(op: Any, args: Any, kwargs: Any) -> Any:
    """What an operation gives on the host; a collective as if every rank had what this one has."""
    args, kwargs = tree_map(_value, (args, kwargs))
    if kwargs.get("device") is not None:
        kwargs["device"] = torch.device("cpu")
    if op.namespace != "c10d" and op._opname != "all_gather_into_tensor":
        return op(*args, **kwargs)
    out, *given = args
    match op._opname:
        case "all_gather_into_tensor":
            return torch.cat([out] * given[0])
        case "allreduce_":
            _add_up(out, *given)
        case "_allgather_base_":
            out.view(-1, given[0].numel()).copy_(given[0].reshape(1, -1).clone())  # it may lie there
        case "_reduce_scatter_base_":
            out.view(-1).copy_(given[0].view(-1)[: out.numel()])
            _add_up([out], *given[1:])
        case "allgather_" | "gather_":
            for one in out[0]:
                one.copy_(given[0][0])
        case "scatter_":
            out[0].copy_(given[0][0][0])
        case other if other not in ("broadcast_", "barrier"):
            raise NotImplementedError(other)
    return None if op._opname in ("barrier", "gather_") else (out, None)


def _add_up(tensors: Any, group: Any, reduce: Any, *_: Any) -> None:
    for tensor in tensors if dist.ReduceOp.unbox(reduce) == dist.ReduceOp.SUM else ():
        tensor.mul_(dist.ProcessGroup.unbox(group).size())


def register() -> None:
    """Make the device known, with a backend of groups that has nothing for the host, as NCCL has not; once."""
    _setup_privateuseone_for_python_backend("sim", _Module("sim"))
    torch.accelerator.synchronize = _Module.synchronize
    torch._C._set_only_lift_cpu_tensors(True)
    alike = FakeProcessGroup.Options()
    alike.simulate_uniform_ranks = True

    def create(common: Any, options: Any) -> Any:
        return FakeProcessGroup._create_internal(common.group_rank, common.group_size, alike)

    dist.Backend.register_backend("simccl", create, extended_api=True, devices=["sim"])
    dist.distributed_c10d._create_gloo_process_group = create
    StateDictStager._offload_tensor = _stage
    Fake.tolist = torch.Tensor.tolist = _tolist
    torch.utils.swap_tensors, torch.Tensor.data = _put, property(_DATA.__get__, _put)
    _KEPT.append(torch.library.Library("_", "IMPL", "AutocastPrivateUse1"))
    _KEPT[0].fallback(torch.library.fallthrough_kernel)


def _stage(stager: Any, tensor: Any, memo: Any, non_blocking: bool = False) -> Any:
    if isinstance(tensor, Fake):  # torch copies the storage, which has nothing
        return tensor.to("cpu", non_blocking=non_blocking)
    return _STAGE(stager, tensor, memo, non_blocking)


def _tolist(tensor: Any) -> Any:
    if isinstance(tensor, Fake):  # one copy, as of tensors that have values
        note_wait("tolist")
    return _TOLIST(_value(tensor))


def _put(tensor: Any, data: torch.Tensor) -> None:
    """Let a tensor have other data; torch refuses to put what is fake in place of what is not."""
    if isinstance(data, Fake) == isinstance(tensor, Fake):
        _DATA.__set__(tensor, data)
    else:
        held, is_param = dict(vars(tensor)), isinstance(tensor, torch.nn.Parameter)
        other = data.detach().requires_grad_(tensor.requires_grad)
        tensor.__class__, other.__class__ = type(other), type(tensor)
        torch._C._swap_tensor_impl(tensor, other)
        vars(tensor).update({**vars(other), **held, "_is_param": is_param})
    if isinstance(data, Fake):
        tensor.value = data.value
