"""Items of a split: packs that are full on real lengths, per source; rows held out by val_split."""

from __future__ import annotations

import json
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_fsdp.config.data import DataConfig, SourceConfig
from lit_fsdp.data.packing import Samples, plan_packs
from lit_fsdp.data.stream import SampleStream, prepare_samples
from lit_fsdp.errors import ConfigError, DataError
from tests.unit.data.conftest import encoder_of
from tests.unit.data.conversations import LETTERS as TEMPLATE
from tests.unit.data.conversations import say


def test_real_samples_fill_their_packs():
    """Lengths of real rows under the SmolLM2 tokenizer; files of numbers, as the rows are other people's."""
    for name in ("jargon", "dates", "prose"):
        text = Path(__file__).with_name("lengths").joinpath(f"{name}.txt").read_text()
        lengths = np.array(text.partition("\n")[2].split(), dtype=np.int64)
        members, offsets = plan_packs(lengths, 512)
        assert sorted(members.tolist()) == list(range(len(lengths)))
        fills = np.add.reduceat(lengths[members], offsets[:-1])
        assert fills.max() <= 512
        assert fills.mean() / 512 >= 0.98
        firsts = [int(members[start]) for start in offsets[:-1]]
        assert firsts == sorted(firsts)  # so that a file that is not shuffled is trained on in its order
        assert all((np.diff(members[a:b]) > 0).all() for a, b in pairwise(offsets.tolist()))


