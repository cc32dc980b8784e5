"""Non-tensor state as JSON that reads back exactly, without pickle.

Plain JSON values stand for themselves. Everything else is an object with one key that begins with ``$``, the name
of its type, and holds what the type is made of, in the same way.
"""

from __future__ import annotations

import base64
import datetime
import math
import pathlib
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from lit_fsdp.errors import CheckpointError

_MAX_DEPTH = 100
_DTYPES = {str(t).removeprefix("torch."): t for t in vars(torch).values() if isinstance(t, torch.dtype)}


def encode(state: Any) -> Any:
    """``state``, any nest of Python's containers with what ``_TYPES`` lists, as plain JSON values.

    Tensors come back on the CPU, detached, and each on its own. Subclasses are not taken for their bases, because they
    would not come back as what they were.

    Raises:
        CheckpointError: Something else; named by its path inside the state, e.g. ``callbacks.EarlyStopping.thing``.
    """
    return _encode(state, ())


def refused(state: Any) -> str | None:
    """What in ``state`` :func:`encode` refuses, and where; None if it takes everything."""
    try:
        encode(state)
    except CheckpointError as error:
        return str(error).rpartition(": ")[0]
    return None


def decode(value: Any) -> Any:
    """The state that :func:`encode` turned into ``value``."""
    try:
        return _decode(value)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, RuntimeError) as error:
        raise CheckpointError(f"state: malformed ({error!r})") from error


def _encode(value: Any, path: tuple[Any, ...]) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
        return value
    if len(path) > _MAX_DEPTH:
        raise _refused(value, path[:8], "it contains itself or is nested too deeply")
    if kind is list:
        return [_encode(item, (*path, index)) for index, item in enumerate(value)]
    if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
        return {key: _encode(item, (*path, key)) for key, item in value.items()}
    if kind in (dict, OrderedDict, Counter):
        return {f"${kind.__name__}": [[_encode(k, (*path, k)), _encode(v, (*path, k))] for k, v in value.items()]}
    if kind is torch.nn.Parameter:
        kind = torch.Tensor
    elif isinstance(value, np.generic):
        kind = np.generic
    if kind is torch.Tensor and (value.layout is not torch.strided or value.is_quantized or value.is_meta):
        raise _refused(value, path, "only dense tensors; sharded ones belong in `tensors`")
    if kind in (np.ndarray, np.generic) and (value.dtype.hasobject or value.dtype.names):
        raise _refused(value, path, "only plain NumPy data of numbers, text or times")
    if kind not in _TYPES:
        raise _refused(value, path, "only plain Python data, NumPy data and tensors can be saved without pickle")
    name, parts, _ = _TYPES[kind]
    return {f"${name}": _encode(parts(value), path)}


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        return {key: _decode(item) for key, item in value.items()}
    if len(value) != 1:
        raise ValueError(f"{tag} beside other keys")
    return _READERS[tag](_decode(value[tag]))


def _refused(value: Any, path: tuple[Any, ...], why: str) -> CheckpointError:
    where = ".".join(str(part) for part in path) or "the state"
    kind = type(value)
    return CheckpointError(f"{where}: cannot save a {kind.__module__}.{kind.__qualname__}: {why}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tensor_parts(value: torch.Tensor) -> list[Any]:
    data = value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)
    return [_name(value.dtype), list(value.shape), data.numpy().tobytes()]


def _tensor(parts: list[Any]) -> torch.Tensor:
    dtype, shape, data = parts
    if not data:
        return torch.empty(shape, dtype=_DTYPES[dtype])
    return torch.frombuffer(bytearray(data), dtype=_DTYPES[dtype]).reshape(shape)


def _array_parts(value: Any) -> list[Any]:
    return [value.dtype.str, list(value.shape), value.tobytes()]


def _array(parts: list[Any]) -> np.ndarray[Any, Any]:
    name, shape, data = parts
    dtype = np.dtype(name)
    if dtype.hasobject or dtype.names:
        raise ValueError(f"dtype {dtype}")
    return np.frombuffer(data, dtype=dtype).reshape(shape).copy()


_TYPES: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    float: ("float", repr, float),  # inf and nan, which JSON has not
    bytes: ("bytes", lambda v: base64.b64encode(v).decode(), lambda text: base64.b64decode(text, validate=True)),
    tuple: ("tuple", list, tuple),
    set: ("set", lambda v: sorted(v, key=repr), set),
    frozenset: ("frozenset", lambda v: sorted(v, key=repr), frozenset),
    complex: ("complex", repr, complex),
    datetime.timedelta: (
        "timedelta",
        lambda v: [v.days, v.seconds, v.microseconds],
        lambda parts: datetime.timedelta(*parts),
    ),
    type(pathlib.Path()): ("path", str, pathlib.Path),
    torch.Size: ("size", list, torch.Size),
    torch.dtype: ("dtype", _name, _DTYPES.__getitem__),
    torch.device: ("device", str, torch.device),
    torch.Tensor: ("tensor", _tensor_parts, _tensor),
    np.ndarray: ("numpy", _array_parts, _array),
    np.generic: ("numpy_scalar", _array_parts, lambda parts: _array(parts)[()]),
}
"""By type: its name, what it is made of, and how it is made of that again."""
_READERS: dict[str, Callable[[Any], Any]] = {
    **{f"${name}": read for name, _, read in _TYPES.values()},
    "$dict": dict,
    "$OrderedDict": OrderedDict,
    "$Counter": lambda pairs: Counter(dict(pairs)),
}
