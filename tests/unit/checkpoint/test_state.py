"""State without pickle: exact round trips, and refusals that name the place."""

from __future__ import annotations

import enum
import json
import math
import pathlib
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest
import torch

from lit_fsdp.checkpoint.state import decode, encode
from lit_fsdp.errors import CheckpointError


class Color(enum.IntEnum):
    RED = 1


class Text(str):
    pass


LEAVES = [
    None, True, 0, -1, 2**64, -(2**200), 0.1, -0.0, 1e308, 5e-324, math.inf, -math.inf, math.nan, "", "$tuple",
    "ü \ud800 \x00\n", b"", b"\x00\xff", pathlib.Path("a/b"), (), (1,), [], {}, set(), {1, "a", (2, None)},
    {1: 2, None: 3, (1, 2): 4}, {True: "bool"}, {"$tensor": "not one"}, {"plain": 1, "$x": 2},
    Counter(a=2, b=-1), Counter({(1, "x"): 2}), OrderedDict([("b", 1), ("a", 2)]),
    torch.Size([2, 3]), torch.Size([]), torch.float32, torch.bfloat16, torch.device("cuda:1"),
    np.float32(0.1), np.int64(7), np.bool_(True), np.float64(math.nan), np.str_("ab"),
    np.datetime64("2026-01-02T03:04:05", "ns"), np.zeros((0, 3)), np.arange(6, dtype=">i2").reshape(2, 3),
    np.array(["ab", "c"]), np.array(True), np.asfortranarray(np.eye(3)),
    torch.zeros(()), torch.zeros(0, 4), torch.tensor([math.nan, 1.0]), torch.arange(6).reshape(2, 3).t(),
    torch.ones(3, dtype=torch.bfloat16), torch.tensor([True]), torch.tensor([1j]).conj(),
    torch.tensor([7], dtype=torch.uint16), torch.ones(2).to(torch.float8_e4m3fn),
]  # fmt: skip


def same(a: Any, b: Any) -> bool:
    """Equal in type and value, to the last bit."""
    if isinstance(a, torch.Tensor):
        data = [x.resolve_conj().contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*data)
    if type(a) is not type(b):
        return False
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return a.hex() == b.hex()
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(*both) for both in zip(a.items(), b.items(), strict=True))
    if isinstance(a, (list, tuple)) and not isinstance(a, torch.Size):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def round_trip(state: Any) -> Any:
    return decode(json.loads(json.dumps(encode(state), allow_nan=False)))


def test_any_state_comes_back_as_it_was():
    for leaf in LEAVES:
        assert same(round_trip(leaf), leaf), leaf
    state = {"root": [{"leaves": tuple(LEAVES)}, OrderedDict([((1, "k"), LEAVES), (0.5, {b"k": LEAVES})])]}
    assert same(round_trip(state), state)
    shared = [1]
    assert round_trip({"a": shared, "b": [shared, shared]}) == {"a": [1], "b": [[1], [1]]}


def test_what_cannot_be_saved_is_refused_by_name():
    loop: list[Any] = [1]
    loop.append({"again": loop})
    for state, where, kind in (
        ({"callbacks": {"EarlyStopping": {"thing": object()}}}, "callbacks.EarlyStopping.thing", "builtins.object"),
        ({"a": Color.RED}, "a", "Color"),
        ({"a": Text("x")}, "a", "Text"),
        ({Text("key"): 1}, "0.0", "Text"),
        ({"a": {1: {2: slice(3)}}}, "a.0.1.0.1", "slice"),
        ({"t": torch.ones(2).to_sparse()}, "t", "Tensor"),
        ({"n": np.array([object()])}, "n", "ndarray"),
        ({"d": defaultdict(list)}, "d", "defaultdict"),
        (int, "the state", "type"),
    ):
        with pytest.raises(CheckpointError) as error:
            encode(state)
        assert str(error.value).startswith(f"{where}: cannot save a ")
        assert kind in str(error.value)
    with pytest.raises(CheckpointError, match="cannot save an object that contains itself"):
        encode({"l": loop})


def test_malformed_values_are_refused():
    for value in (
        {"$nothing": 1}, {"$tensor": "gone"}, {"$tuple": 3}, {"$tuple": [], "x": 1}, {"$dtype": "load"},
        {"$numpy_scalar": ["O", [], {"$bytes": "AAAAAAAAAAA="}]}, {"$numpy": ["O", [1], {"$bytes": "AAAA"}]},
        {"$float": "00x"}, {"$set": [[1]]}, {"$tensor": ["float32", [3], {"$bytes": "AAAA"}]}, {"$bytes": "?"},
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match="malformed"):
            decode(value)
