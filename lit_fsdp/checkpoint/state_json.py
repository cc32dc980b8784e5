"""Non-tensor state as JSON that reads back exactly, without pickle.

Plain JSON values stand for themselves. Everything else is an object with one key that begins with ``$``, the
name of its type; the data of tensors and NumPy arrays goes into safetensors, the JSON keeps a reference.
"""

from __future__ import annotations

import base64
import datetime
import json
import math
import pathlib
import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from lit_fsdp.errors import CheckpointError

_FACTORIES: dict[str, Callable[[], Any] | None] = {
    "none": None, "int": int, "float": float, "str": str, "bool": bool,
    "list": list, "dict": dict, "set": set, "tuple": tuple,
}  # fmt: skip
_PATHS = {"path": pathlib.Path, "pure_posix_path": pathlib.PurePosixPath, "pure_windows_path": pathlib.PureWindowsPath}
_DTYPES = {str(t).removeprefix("torch."): t for t in vars(torch).values() if isinstance(t, torch.dtype)}
_JSON_INT_BITS = 64
_MAX_DEPTH = 100


def encode(state: Any) -> tuple[str, dict[str, torch.Tensor]]:
    """``state`` as JSON text and the tensors it refers to.

    Tensors come back on the CPU, detached, and each on its own: views of one storage become separate tensors.

    Args:
        state: Any nest of dict, list, tuple, set, frozenset, None, bool, int, float, complex, str, bytes, timedelta,
            paths, NumPy scalars and arrays, torch.Size, dtype, device, Counter, defaultdict, OrderedDict and dense
            tensors. Subclasses are not taken for their bases, because they would not come back as what they were.

    Raises:
        CheckpointError: Something else; named by its path inside the state, e.g. ``callbacks.EarlyStopping.thing``.
    """
    encoder = _Encoder()
    return json.dumps(encoder.encode(state, ()), indent=1, allow_nan=False), encoder.tensors


def refused(state: Any) -> str | None:
    """What in ``state`` :func:`encode` refuses, and where; None if it takes everything."""
    try:
        encode(state)
    except CheckpointError as error:
        return str(error).rpartition(": ")[0]
    return None