def test_each_sample_goes_where_the_least_room_is_left():
    """Written out, for packs so long that their rooms are looked for in two steps."""
    for seed, capacity in enumerate((1, 511, 512, 513, 2000, 2048)):
        lengths = np.random.default_rng(seed).integers(1, 1 + capacity // (1 + seed), 300)
        rooms: list[int] = []
        for length in sorted(lengths.tolist(), reverse=True):
            fitting = [room for room in rooms if room >= length]
            room = min(fitting, default=capacity)
            if fitting:
                rooms.remove(room)
            rooms.append(room - length)
        members, offsets = plan_packs(lengths, capacity)
        assert sorted(members.tolist()) == list(range(300))
        assert sorted(capacity - np.add.reduceat(lengths[members], offsets[:-1])) == sorted(rooms)


def _write(path: Path, numbers: Any, **more: Any) -> str:
    rows = ({"messages": say(f"u:u{n}", "a:" + "x" * (1 + n % 13)), **more} for n in numbers)
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return Path(_write(tmp_path / "rows.jsonl", range(100)))


def _contents(samples: Samples) -> set[bytes]:
    return {samples.rows.row(int(row))[0].tobytes() for row in samples.row_ids}


def _prepare(tokenizer: Any, source: Path, **options: Any) -> Any:
    names = {"train": str(source), "cache_dir": str(source.parent / "cache"), "max_seq_length": 32}
    config = DataConfig(**{**names, **options})
    return prepare_samples(config, ("train", "val", "predict"), encoder_of(tokenizer, config, TEMPLATE))


def test_the_order_is_another_one_with_another_split_or_packs(small: Any, source: Path):
    variants: list[dict[str, Any]] = [
        {},
        {"val_split": 10},
        {"val_split": 11},
        {"packing": True},
        {"packing": True, "max_seq_length": 40},
        {"train": [SourceConfig(source=str(source), weight=2.0)]},
    ]
    found = [_prepare(small, source, **options)["train"].order_fingerprint for options in variants]
    assert len(set(found)) == len(variants)
    assert _prepare(small, source, val_split=10)["train"].order_fingerprint == found[1]


def test_rows_held_out(small: Any, source: Path):
    """As many as asked for, none on both sides, and the same ones wherever they stand in the file."""
    for val_split, least, most in [(1, 1, 1), (99, 99, 99), (0.3, 15, 45)]:
        _write(source, range(100))
        found = _prepare(small, source, val_split=val_split)
        held_out = _contents(found["val"])
        assert least <= len(found["val"]) <= most
        assert len(found["train"]) + len(found["val"]) == 100
        assert not held_out & _contents(found["train"])
        _write(source, reversed(range(100)), id=7)
        assert _contents(_prepare(small, source, val_split=val_split)["val"]) == held_out
    _write(source, [n % 20 for n in range(100)])  # copies, then pieces of long texts
    found = _prepare(small, source, val_split=30)
    assert not _contents(found["val"]) & _contents(found["train"])
    source.write_text("\n".join(json.dumps({"text": f"text {n} " * 20}) for n in range(20)))
    found = _prepare(small, source, val_split=5)
    numbers = {split: set(samples.rows.numbers[samples.row_ids].tolist()) for split, samples in found.items()}
    assert (len(numbers["val"] - numbers["train"]), len(numbers["train"])) == (5, 15)
    with pytest.raises(DataError, match=r"takes \d+ of 20 rows\n  allowed: a share"):
        _prepare(small, source, val_split=20)
    talks = [say("u:1", "a:2"), *(say("u:" + "x" * 99 + str(n), "a:3") for n in range(5))]
    source.write_text("\n".join(json.dumps({"messages": talk}) for talk in talks))
    with pytest.raises(DataError, match=r"takes 1 of 1 rows, as 5 more were dropped"):
        _prepare(small, source, val_split=1)


def test_a_share_of_few_rows_takes_one_and_leaves_one(small: Any, source: Path, capsys: pytest.CaptureFixture[str]):
    _write(source, range(4))
    for val_split, taken in ((1e-9, 1), (1 - 1e-9, 3)):
        found = _prepare(small, source, val_split=val_split)
        assert (len(found["val"]), len(found["train"])) == (taken, 4 - taken)
        said = f"data.val_split {val_split} takes {taken} of 4 rows: each split needs at least one row\n"
        assert capsys.readouterr().err.endswith(said)
    assert DataConfig(train=str(source), val_split=0).val_split is None


def test_samples_of_one_conversation_stay_on_one_side(small: Any, source: Path):
    """With ``split_turns`` copies do, and every sample is in a pack and in a stream; the order is of the rows alone."""
    talks = [say(*(part for turn in range(1 + n % 3) for part in (f"u:{n}", f"a:{turn}"))) for n in range(20)] * 2
    source.write_text("\n".join(json.dumps({"messages": talk}) for talk in talks))
    plain, found = (_prepare(small, source, split_turns=splits, val_split=6) for splits in (False, True))
    for split in ("train", "val"):
        rows, samples = plain[split].rows.numbers[plain[split].row_ids], found[split]
        numbers = samples.rows.numbers[samples.row_ids]
        assert numbers.tolist() == [row for row in rows for _ in range(1 + row % 20 % 3)]
        assert samples.num_supervised.tolist() == [2] * len(numbers)  # an answer of a letter, and its end
    assert not _contents(found["val"]) & _contents(found["train"])
    packed = _prepare(small, source, split_turns=True, packing=True)["train"]
    config = DataConfig(train=str(source), streaming=True, shuffle_window=7, split_turns=True, max_seq_length=32)
    stream = SampleStream(config, encoder_of(small, config, TEMPLATE), 0)
    windows = list(islice(stream.windows(), 6))
    streamed = [part for _, rows in windows for item in [stream.samples(rows)] for part in item.num_supervised]
    assert len(streamed) == len(packed.row_ids) == sum(len(talk) for talk in talks) // 2
    assert sum(found[split].rows.meta["rows_read"] for split in ("train", "val")) == 2 * len(talks)


def test_packs_have_every_row_of_one_split_and_source(small: Any, source: Path):
    parts = (range(60), range(60, 80), range(80, 130))
    files = [_write(source.with_name(f"part{part}.jsonl"), rows) for part, rows in enumerate(parts)]
    mix = [SourceConfig(source=file, weight=part + 1.5) for part, file in enumerate(files)]
    found = _prepare(small, source, train=mix, packing=True, val_split=0.2, predict=str(source))
    for split in ("train", "val"):
        samples = found[split]
        members = [samples.members(item).tolist() for item in range(len(samples))]
        assert all(0 < samples.rows.lengths[part].sum() <= 32 for part in members)
        assert len(samples) < len(samples.row_ids) == len({row for part in members for row in part})
    samples = found["train"]
    assert samples.weights == (1.5, 2.5, 3.5)
    source_of = np.repeat(np.arange(3), samples.groups).tolist()
    for item in range(len(samples)):
        assert set(samples.members(item).tolist()) <= set(parts[source_of[item]])
    assert (found["predict"].capacity, len(found["predict"])) == (None, 100)


def test_weights_that_cannot_count_are_refused_before_training(small: Any, source: Path):
    first, second = (_write(source.with_name(f"{n}.jsonl"), range(n, n + 20)) for n in (0, 20))
    with pytest.raises(ConfigError, match=r"weights \(1000000\.0, 1\.0\) for sources of \[20, 20\] samples\n"):
        _prepare(small, source, train=[SourceConfig(source=first, weight=1e6), SourceConfig(source=second, weight=1.0)])
    with pytest.raises(ConfigError, match=r"^val: got a source with a weight\n  allowed: no weight"):
        DataConfig(val=[SourceConfig(source="a.jsonl", weight=1.0)])
