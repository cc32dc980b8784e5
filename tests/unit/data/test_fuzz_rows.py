"""Any row is encoded, every token accounted for, or refused in words that name it: nothing else ever comes out."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from lit_fsdp.config.data import DataConfig
from lit_fsdp.data.formats import find_format
from lit_fsdp.errors import DataError
from tests.unit.data.conftest import encoder_of
from tests.unit.data.test_turns import CHATML

_TALK = [{"role": "user", "content": "a 1"}, {"role": "assistant", "content": "b é 2"}]
_CALLS = [{"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]
_ROWS: list[dict[str, Any]] = [
    {"messages": [*_TALK, *_TALK], "chat_template_kwargs": {"a": 1}, "system": "x"},
    {"messages": [{**_TALK[1], "train": True, "tool_calls": _CALLS}, {"role": "tool", "content": "x"}]},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    {"instruction": "do", "input": "x", "output": "y"},
    {"prompt": "p", "completion": "c"},
    {"prompt": _TALK[:1], "chosen": _TALK[1:], "rejected": [_TALK[1], *_TALK]},
    {"text": "A document. " * 30},
    {"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "attention_mask": [1, 1, 1]},
]
_ODD: list[Any] = [None, 0, -1.5, True, "", " ", "<|im_end|>", "\ud83d", "\x00", [], {}, [[]], [None], "[" * 3000]
_ODD += [{"role": "user"}, ["user"], '{"a": NaN}', float("nan"), 10**30, -(2**63), 2**31, "{%", "x" * 3000]
_ODD += [[{"role": "bot", "content": "x"}], [1] * 3000, [1.0, 2], [_TALK[0]], {"content": "x", "train": "no"}]


def _spoilt(value: Any, draw: random.Random) -> Any:
    """A row with one part, somewhere inside, replaced by something odd."""
    if draw.random() < 0.25 or not isinstance(value, (dict, list)) or not value:
        return draw.choice(_ODD)
    if isinstance(value, list):
        at = draw.randrange(len(value))
        return [*value[:at], _spoilt(value[at], draw), *value[at + 1 :]]
    key = draw.choice(list(value))
    return {**value, key: _spoilt(value[key], draw)}


def test_spoilt_rows(small: Any):
    draw, became = random.Random(1), Counter[str]()
    settings = [{"truncation": "start"}, {"truncation": "drop"}, {"supervise": "last"}, {"supervise": "flagged"}]
    encoders = [encoder_of(small, DataConfig(max_seq_length=50, **more), CHATML) for more in (*settings, {})]
    for _ in range(3000):
        row = draw.choice(_ROWS)
        row = {**row, (key := draw.choice(list(row))): _spoilt(row[key], draw)}
        try:
            (found,) = draw.choice(encoders).encode([row], find_format(set(row), "rows:1"), ["rows:1"])
        except DataError as error:
            became["refused" if str(error).startswith("rows:1: ") and len(str(error)) < 2000 else str(error)] += 1
            continue
        became["dropped" if found.dropped else "kept"] += 1
        assert bool(found.samples) != bool(found.dropped)
        for sample in found.samples:
            assert len(sample.input_ids) == len(sample.supervised) <= 50
            assert 0 <= sample.input_ids.min() <= sample.input_ids.max() < len(small)
            assert sample.supervised.any()
            assert not sample.supervised[0]
    assert set(became) == {"kept", "dropped", "refused"}
    assert became["kept"] > 300
