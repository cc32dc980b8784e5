"""Any file is trained on, row by row accounted for, or refused in words that name it: nothing else ever comes out."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from lit_fsdp.config.data import DataConfig
from lit_fsdp.data.packing import prepare_samples
from lit_fsdp.data.stream import SampleStream
from lit_fsdp.errors import ConfigError, DataError
from tests.unit.data import fuzz_files
from tests.unit.data.conftest import encoder_of

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SECONDS = 60


@contextmanager
def _no_longer_than(seconds: int, what: str) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise AssertionError(f"{what}: no end after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _train_on(tokenizer: Any, options: dict[str, Any], folder: Path) -> str:
    """What became of a file: the refusal, or that its rows are accounted for."""
    config = DataConfig(**options, cache_dir=str(folder / "cache"), num_tokenizers=1, global_batch_size=4)
    encoder = encoder_of(tokenizer, config, TEMPLATE)
    if config.streaming:
        found = islice(SampleStream(config, encoder, 0).global_batches(), 3)
        for ids, supervised in (sample for batch in found for item in batch.items for sample in item):
            _check(ids, supervised, config, len(tokenizer))
        return "streamed"
    samples = prepare_samples(config, ["train"], encoder)["train"]
    meta = samples.rows.meta
    for index in range(len(samples.rows)):
        _check(*samples.rows.row(index), config, len(tokenizer))
    assert meta["rows_read"] == len(np.unique(samples.rows.numbers)) + sum(meta["dropped"].values())
    return "all kept" if not meta["dropped"] else "some dropped"


def _check(ids: np.ndarray, mask: np.ndarray, config: DataConfig, vocabulary: int) -> None:
    assert ids.dtype == np.int32
    assert len(ids) == len(mask) <= config.max_seq_length
    assert ids.min() >= 0
    assert ids.max() < vocabulary
    assert mask.any()
    assert not mask[0]


def _try(number: int, tokenizer: Any, folder: Path) -> str:
    path, options = fuzz_files.spoilt_file(number, folder)
    with _no_longer_than(_SECONDS, f"file {number}"):
        try:
            return _train_on(tokenizer, options, folder)
        except (DataError, ConfigError) as error:
            said = str(error)
    assert path in said or said.startswith(("data.", "columns")), f"file {number}: {said}"
    assert len(said) < 2000, f"file {number}: {said}"
    return "refused"


def test_spoilt_files(small: Any, tmp_path: Path):
    long = bool(os.environ.get("LIT_FSDP_LONG"))
    numbers = range(fuzz_files.NUM_FILES) if long else range(0, fuzz_files.NUM_FILES, 13)
    found = Counter(_try(number, small, tmp_path) for number in numbers)
    assert set(found) == {"all kept", "some dropped", "streamed", "refused"}
    assert found["refused"] < 0.75 * found.total()