def decode(text: str | bytes, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The state that :func:`encode` turned into ``text`` and ``tensors``.

    Raises:
        CheckpointError: The text is malformed or refers to a tensor that is not there.
    """
    try:
        return _decode(json.loads(text), tensors)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, struct.error) as error:
        raise CheckpointError(f"state: malformed ({error!r})") from error


class _Encoder:
    """One walk over a state; collects its tensors."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._open: set[int] = set()

    def encode(self, value: Any, path: tuple[Any, ...]) -> Any:
        """``value``, which stands at ``path``, as plain JSON."""
        if value is None or type(value) in (bool, str):
            return value
        if type(value) in _SCALARS:
            return _SCALARS[type(value)](value)
        if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
            return self._encode_array(value, path)
        if type(value) in (list, tuple, set, frozenset, dict, OrderedDict, Counter, defaultdict):
            if id(value) in self._open or len(path) > _MAX_DEPTH:
                raise _refused(value, path, "it contains itself or is nested too deeply")
            self._open.add(id(value))
            encoded = self._encode_container(value, path)
            self._open.remove(id(value))
            return encoded
        raise _refused(value, path, "only plain Python data, NumPy data and tensors can be saved without pickle")

    def _encode_container(self, value: Any, path: tuple[Any, ...]) -> Any:
        kind = type(value)
        if kind is list:
            return self._items(value, path)
        if kind is tuple:
            return {"$tuple": self._items(value, path)}
        if kind in (set, frozenset):
            return {f"${kind.__name__}": sorted(self._items(value, path), key=json.dumps)}
        if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
            return {key: self.encode(item, (*path, key)) for key, item in value.items()}
        pairs = [[self.encode(key, (*path, key)), self.encode(item, (*path, key))] for key, item in value.items()]
        if kind is not defaultdict:
            return {"$dict" if kind is dict else "$counter" if kind is Counter else "$ordered_dict": pairs}
        for name, factory in _FACTORIES.items():
            if value.default_factory is factory:
                return {"$defaultdict": [name, pairs]}
        raise _refused(value.default_factory, path, f"a defaultdict may only make one of {', '.join(_FACTORIES)}")

    def _items(self, values: Any, path: tuple[Any, ...]) -> list[Any]:
        return [self.encode(item, (*path, index)) for index, item in enumerate(values)]

    def _encode_array(self, value: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(value, torch.Tensor):
            dense = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
            if not dense or value.is_quantized or value.is_meta or value.dtype not in _STORABLE:
                raise _refused(value, path, "only dense tensors of common dtypes; sharded ones belong in `tensors`")
            return {"$tensor": self._keep(value.detach().resolve_conj().resolve_neg().cpu().contiguous().clone())}
        subclass = isinstance(value, np.ndarray) and type(value) is not np.ndarray
        if subclass or value.dtype.hasobject or value.dtype.names:
            raise _refused(value, path, "only plain NumPy arrays of numbers, text or times")
        data = value.tobytes()
        if isinstance(value, np.generic):
            return {"$numpy_scalar": [value.dtype.str, base64.b64encode(data).decode()]}
        content = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        return {"$numpy": [value.dtype.str, list(value.shape), self._keep(content)]}

    def _keep(self, tensor: torch.Tensor) -> str:
        key = f"tensor-{len(self.tensors):05d}"
        self.tensors[key] = tensor
        return key


def _int(value: int) -> Any:
    return value if value.bit_length() <= _JSON_INT_BITS else {"$int": hex(value)}


def _float(value: float) -> Any:
    return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}


_SCALARS: dict[type, Callable[[Any], Any]] = {
    int: _int,
    float: _float,
    complex: lambda v: {"$complex": struct.pack(">dd", v.real, v.imag).hex()},
    bytes: lambda v: {"$bytes": base64.b64encode(v).decode()},
    datetime.timedelta: lambda v: {"$timedelta": [v.days, v.seconds, v.microseconds]},
    np.str_: lambda v: {"$numpy_str": str(v)},
    np.bytes_: lambda v: {"$numpy_bytes": base64.b64encode(v).decode()},
    torch.Size: lambda v: {"$size": list(v)},
    torch.dtype: lambda v: {"$dtype": str(v).removeprefix("torch.")},
    torch.device: lambda v: {"$device": str(v)},
    type(pathlib.Path()): lambda v: {"$path": str(v)},
    pathlib.PurePosixPath: lambda v: {"$pure_posix_path": str(v)},
    pathlib.PureWindowsPath: lambda v: {"$pure_windows_path": str(v)},
}
_STORABLE = {
    getattr(torch, name)
    for name in (
        "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 "
        "float8_e4m3fn float8_e5m2"
    ).split()
}


def _refused(value: Any, path: tuple[Any, ...], why: str) -> CheckpointError:
    where = ".".join(str(part) for part in path) or "the state"
    kind = type(value)
    return CheckpointError(f"{where}: cannot save a {kind.__module__}.{kind.__qualname__}: {why}")


def _decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        return {key: _decode(item, tensors) for key, item in value.items()}
    if len(value) != 1:
        raise ValueError(f"{tag} beside other keys")
    body = value[tag]
    if tag in _CONTAINERS:
        return _CONTAINERS[tag](_decode(body, tensors))
    if tag == "$tensor":
        return tensors[body]
    if tag == "$numpy":
        dtype, shape, key = body
        return np.frombuffer(tensors[key].numpy().tobytes(), dtype=_plain_dtype(dtype)).reshape(shape).copy()
    return _LEAVES[tag](body)


_CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "$tuple": tuple,
    "$set": set,
    "$frozenset": frozenset,
    "$dict": dict,
    "$ordered_dict": OrderedDict,
    "$counter": lambda pairs: Counter(dict(pairs)),
    "$defaultdict": lambda body: defaultdict(_FACTORIES[body[0]], body[1]),
}
_LEAVES: dict[str, Callable[[Any], Any]] = {
    "$int": lambda v: int(v, 16),
    "$float": lambda v: struct.unpack(">d", bytes.fromhex(v))[0],
    "$complex": lambda v: complex(*struct.unpack(">dd", bytes.fromhex(v))),
    "$bytes": lambda v: base64.b64decode(v, validate=True),
    "$timedelta": lambda v: datetime.timedelta(*v),
    "$numpy_str": np.str_,
    "$numpy_bytes": lambda v: np.bytes_(base64.b64decode(v, validate=True)),
    "$size": torch.Size,
    "$dtype": lambda v: _DTYPES[v],
    "$device": torch.device,
    "$numpy_scalar": lambda v: np.frombuffer(base64.b64decode(v[1], validate=True), dtype=_plain_dtype(v[0]))[0],
    **{f"${tag}": kind for tag, kind in _PATHS.items()},
}


def _plain_dtype(text: str) -> np.dtype[Any]:
    dtype = np.dtype(text)
    if dtype.hasobject or dtype.names:
        raise ValueError(f"dtype {text}")
    return dtype
