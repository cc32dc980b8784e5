"""Non-tensor state as JSON that reads back exactly, without pickle.

Plain JSON values stand for themselves. Everything else is an object with one key that begins with ``$``, the name
of its type.
"""

from __future__ import annotations

import base64
import datetime
import json
import math
import pathlib
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from lit_fsdp.errors import CheckpointError

_MAX_DEPTH = 100
_FACTORIES: dict[str, Callable[[], Any] | None] = {
    "none": None, "int": int, "float": float, "str": str, "list": list, "dict": dict, "set": set,
}  # fmt: skip
_DTYPES = {str(t).removeprefix("torch."): t for t in vars(torch).values() if isinstance(t, torch.dtype)}


def encode(state: Any) -> Any:
    """``state`` as plain JSON values.

    Tensors come back on the CPU, detached, and each on its own: views of one storage become separate tensors.

    Args:
        state: Any nest of dict, list, tuple, set, frozenset, None, bool, int, float, complex, str, bytes, timedelta,
            Path, NumPy scalars and arrays, torch.Size, dtype, device, Counter, defaultdict, OrderedDict and dense
            tensors. Subclasses are not taken for their bases, because they would not come back as what they were.

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
    """The state that :func:`encode` turned into ``value``.

    Raises:
        CheckpointError: It is malformed.
    """
    try:
        return _decode(value)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, RuntimeError) as error:
        raise CheckpointError(f"state: malformed ({error!r})") from error


def read_states(content: bytes) -> dict[str, Any]:
    """``state.json``: ``state`` of all ranks and ``ranks``, that of each, both as :func:`decode` takes them.

    Raises:
        CheckpointError: It is malformed.
    """
    try:
        document = json.loads(content)
        return {"state": document["state"], "ranks": list(document["ranks"])}
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"state: malformed ({error!r})") from error


def _encode(value: Any, path: tuple[Any, ...]) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
        return value
    if kind in _LEAVES:
        name, encoded, _ = _LEAVES[kind]
        return {f"${name}": encoded(value)}
    if isinstance(value, torch.Tensor):
        dense = kind in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
        if not dense or value.is_quantized or value.is_meta:
            raise _refused(value, path, "only dense tensors; sharded ones belong in `tensors`")
        data = value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)
        return {"$tensor": [_name(value.dtype), list(value.shape), _text(data.numpy().tobytes())]}
    if isinstance(value, np.generic) or kind is np.ndarray:
        if value.dtype.hasobject or value.dtype.names:
            raise _refused(value, path, "only plain NumPy data of numbers, text or times")
        where = "$numpy_scalar" if isinstance(value, np.generic) else "$numpy"
        return {where: [value.dtype.str, list(value.shape), _text(value.tobytes())]}
    if kind in (list, tuple, set, frozenset, dict, OrderedDict, Counter, defaultdict):
        if len(path) > _MAX_DEPTH:
            raise _refused(value, path[:8], "it contains itself or is nested too deeply")
        return _encode_container(value, path)
    raise _refused(value, path, "only plain Python data, NumPy data and tensors can be saved without pickle")


def _encode_container(value: Any, path: tuple[Any, ...]) -> Any:
    kind = type(value)
    if kind in (list, tuple, set, frozenset):
        items = [_encode(item, (*path, index)) for index, item in enumerate(value)]
        if kind in (set, frozenset):
            items.sort(key=json.dumps)
        return items if kind is list else {f"${kind.__name__}": items}
    if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
        return {key: _encode(item, (*path, key)) for key, item in value.items()}
    pairs = [[_encode(key, (*path, key)), _encode(item, (*path, key))] for key, item in value.items()]
    if kind is not defaultdict:
        return {f"${kind.__name__}": pairs}
    for name, factory in _FACTORIES.items():
        if value.default_factory is factory:
            return {"$defaultdict": [name, pairs]}
    raise _refused(value.default_factory, path, f"a defaultdict may only make one of {', '.join(_FACTORIES)}")


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
    body = value[tag]
    return _CONTAINERS[tag](_decode(body)) if tag in _CONTAINERS else _READERS[tag](body)


def _refused(value: Any, path: tuple[Any, ...], why: str) -> CheckpointError:
    where = ".".join(str(part) for part in path) or "the state"
    kind = type(value)
    return CheckpointError(f"{where}: cannot save a {kind.__module__}.{kind.__qualname__}: {why}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _tensor(body: Any) -> torch.Tensor:
    dtype, shape, data = body
    if not data:
        return torch.empty(shape, dtype=_DTYPES[dtype])
    return torch.frombuffer(bytearray(_bytes(data)), dtype=_DTYPES[dtype]).reshape(shape)


def _array(body: Any) -> np.ndarray[Any, Any]:
    dtype, shape, data = np.dtype(body[0]), body[1], _bytes(body[2])
    if dtype.hasobject or dtype.names:
        raise ValueError(f"dtype {dtype}")
    return np.frombuffer(data, dtype=dtype).reshape(shape).copy()


_LEAVES: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    float: ("float", repr, float),  # inf and nan, which JSON has not
    complex: ("complex", repr, complex),
    bytes: ("bytes", _text, _bytes),
    datetime.timedelta: (
        "timedelta", lambda v: [v.days, v.seconds, v.microseconds], lambda v: datetime.timedelta(*v)
    ),
    torch.Size: ("size", list, torch.Size),
    torch.dtype: ("dtype", _name, _DTYPES.__getitem__),
    torch.device: ("device", str, torch.device),
    type(pathlib.Path()): ("path", str, pathlib.Path),
}  # fmt: skip
_READERS: dict[str, Callable[[Any], Any]] = {
    **{f"${name}": read for name, _, read in _LEAVES.values()},
    "$tensor": _tensor,
    "$numpy": _array,
    "$numpy_scalar": lambda body: _array(body)[()],
}
_CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "$tuple": tuple,
    "$set": set,
    "$frozenset": frozenset,
    "$dict": dict,
    "$OrderedDict": OrderedDict,
    "$Counter": lambda pairs: Counter(dict(pairs)),
    "$defaultdict": lambda body: defaultdict(_FACTORIES[body[0]], body[1]),
}
