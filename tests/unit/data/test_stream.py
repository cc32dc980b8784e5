"""Streams: the same global batches on any number of ranks, from any position, and every row once per epoch."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import select
import signal
import time
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_fsdp.config.data import DataConfig, SourceConfig
from lit_fsdp.data.stream import SampleStream, StreamLoader
from lit_fsdp.data.workers import load
from lit_fsdp.errors import DataError
from tests.unit.data.conftest import encoder_of, write_rows
from tests.unit.data.conversations import CHATML as TEMPLATE


def _file(path: Path, count: int, start: int = 0) -> str:
    rows = [{"prompt": f"p{i}", "completion": f"c{i}" * (1 + i % 5)} for i in range(start, start + count)]
    return write_rows(path, rows)


def _loader(small: Any, rank: tuple[int, int] = (0, 1), micro: int = 1, **options: Any) -> StreamLoader:
    given = {"streaming": True, "global_batch_size": 4, "shuffle_window": 8, "micro_batch_size": micro, **options}
    config = DataConfig(**given)
    return StreamLoader(SampleStream(config, encoder_of(small, config, TEMPLATE), seed=7), *rank, 0, config)


def _global_batches(small: Any, count: int, start: Any = None, ranks: int = 1, micro: int = 1, **options: Any) -> Any:
    """The first global batches as prompts, put together from all ranks, and the position after each."""
    per_rank = []
    for rank in range(ranks):
        loader = _loader(small, (rank, ranks), micro, **options)
        loader.begin = lambda: (0, start)
        batches, steps = iter(loader), []
        for step in range(1, count + 1):
            taken = [next(batches)["input_ids"] for _ in range(4 // ranks // micro)]
            parts = [[tuple(re.findall(r"p\d+", small.decode(ids))) for ids in part] for part in taken]
            steps.append((parts, json.loads(json.dumps(loader.position(step)))))
        per_rank.append(steps)
    together = []
    for parts in zip(*per_rank, strict=True):
        items = [item for step in zip(*(part for part, _ in parts), strict=True) for batch in step for item in batch]
        assert all(end == parts[0][1] for _, end in parts)
        together.append((items, parts[0][1]))
    return together


@pytest.mark.parametrize(("packing", "shuffle"), [(False, False), (False, True), (True, True)])
def test_the_same_batches_on_any_ranks_and_from_any_position(small: Any, tmp_path: Path, packing: bool, shuffle: bool):
    options: dict[str, Any] = {"train": [_file(tmp_path / "a.jsonl", 11), _file(tmp_path / "b.parquet", 6)]}
    options |= {"packing": packing, "shuffle": shuffle, "max_seq_length": 160}
    whole = _global_batches(small, 11, **options)
    assert whole == _global_batches(small, 11, ranks=2, micro=2, **options)
    for done in (1, 6):
        assert _global_batches(small, 11 - done, whole[done - 1][1], ranks=4, **options) == whole[done:]
    if not packing:
        epoch = list(chain(*(item for items, _ in whole for item in items)))[:17]
        in_file_order = [f"p{i}" for i in (*range(11), *range(6))]
        assert sorted(epoch) == sorted(in_file_order)
        assert (epoch == in_file_order) is not shuffle


def test_parquet_parts_without_rows_are_passed(small: Any, tmp_path: Path):
    import pyarrow
    import pyarrow.parquet

    full = _file(tmp_path / "a.parquet", 9)
    empty = pyarrow.parquet.read_table(full).slice(0, 0)
    for name in ("0.parquet", "z.parquet"):  # before and behind the rows
        pyarrow.parquet.write_table(empty, tmp_path / name)
    names = (full, str(tmp_path / "*.parquet"))
    alone, among = ([item for item, _ in _global_batches(small, 5, train=name, shuffle=False)] for name in names)
    assert alone == among


def test_weights_are_shares_and_a_short_source_begins_again(small: Any, tmp_path: Path):
    entries: Any = [
        SourceConfig(source=_file(tmp_path / "a.jsonl", 5), weight=3.0),
        SourceConfig(source=_file(tmp_path / "b.jsonl", 10, 100), weight=1.0),
    ]
    stream = _loader(small, train=entries, shuffle_window=7).stream
    windows = list(islice(stream.windows(), 8))
    epoch = [source for at, rows in windows if at["epoch"] == 0 for source, _ in rows]
    assert epoch[:8] == [0, 0, 0, 1, 0, 0, 0, 1]
    assert epoch.count(1) == 10
    assert 30 <= epoch.count(0) <= 33
    assert next(stream.windows(json.loads(json.dumps(windows[1][0])))) == windows[1]
    at, rows = next((at, rows) for at, rows in windows if at["epoch"] == 1)
    assert (at["window"], rows[0][1][0]) == (0, f"{tmp_path / 'a.jsonl'}:1")


def test_all_ranks_meet_a_bad_row_at_the_same_step(small: Any, tmp_path: Path):
    """Or one of them would raise while the others wait for it."""
    name = _file(tmp_path / "a.jsonl", 20)
    with open(name, "a") as file:
        file.write('{"prompt": 3, "completion": "x"}\nno JSON\n')
    for rank in range(4):
        batches = iter(_loader(small, (rank, 4), train=name))
        assert len(list(islice(batches, 4))) == 4
        with pytest.raises(DataError, match=r"a\.jsonl:21: "):
            next(batches)
    with pytest.raises(DataError, match=r"^\S+a\.jsonl:21: "):  # in words, from a loader process too
        list(islice(_loader(small, train=name, num_workers=1), 30))
    assert multiprocessing.active_children() == []
    kept = _global_batches(small, 5, train=name, on_bad_row="drop")
    assert sorted(chain(*(item for items, _ in kept for item in items))) == sorted(f"p{i}" for i in range(20))


def test_loader_processes_change_nothing(small: Any, tmp_path: Path):
    name = _file(tmp_path / "a.jsonl", 30)
    alone = list(islice(_loader(small, train=name), 14))
    batches = iter(_loader(small, train=name, num_workers=3))
    assert [batch["input_ids"].tolist() for batch in islice(batches, 14)] == [b["input_ids"].tolist() for b in alone]
    assert len(multiprocessing.active_children()) == 1  # every other one would tokenize the same rows
    batches.close()  # type: ignore[attr-defined]


class Stuck(torch.utils.data.IterableDataset[int]):
    """Gives nothing and never returns."""

    def __init__(self, writer: int) -> None:
        self.writer = writer

    def __iter__(self) -> Iterator[int]:
        os.write(self.writer, str(os.getpid()).encode())
        while True:
            time.sleep(0.01)


def test_a_stuck_loader_ends_when_its_parent_dies() -> None:
    reader, writer = os.pipe()
    parent = os.fork()
    if parent == 0:
        next(load(Stuck(writer), 1))
    worker = int(os.read(reader, 20))
    os.close(writer)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    ended, _, _ = select.select([reader], [], [], 30)
    if not ended:
        os.kill(worker, signal.SIGKILL)
    assert ended  # the last writer is gone
    os.close(reader)
