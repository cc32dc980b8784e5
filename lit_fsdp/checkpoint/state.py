"""Encode non-tensor state as JSON that round-trips exactly, without pickle.

Plain JSON values are unchanged. Any other value is an object with a single key, ``$`` and the name of its type, whose
value is the encoded content.
"""

import base64
import datetime
import io
import json
import math
import pathlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors import torch as safe
from torch.distributed.tensor import DTensor

from lit_fsdp.errors import CheckpointError

_MALFORMED = (ValueError, TypeError, KeyError, AttributeError, RecursionError, RuntimeError, EOFError, SafetensorError)


class Sharded(NamedTuple):
    """Placeholder in a state for a DTensor that is saved with the tensors of the model."""

    name: str
    dims: list[int | None]
    """Sharded tensor dim by mesh axis; None: replicated."""


def local_part(tensor: Any) -> Any:
    """This rank's part of a DTensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def without_sharded(state: Any) -> tuple[Any, dict[str, DTensor]]:
    """Replace each DTensor in ``state`` by a :class:`Sharded`; also return the DTensors by the name to save."""
    found: dict[str, DTensor] = {}

    def take(tensor: DTensor, path: tuple[Any, ...]) -> Sharded:
        if any(place.is_partial() for place in tensor.placements):
            raise CheckpointError(f"{'.'.join(map(str, path))}: cannot save partial sums; redistribute the DTensor")
        name = "/".join(("state", *map(str, path)))
        while name in found:  # for keys such as 1 and "1"
            name += "'"
        found[name] = tensor
        return Sharded(name, [getattr(place, "dim", None) for place in tensor.placements])

    return _replaced(state, DTensor, take, ()), found


def with_sharded(state: Any, tensor_of: Callable[[Sharded], torch.Tensor]) -> Any:
    """Replace each :class:`Sharded` in ``state`` by a tensor."""
    return _replaced(state, Sharded, lambda sharded, path: tensor_of(sharded), ())


def _replaced(value: Any, kind: Any, make: Callable[[Any, tuple[Any, ...]], Any], path: tuple[Any, ...]) -> Any:
    if isinstance(value, kind):
        return make(value, path)
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _replaced(item, kind, make, (*path, key))) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(_replaced(item, kind, make, (*path, index)) for index, item in enumerate(value))
    return value


def parts(encoded: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
    """Split an encoded Lightning state by owner: one entry per callback, and one per other key, by path."""
    callbacks = {("callbacks", key): value for key, value in encoded.get("callbacks", {}).items()}
    return callbacks | {(key,): value for key, value in encoded.items() if key != "callbacks"}


def leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield name and JSON of every leaf of an encoded state (every value except plain dicts)."""
    if isinstance(value, dict) and value and not next(iter(value)).startswith("$"):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    else:
        yield ".".join(path), json.dumps(value, sort_keys=True)


def has_parts(leaf: str) -> bool:
    """Whether JSON of :func:`leaves` contains an array that may be a shard; scalar tensors are not."""
    found: list[int] = []
    if '"$tensor"' in leaf or '"$numpy"' in leaf:
        _replaced(
            decode(json.loads(leaf)), (torch.Tensor, np.ndarray), lambda array, path: found.append(array.ndim), ()
        )
    return any(found)


def encode(state: Any) -> Any:
    """Encode ``state``, nested Python containers with the types of ``_TYPES``, as plain JSON values.

    Decoded tensors are on the CPU, detached, and share no memory. Subclasses are not supported.

    Raises:
        CheckpointError: Another type; names its path in the state, e.g. ``callbacks.EarlyStopping.thing``.
    """
    try:
        return _encode(state, ())
    except RecursionError:
        raise CheckpointError("the state: cannot save an object that contains itself") from None


def refused(state: Any) -> str | None:
    """Return which object of ``state`` :func:`encode` rejects, and its path; None if it accepts the state."""
    try:
        encode(state)
    except CheckpointError as error:
        return str(error).partition(": it ")[0]
    return None


def decode(value: Any) -> Any:
    """Decode a state that :func:`encode` has encoded."""
    try:
        return _decode(value)
    except _MALFORMED as error:
        raise CheckpointError(f"state: malformed ({error!r})") from error


def _encode(value: Any, path: tuple[Any, ...]) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
        return value
    if kind is list:
        return [_encode(item, (*path, index)) for index, item in enumerate(value)]
    if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
        return {key: _encode(item, (*path, key)) for key, item in value.items()}
    kind = torch.Tensor if kind is torch.nn.Parameter else np.generic if isinstance(value, np.generic) else kind
    why = "it is neither plain Python data nor NumPy data nor a tensor, and pickle is not used"
    if kind in _TYPES:
        name, parts, _ = _TYPES[kind]
        try:
            made = parts(value)
        except (ValueError, KeyError, RuntimeError, SafetensorError) as error:
            why = f"it is not dense, plain data ({error})"
        else:
            return {f"${name}": _encode(made, path)}
    where = ".".join(map(str, path)) or "the state"
    raise CheckpointError(f"{where}: cannot save a {type(value).__module__}.{type(value).__qualname__}: {why}")


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        return {key: _decode(item) for key, item in value.items()}
    if len(value) != 1:
        raise ValueError(f"{tag} with other keys")
    return _READERS[tag](_decode(value[tag]))


def _array_bytes(value: Any) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, np.asarray(value), allow_pickle=False)
    return file.getvalue()


def _array(data: bytes) -> Any:
    return np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)


def _tensor_bytes(value: torch.Tensor) -> bytes:
    return safe.save({"": value.detach().resolve_conj().resolve_neg().cpu().contiguous()})


def _pairs(value: Any) -> list[Any]:
    return [list(pair) for pair in value.items()]


_TYPES: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    float: ("float", repr, float),  # inf and nan, which JSON lacks
    bytes: ("bytes", lambda v: base64.b64encode(v).decode(), lambda text: base64.b64decode(text, validate=True)),
    tuple: ("tuple", list, tuple),
    dict: ("dict", _pairs, dict),  # with keys that are not str, or start with $
    OrderedDict: ("OrderedDict", _pairs, OrderedDict),
    Counter: ("Counter", _pairs, lambda pairs: Counter(dict(pairs))),
    set: ("set", lambda v: sorted(v, key=repr), set),
    datetime.timedelta: ("timedelta", lambda v: [v.days, v.seconds, v.microseconds], lambda v: datetime.timedelta(*v)),
    type(pathlib.Path()): ("path", str, pathlib.Path),
    torch.Size: ("size", list, torch.Size),
    torch.dtype: ("dtype", str, {str(t): t for t in vars(torch).values() if isinstance(t, torch.dtype)}.__getitem__),
    torch.device: ("device", str, torch.device),
    Sharded: ("sharded", list, lambda v: Sharded(*v)),
    torch.Tensor: ("tensor", _tensor_bytes, lambda data: safe.load(data)[""]),
    np.ndarray: ("numpy", _array_bytes, _array),
    np.generic: ("numpy_scalar", _array_bytes, lambda data: _array(data)[()]),
}
"""By type: its name, its encoder and its decoder."""
_READERS = {f"${name}": read for name, _, read in _TYPES.values()}
