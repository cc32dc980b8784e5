"""Tokenized rows under kill -9 at any moment, jobs that start together, and full disks: whole, or not there."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lit_fsdp.config.data import DataConfig
from lit_fsdp.data import cache as tokenized
from lit_fsdp.data.readers import generated_rows
from lit_fsdp.data.stream import prepare_samples
from lit_fsdp.errors import CheckpointError
from lit_fsdp.models.tokenizers import miniature_tokenizer
from tests.faults.tracked import CHAOS, SURVIVED
from tests.runs import content
from tests.unit.data.conftest import encoder_of

Prepare = Callable[..., None]


@pytest.fixture
def prepare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Prepare:
    """Tokenizes 2,000 rows in small chunks with two workers, into the folder that is given."""
    monkeypatch.setattr(tokenized, "_ROWS", 40)
    source = tmp_path / "rows.jsonl"
    rows = [{"messages": row["messages"]} for row in generated_rows(2000, 1)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.utime(source, (1e9, 1e9))  # so that its digest is remembered
    tokenizer = miniature_tokenizer()

    def run(location: Path) -> None:
        names: dict[str, Any] = {"train": str(source), "cache_dir": str(location), "num_tokenizers": 2}
        config = DataConfig(packing=True, max_seq_length=64, val_split=100, **names)
        prepare_samples(config, ("train", "val"), encoder_of(tokenizer, config, tokenizer.chat_template))

    return run


def _start(prepare: Prepare, cache: Path) -> Any:
    # a job of its own, which is killed alone
    process = multiprocessing.get_context("fork").Process(target=lambda: (os.setsid(), prepare(cache)))
    process.start()
    return process


def test_killed_at_any_moment(tmp_path: Path, prepare: Prepare) -> None:
    """The next run ends with the same bytes, and leaves nothing of the one before it."""
    start = time.monotonic()
    prepare(tmp_path / "whole")
    takes, whole, draw = time.monotonic() - start, content(tmp_path / "whole"), random.Random(7)
    early = 0
    for number in range(60 if CHAOS else 4):
        cache = tmp_path / str(number)
        job = _start(prepare, cache)
        time.sleep(draw.random() * takes * 1.1)
        job.kill()
        job.join(20)
        early += job.exitcode == -9
        assert not list(cache.glob("data/*/meta.json")) or len(list(cache.glob("data/*/*.bin"))) == 6
        start = time.monotonic()
        prepare(cache)
        takes = min(takes, time.monotonic() - start)
        assert content(cache) == whole
        SURVIVED["kill -9 while rows are tokenized and packed"] += 1
    assert early >= 1


def test_jobs_that_start_together(tmp_path: Path, prepare: Prepare) -> None:
    prepare(tmp_path / "whole")
    for number in range(2):
        cache = tmp_path / str(number)
        jobs = [_start(prepare, cache) for _ in range(3)]
        time.sleep(0.05 + 0.1 * number)
        jobs[0].kill()
        for job in jobs:
            job.join(200)
        assert [job.exitcode for job in jobs[1:]] == [0, 0]
        assert content(cache) == content(tmp_path / "whole")


def test_a_full_disk(tmp_path: Path, prepare: Prepare, small_disk: Callable[[str, int], Path]) -> None:
    """It says so and what to do, half of nothing is left, and with room the same call succeeds."""
    prepare(tmp_path / "whole")
    whole = content(tmp_path / "whole")
    needed = sum(-(-len(content) // 4096) * 4096 for content in whole.values())
    for share in (10, 95):
        disk = small_disk(f"disk{share}", needed * share // 100)
        with pytest.raises(CheckpointError) as told:
            prepare(disk)
        assert "No space left on device" in str(told.value)
        assert "set data.cache_dir or LIT_FSDP_CACHE to another folder" in str(told.value)
        left = content(disk)
        assert not [name for name in left if ".partial" in name]
        assert all(content == whole[name] for name, content in left.items())
    prepare(small_disk("roomy", needed * 3))
