"""What is drawn of a split: the same numbers whether it is tokenized as a whole or streamed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lit_fsdp import commands
from lit_fsdp.data.stats import SampleNumbers
from lit_fsdp.report import data_plot
from lit_fsdp.report.data_plot import write_plot

MODEL = {"name": "meta-llama/Llama-3.2-1B", "miniature": True}


@pytest.mark.parametrize("packing", [False, True])
def test_a_stream_is_drawn_by_its_first_rows(packing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIT_FSDP_CACHE", str(tmp_path / "cache"))
    rows = [{"prompt": "p" * (n % 7), "completion": "c" * (1 + n % 5)} for n in range(30)]
    Path("t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"train": "t.jsonl", "packing": packing, "max_seq_length": 64, "num_tokenizers": 1}
    Path("r.yaml").write_text(json.dumps({"model": MODEL, "data": data}))
    drawn: list[Mapping[str, SampleNumbers]] = []

    def write(splits: Mapping[str, SampleNumbers], *more: Any) -> None:
        drawn.append(splits)
        write_plot(splits, *more)

    monkeypatch.setattr(data_plot, "write_plot", write)
    for streaming in ("false", "true"):
        words = ["--config", "r.yaml", "--data.streaming", streaming, "--n", "0", "--plot", "x.png"]
        assert commands.run(["data", "inspect", *words]) == 0
    whole, stream = (splits["train"] for splits in drawn)
    assert [list(splits) for splits in drawn] == [["train"]] * 2
    samples = [sorted(zip(split.lengths, split.supervised, strict=True)) for split in (whole, stream)]
    assert samples[0] == samples[1] != []
    if packing:
        assert stream.fills.tolist() == whole.fills.tolist() != []
    else:
        assert stream.fills is whole.fills is None
