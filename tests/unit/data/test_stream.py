"""Streams: the same global batches on any number of ranks, from any position, and every row once per epoch."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from lit_fsdp.config.data import DataConfig, SourceConfig
from lit_fsdp.data.encode import RowEncoder
from lit_fsdp.data.files import Chunk, numbered_rows
from lit_fsdp.data.sources import Source, find_sources
from lit_fsdp.data.stream import SampleStream, Share
from lit_fsdp.data.window_report import first_window
from lit_fsdp.data.windows import RowWindows
from lit_fsdp.errors import DataError

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _file(path: Path, count: int, start: int = 0) -> str:
    rows = ({"prompt": f"p{i}", "completion": f"c{i}" * (1 + i % 5)} for i in range(start, start + count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def _stream(small: Any, **options: Any) -> SampleStream:
    config = DataConfig(**{"streaming": True, "global_batch_size": 4, "shuffle_window": 8, **options})
    return SampleStream(config, RowEncoder(small, config, TEMPLATE), seed=7)


def _texts(small: Any, items: list[Any]) -> list[tuple[str, ...]]:
    return [tuple(small.decode(sample.input_ids) for sample in item) for item in items]


def _prompt(item: tuple[str, ...]) -> str:
    """Of an item with one sample, from its text or its rendered conversation."""
    found = re.search(r"p\d+", item[0])
    assert found
    return found[0]


def _global_batches(small: Any, stream: SampleStream, start: Any, ranks: int, count: int, micro: int = 1) -> list[Any]:
    """The first global batches as texts, put together from all ranks, and the position after each."""
    per_rank = []
    for rank in range(ranks):
        share = Share(rank, ranks, micro)
        steps = 4 // ranks // micro
        found = list(islice(stream.micro_batches(start, share), count * steps))
        per_rank.append([found[i : i + steps] for i in range(0, len(found), steps)])
    together = []
    for parts in zip(*per_rank, strict=True):
        items = [item for step in zip(*parts, strict=True) for batch in step for item in batch.items]
        ends = {json.dumps(part[-1].end, sort_keys=True) for part in parts}
        assert len(ends) == 1
        assert all(batch.end is None for part in parts for batch in part[:-1])
        together.append((_texts(small, items), json.loads(ends.pop())))
    return together


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_the_same_batches_on_any_number_of_ranks_and_from_any_position(
    small: Any, tmp_path: Path, packing: bool, shuffle: bool
):
    options = {"train": [_file(tmp_path / "a.jsonl", 11), _file(tmp_path / "b.jsonl", 6, 100)]}
    options |= {"packing": packing, "shuffle": shuffle, "max_seq_length": 160}
    whole = _global_batches(small, _stream(small, **options), None, 1, 11)
    assert whole == _global_batches(small, _stream(small, **options), None, 2, 11, micro=2)
    for done in (1, 6):
        rest = _global_batches(small, _stream(small, **options), whole[done - 1][1], 4, 11 - done)
        assert rest == whole[done:]
    if not packing:
        epoch = [_prompt(text) for texts, _ in whole for text in texts][:17]
        in_file_order = [f"p{i}" for i in (*range(11), *range(100, 106))]
        assert sorted(epoch) == sorted(in_file_order)
        assert (epoch == in_file_order) is not shuffle


def test_every_row_once_per_epoch_and_a_new_order_in_the_next(small: Any, tmp_path: Path):
    stream = _stream(small, train=_file(tmp_path / "a.jsonl", 24))
    texts = [text for batch, _ in _global_batches(small, stream, None, 2, 12) for text in batch]
    first, second, third = texts[:24], texts[24:48], texts[:8]
    assert sorted(first) == sorted(second)
    assert len(set(first)) == 24
    assert first != second
    in_file_order = [f"p{i}" for i in range(8)]
    assert sorted(map(_prompt, third)) == in_file_order != [_prompt(text) for text in third]


def test_packs_hold_every_sample_of_a_window_whole(small: Any, tmp_path: Path):
    stream = _stream(small, train=_file(tmp_path / "a.jsonl", 16), packing=True, max_seq_length=200)
    share = Share(0, 1, micro_batch_size=4)
    items = [item for micro in islice(stream.micro_batches(None, share), 3) for item in micro.items]
    assert all(sum(len(sample.input_ids) for sample in item) <= 200 for item in items)
    assert max(len(item) for item in items) > 1
    texts = [text for item in _texts(small, items) for text in item]
    assert len(set(texts[:8])) == 8


def test_weights_are_shares_and_a_short_source_begins_again(tmp_path: Path):
    entries: Any = [
        SourceConfig(source=_file(tmp_path / "a.jsonl", 5), weight=3.0),
        SourceConfig(source=_file(tmp_path / "b.jsonl", 10, 100), weight=1.0),
    ]
    windows = list(islice(RowWindows(find_sources(entries), 7).read(), 8))
    epoch = [source for window in windows if window.epoch == 0 for source, _ in window.rows]
    assert epoch[:8] == [0, 0, 0, 1, 0, 0, 0, 1]
    counts = Counter(epoch)
    assert counts[1] == 10
    assert 30 <= counts[0] <= 33
    again = next(window for window in windows if window.epoch == 1)
    assert again.number == 0
    assert again.rows[0][1][1]["prompt"] == "p0"


def test_what_decides_the_batches_is_recorded(small: Any, tmp_path: Path):
    name = _file(tmp_path / "a.jsonl", 20)

    def record(template: str = TEMPLATE, **options: Any) -> dict[str, Any]:
        config = DataConfig(**{"streaming": True, "train": name, "packing": True, "max_seq_length": 160, **options})
        return json.loads(json.dumps(SampleStream(config, RowEncoder(small, config, template), 7).record()))

    def changed(**options: Any) -> set[str]:
        return {key for key, value in record(**options).items() if value != record()[key]}

    assert changed() == set()
    assert changed(max_seq_length=200) == {"max_seq_length", "encoding"}
    assert changed(template=TEMPLATE.replace("m.role", "m.role | upper")) == {"encoding"}
    assert changed(columns={"prompt": "completion", "completion": "prompt"}) == {"encoding"}
    assert changed(train=[SourceConfig(source=name, weight=2.0)]) == {"weights"}
    assert record(packing=False) == record(packing=False, max_seq_length=200)  # the same rows, whatever their lengths


def test_reading_goes_on_where_a_window_began(tmp_path: Path):
    files: Any = [
        SourceConfig(source=_file(tmp_path / "a.jsonl", 900), weight=1.0),
        SourceConfig(source="generated:700", weight=2.0),
    ]
    windows = list(islice(RowWindows(find_sources(files), 97).read(), 40))
    for number in (0, 1, 7, 20, 33):
        start = json.loads(json.dumps(windows[number].start))
        again = list(islice(RowWindows(find_sources(files), 97).read(start), 40 - number))
        assert again == windows[number:]


def test_a_position_in_another_source_is_refused(tmp_path: Path):
    name = _file(tmp_path / "a.jsonl", 20)
    start = list(islice(RowWindows(find_sources(name), 4).read(), 3))[2].start
    _file(tmp_path / "a.jsonl", 21)
    with pytest.raises(DataError, match=r"a\.jsonl: not what was streamed when the checkpoint was written"):
        next(RowWindows(find_sources(name), 4).read(start))


def test_an_epoch_without_any_row_is_refused_and_not_read_for_ever():
    class Gone:
        """A part with one row, that has none when it is read again."""

        name = digest = "gone"

        def __init__(self) -> None:
            self.rows = [{"text": "x"}]

        def chunks(self, start: Any) -> Iterator[Chunk]:
            yield Chunk(self.name, 0, self.rows, numbered_rows, [0])
            self.rows = []

        def check(self) -> None: ...

    for weight in (None, 1.0):
        windows = RowWindows([Source("gone", (Gone(),), "text", weight)], 4).read()
        assert len(next(windows).rows) == 1
        with pytest.raises(DataError, match="gone: no rows\n  fix:     a source needs at least one row"):
            next(windows)


def test_a_source_that_changes_while_it_is_streamed(tmp_path: Path):
    name = _file(tmp_path / "a.jsonl", 20)
    windows = RowWindows(find_sources(name, streaming=True), 4).read()
    next(windows)
    _file(tmp_path / "a.jsonl", 30)
    with pytest.raises(DataError, match=r"a\.jsonl: changed while it was read"):
        list(islice(windows, 10))


def test_a_broken_row_in_mid_stream_is_named(small: Any, tmp_path: Path):
    name = _file(tmp_path / "a.jsonl", 20)
    with open(name, "a") as file:
        file.write('{"prompt": 3, "completion": "x"}\n')
    stream = _stream(small, train=name, shuffle=False)
    share = Share(0, 1, micro_batch_size=4)
    batches = stream.micro_batches(None, share)
    assert len(list(islice(batches, 5))) == 5
    with pytest.raises(DataError, match=r"a\.jsonl:21: "):
        next(batches)


def test_rows_with_nothing_to_learn_are_counted(small: Any, tmp_path: Path):
    path = tmp_path / "a.jsonl"
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    rows = [{"messages": talk[: 1 + i % 2]} for i in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    stream = _stream(small, train=str(path))
    batches = list(islice(stream.micro_batches(None, Share(0, 1, 4)), 2))
    assert [sum(map(bool, batch.items)) for batch in batches] in ([2, 2], [1, 3], [3, 1], [4, 0], [0, 4])
    assert "8 rows tokenised here, dropped 4 without an assistant turn" in str(stream.counts)


@pytest.mark.parametrize("packing", [False, True])
def test_a_stream_without_anything_to_learn_ends(small: Any, tmp_path: Path, packing: bool):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "q"}]}) + "\n")
    stream = _stream(small, train=str(path), packing=packing)
    with pytest.raises(DataError, match=r"a\.jsonl: no token of any row is supervised; \d+ rows tokenised here"):
        list(islice(stream.micro_batches(None, Share(0, 1, 1)), 50))


def test_workers_share_the_micro_batches_of_a_rank(small: Any, tmp_path: Path):
    options: Any = {"train": _file(tmp_path / "a.jsonl", 21)}
    whole = list(islice(_stream(small, **options).micro_batches(None, Share(1, 2, 1)), 12))
    for worker in range(3):
        mine = list(islice(_stream(small, **options).micro_batches(None, Share(1, 2, 1, worker, 3)), 4))
        assert [_texts(small, micro.items) for micro in mine] == [
            _texts(small, micro.items) for micro in whole[worker::3]
        ]
        assert [micro.end for micro in mine] == [micro.end for micro in whole[worker::3]]


def test_a_rank_tokenises_only_its_own_rows(small: Any, tmp_path: Path):
    stream = _stream(small, train=_file(tmp_path / "a.jsonl", 64))
    list(islice(stream.micro_batches(None, Share(3, 4, 1)), 16))
    assert stream.counts.read == 16
    assert not stream.tokenises_all
    assert _stream(small, train=_file(tmp_path / "a.jsonl", 64), packing=True).tokenises_all


def test_the_first_window_can_be_looked_at(small: Any, tmp_path: Path):
    config = DataConfig(train=_file(tmp_path / "a.jsonl", 30), streaming=True, shuffle_window=8)
    rows, encoded, formats = first_window(config, RowEncoder(small, config, TEMPLATE))
    assert [row["prompt"] for _, row in rows] == [f"p{i}" for i in range(8)]
    assert formats == ["prompt_completion"] * 8
    assert all(len(row.samples) == 1 for row in encoded)
