"""Any file is trained on, row by row accounted for, or refused in words that name it: nothing else ever comes out."""

from __future__ import annotations

import os
import random
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow

from lit_fsdp.config.data import DataConfig
from lit_fsdp.data.stream import SampleStream, prepare_samples
from lit_fsdp.errors import ConfigError, DataError
from tests.unit.data.conftest import encoder_of, write_rows
from tests.unit.data.conversations import unmarked
from tests.unit.data.test_turns import CHATML

_TALK = [{"role": "user", "content": "a 1"}, {"role": "assistant", "content": "b é 2"}]
_CALLS = [{"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]
_ROWS: list[dict[str, Any]] = [
    {"messages": [*_TALK, *_TALK]},
    {"messages": [_TALK[0], {"role": "assistant", "tool_calls": _CALLS}, {"role": "tool", "content": "x"}]},
    {"messages": [_TALK[0], {**_TALK[1], "train": True}]},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    {"instruction": "do", "input": "x", "output": "y"},
    {"prompt": "p", "completion": "c"},
    {"text": "A document. " * 30},
    {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]},
]
_ODD: list[Any] = [None, 0, -1.5, True, "", " ", "<|im_end|>", "\ud83d", "\x00", [], {}, [[]], [None], "[" * 3000]
_ODD += [{"role": "user"}, ["user"], '{"a": NaN}', float("nan"), 10**30, -(2**63), 2**31, "{%", "x" * 3000]
_ODD += [[{"role": "bot", "content": "x"}], [1] * 3000, [1.0, 2], [_TALK[0]], {"content": "x", "train": "no"}]
_SUFFIXES = (".jsonl", ".jsonl", ".jsonl.gz", ".json", ".csv", ".tsv", ".parquet", ".arrow")
_PIECES = (b"\x00", b"\xff", b"\xe2\x82", b"\n", b'"', b",", b"\xef\xbb\xbf", b"]")


def _spoilt(value: Any, draw: random.Random) -> Any:
    """A row with one part, somewhere inside, replaced by something odd."""
    if draw.random() < 0.25 or not isinstance(value, (dict, list)) or not value:
        return draw.choice(_ODD)
    if isinstance(value, list):
        at = draw.randrange(len(value))
        return [*value[:at], _spoilt(value[at], draw), *value[at + 1 :]]
    key = draw.choice(list(value))
    return {**value, key: _spoilt(value[key], draw)}


def _write(path: Path, rows: list[Any], draw: random.Random) -> None:
    """The rows in a file of this kind, some of whose bytes may be cut off or replaced."""
    try:
        write_rows(path, rows)
    except (pyarrow.ArrowException, ValueError, OverflowError, TypeError):  # different types in one column
        write_rows(path, [{"text": ascii(row)} for row in rows])
    content = path.read_bytes()
    at, how = draw.randrange(len(content)), draw.random()
    if how < 0.1:
        path.write_bytes(content[:at])
    elif how < 0.25:
        path.write_bytes(content[:at] + draw.choice(_PIECES) + content[at + draw.randrange(2) :])


def _became(tokenizer: Any, config: DataConfig) -> str:
    """What was made of a file, every token and row of which is accounted for."""
    encoder = encoder_of(tokenizer, config, unmarked(CHATML))
    if config.streaming:
        batches = islice(SampleStream(config, encoder, 0).global_batches(), 3)
        found, word = [sample for items, _ in batches for _, item in items for sample in item], "streamed"
    else:
        rows = prepare_samples(config, ["train"], encoder)["train"].rows
        found, dropped = [rows.row(index) for index in range(len(rows))], sum(rows.meta["dropped"].values())
        assert rows.meta["rows_read"] == len(np.unique(rows.numbers)) + dropped
        word = "some dropped" if dropped else "all kept"
    for ids, mask in found:
        assert len(ids) == len(mask) <= config.max_seq_length
        assert 0 <= ids.min() <= ids.max() < len(tokenizer)
        assert mask.any()
        assert not mask[0]
    return word


def test_spoilt_files(small: Any, tmp_path: Path):
    said: Counter[str] = Counter()
    for number in range(2000 if os.environ.get("LIT_FSDP_LONG") else 150):
        draw = random.Random(number)
        path = tmp_path / f"rows-{number}{draw.choice(_SUFFIXES)}"
        row = draw.choice(_ROWS)
        rows = [_spoilt(row, draw) if draw.random() < 0.08 else row for _ in range(draw.choice((1, 2, 12)))]
        rows = [one for one in rows if isinstance(one, dict) and one] or [row]
        rows += [{"messages": _TALK[:1]}] * ("messages" in row and draw.random() < 0.3)  # nothing to learn
        _write(path, rows, draw)
        options: dict[str, Any] = {"max_seq_length": draw.choice((16, 256)), "packing": draw.random() < 0.3}
        options |= {"truncation": draw.choice(("end", "start", "drop")), "streaming": draw.random() < 0.25}
        options |= {"supervise": draw.choice(("all", "all", "last", "flagged")), "shuffle_window": 7}
        options |= {"cache_dir": str(tmp_path / "cache"), "num_tokenizers": 1, "global_batch_size": 4}
        refused = ""
        try:
            said[_became(small, DataConfig(train=str(path), **options))] += 1
        except (DataError, ConfigError) as error:
            said["refused"] += 1
            refused = str(error)
        assert not refused or str(path) in refused or refused.startswith("data."), f"file {number}: {refused}"
        assert len(refused) < 2000
    assert set(said) == {"all kept", "some dropped", "streamed", "refused"}
    assert said["refused"] < 0.75 * said.total()
