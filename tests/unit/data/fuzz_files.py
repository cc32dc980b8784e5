"""Files of rows as people really have them: spoilt in ways that are drawn from a seed, the same ones every time."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

_TALK = [{"role": "user", "content": "a 1"}, {"role": "assistant", "content": "b é 2"}]
_TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
_CALLS = [{"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]
_FORMATS: dict[str, Callable[[int], dict[str, Any]]] = {
    "messages": lambda i: {"messages": [*_TALK, {"role": "user", "content": str(i)}, _TALK[1]]},
    "tools": lambda i: {
        "messages": [_TALK[0], {"role": "assistant", "tool_calls": _CALLS}, {"role": "tool", "content": str(i)}],
        "tools": _TOOLS,
    },
    "flagged": lambda i: {"messages": [_TALK[0], {**_TALK[1], "train": bool(i % 2)}]},
    "sharegpt": lambda i: {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": str(i)}]},
    "instruction": lambda i: {"instruction": "do", "input": "x" * (i % 2), "output": str(i)},
    "prompt_completion": lambda i: {"prompt": f"p{i}", "completion": "c"},
    "text": lambda i: {"text": f"A document, {i}. " * (1 + i % 40)},
    "tokens": lambda i: {"input_ids": [1, 2, 3 + i % 9], "labels": [-100, 2, 3 + i % 9]},
}
_ODD: list[Any] = [None, 0, -1.5, True, "", " ", "<|im_end|>", "\ud83d", "\x00", [], {}, [[]], [None]]
_ODD += [{"role": "user"}, "assistant", ["user"], "[" * 3000, "[1", '{"a": NaN}', float("nan"), float("inf")]
_ODD += ["👩‍👩‍👧", "\u2028", 10**30, -(2**63), 2**31, -100, {"function": {"name": 3}}, "{%", "x" * 3000]
_ODD += [[{"role": "bot", "content": "x"}], [1] * 3000, [1.0, 2], [{"role": "user", "content": "only asked"}]]
_ODD += [{"from": ["x"], "value": "y"}, {"content": "x", "train": "no"}]
_SUFFIXES = (".jsonl", ".jsonl", ".jsonl", ".ndjson", ".jsonl.gz", ".json", ".csv", ".tsv", ".parquet", ".arrow")
NUM_FILES = 2000


def spoilt_file(number: int, folder: Path) -> tuple[str, dict[str, Any]]:
    """File ``number`` in a folder, and the options of the ``data`` section to read it with."""
    draw = random.Random(number)
    suffix = draw.choice(_SUFFIXES)
    path = folder / f"rows-{number}{suffix}"
    rows = _rows(draw)
    content = _content(rows, suffix, draw)
    packed = suffix in (".jsonl.gz", ".parquet", ".arrow")
    if draw.random() < (0.15 if packed else 0.25):
        content = _spoil_bytes(content, draw)
    if suffix == ".jsonl.gz":
        content = gzip.compress(content, 1)
        content = _cut(content, draw) if draw.random() < 0.3 else content
    path.write_bytes(content)
    options: dict[str, Any] = {
        "train": str(path),
        "max_seq_length": draw.choice((16, 256, 1024)),
        "packing": draw.random() < 0.3,
        "truncation": draw.choice(("end", "end", "start", "drop", "error")),
        "supervise": draw.choice(("all", "all", "last", "flagged")),
        "train_on_prompt": draw.random() < 0.2,
        "streaming": draw.random() < 0.25,
        "shuffle_window": draw.choice((1, 7, 1000)),
        "max_dropped_share": 1.0,
    }
    options["train_on_prompt"] &= options["supervise"] == "all"
    if draw.random() < 0.05:
        options["format"] = draw.choice(("messages", "sharegpt", "instruction", "prompt_completion", "text", "tokens"))
    if draw.random() < 0.05:
        options["columns"] = {draw.choice(("messages", "text", "prompt", "input_ids")): draw.choice(("text", "prompt"))}
    return str(path), options


def _rows(draw: random.Random) -> list[Any]:
    make = _FORMATS[draw.choice(list(_FORMATS))]
    rows: list[Any] = [make(i) for i in range(draw.choice((0, 1, 2, 5, 5, 12, 40)))]
    how = draw.random()
    for i in range(len(rows)):
        if how < 0.35 and draw.random() < 0.15:
            rows[i] = _spoil(rows[i], draw)
        elif 0.35 <= how < 0.4 and draw.random() < 0.3:  # mixed formats
            rows[i] = _FORMATS[draw.choice(list(_FORMATS))](i)
        elif 0.4 <= how < 0.43:  # nothing to learn anywhere
            rows[i] = {"messages": [{"role": "user", "content": "only asked"}]}
        elif 0.43 <= how < 0.46 and i == 0:
            rows[i] = _nested(draw.choice((50, 900, 5000)))
        elif 0.46 <= how < 0.48 and i == 0 and draw.random() < 0.3:
            rows[i] = {**rows[i], "note": "ten megabytes " * 750_000}
        elif 0.48 <= how < 0.5 and i == 0 and draw.random() < 0.5:
            rows[i] = {"text": "one long word" * 20_000}
    return rows


def _nested(depth: int) -> Any:
    """A row as text: Python itself would not write it."""
    return f'{{"messages": {"[" * depth}{"]" * depth}}}'


def _spoil(value: Any, draw: random.Random) -> Any:
    """One part of a row, somewhere inside, replaced by something odd or left out."""
    if draw.random() < 0.25 or not isinstance(value, (dict, list)) or not value:
        return draw.choice(_ODD)
    if isinstance(value, list):
        i = draw.randrange(len(value))
        return [*value[:i], _spoil(value[i], draw), *value[i + 1 :]]
    key = draw.choice(list(value))
    rest = {name: part for name, part in value.items() if name != key}
    return rest if draw.random() < 0.2 else {**rest, key: _spoil(value[key], draw)}


def _content(rows: list[Any], suffix: str, draw: random.Random) -> bytes:
    if suffix in (".csv", ".tsv"):
        return _cells(rows, "," if suffix == ".csv" else "\t", draw)
    if suffix in (".parquet", ".arrow"):
        return _columns([row for row in rows if isinstance(row, dict)], suffix, draw)
    lines = [row if isinstance(row, str) and row.startswith('{"messages": [') else json.dumps(row) for row in rows]
    if lines and draw.random() < 0.1:
        lines[0] = lines[0][:-1] + ', "text": "twice", "text": "again"}'
    if suffix == ".json":
        wrap = draw.choice(("[%s]", '{"data": [%s]}', '{"a": 1, "rows": [%s]}', "%s"))
        return (wrap % ", ".join(lines)).encode("utf-8", "surrogatepass")
    return draw.choice(("\n", "\n", "\r\n", "\n\n \n")).join(lines).encode("utf-8", "surrogatepass")


def _cells(rows: list[Any], delimiter: str, draw: random.Random) -> bytes:
    named = [row for row in rows if isinstance(row, dict) and row]
    header = list(named[0]) if named else ["prompt", "completion"]
    out = io.StringIO()
    writer = csv.writer(out, delimiter=delimiter, lineterminator=draw.choice(("\n", "\r\n")))
    writer.writerow(header)
    for row in named:
        cells = [value if isinstance(value, str) else json.dumps(value) for value in row.values()]
        writer.writerow(cells if draw.random() < 0.98 else [*cells, "one more"])
    return out.getvalue().encode("utf-8", "surrogatepass")


def _columns(rows: list[dict[str, Any]], suffix: str, draw: random.Random) -> bytes:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.Table.from_pylist(rows)
    except (pyarrow.ArrowException, ValueError, OverflowError, TypeError):  # values of different types in one column
        table = pyarrow.table({"text": [str(row).encode("utf-8", "replace").decode() for row in rows]})
    sink = pyarrow.BufferOutputStream()
    if suffix == ".parquet":
        try:
            pyarrow.parquet.write_table(table, sink, row_group_size=draw.choice((1, 7, 1000)))
        except pyarrow.ArrowException:  # a struct without fields
            pyarrow.parquet.write_table(pyarrow.table({"text": ["a"] * len(rows)}), sink)
    else:
        new = draw.choice((pyarrow.ipc.new_file, pyarrow.ipc.new_stream))
        with new(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=7)
    return sink.getvalue().to_pybytes()


def _spoil_bytes(content: bytes, draw: random.Random) -> bytes:
    kind = draw.randrange(6)
    if kind == 0:
        return draw.choice((b"\xef\xbb\xbf", b"\xff\xfe", b"\xef\xbb\xbf\xef\xbb\xbf")) + content
    if kind == 1:
        return _cut(content, draw)
    if kind == 2:
        return draw.choice((b"", b"\n", b"\x00" * 100, b"\r\r\r", b"null\n", b"PAR1", b"ARROW1\x00\x00"))
    spoilt = bytearray(content)
    for _ in range(draw.choice((1, 3, 20))):
        at = draw.randrange(len(spoilt) + 1)
        piece = draw.choice((b"\x00", b"\xff", b"\xe2\x82", b"\n", b'"', b",", draw.randbytes(4)))
        spoilt[at : at + draw.randrange(2)] = piece
    return bytes(spoilt)


def _cut(content: bytes, draw: random.Random) -> bytes:
    return content[: draw.randrange(len(content) + 1)]
