"""The supervision proof is shown once, by one rank, and kept by training alone."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lit_fsdp import CausalLMDataModule
from lit_fsdp.callbacks.data_record import DataRecord
from lit_fsdp.errors import DataError
from lit_fsdp.models.tokenizers import miniature_tokenizer

Out = pytest.CaptureFixture[str]


def module(**options: Any) -> CausalLMDataModule:
    made = CausalLMDataModule(**{"train": "generated:12", "num_tokenizers": 1, **options})
    made.attach(miniature_tokenizer(), 0)
    made.prepare(["train"])
    return made


def trainer(folder: Path, datamodule: Any, rank: int = 0) -> Any:
    strategy = SimpleNamespace(broadcast=lambda refused: refused)
    names: dict[str, Any] = {"datamodule": datamodule, "strategy": strategy, "default_root_dir": str(folder)}
    return SimpleNamespace(is_global_zero=rank == 0, **names)


def test_shown_once_in_anybodys_trainer(tmp_path: Path, capsys: Out):
    record, data = DataRecord(), module()
    for _ in range(2):
        record.setup(trainer(tmp_path, data), None, "fit")  # type: ignore[arg-type]
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("rows read") == 1
    written = json.loads((tmp_path / "data.json").read_text())
    assert written == json.loads(json.dumps(data.describe()))
    assert written["splits"]["train"]["rows_read"] == 12


def test_only_rank_0_speaks_and_only_training_leaves_a_record(tmp_path: Path, capsys: Out):
    DataRecord().setup(trainer(tmp_path, module(), rank=1), None, "fit")  # type: ignore[arg-type]
    assert capsys.readouterr().err == ""
    DataRecord().setup(trainer(tmp_path, module()), None, "validate")  # type: ignore[arg-type]
    assert "rows read" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_data_of_others_is_left_alone(tmp_path: Path):
    DataRecord().setup(trainer(tmp_path, object()), None, "fit")  # type: ignore[arg-type]
    DataRecord().setup(trainer(tmp_path, None), None, "fit")  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_a_stream_with_nothing_to_learn_stops_every_rank(tmp_path: Path):
    """Rank 0 looks, and tells the others; or they would wait for it."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"messages": [{"role": "user", "content": "only asked"}]}) + "\n")
    data, told = module(train=str(rows), streaming=True), []
    first, second = trainer(tmp_path, data), trainer(tmp_path, data, rank=1)
    first.strategy = SimpleNamespace(broadcast=lambda refused: told.append(refused) or refused)
    second.strategy = SimpleNamespace(broadcast=lambda refused: told[0])
    for one in (first, second):
        with pytest.raises(DataError, match="of the stream: no token of any row is supervised"):
            DataRecord().setup(one, None, "fit")  # type: ignore[arg-type]
