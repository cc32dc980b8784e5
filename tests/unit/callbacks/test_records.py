"""What a run shows and leaves behind: its data, the audit, dtypes, predictions."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lit_fsdp import CausalLMDataModule
from lit_fsdp.callbacks.records import DataRecord, PredictionWriter, print_audit
from lit_fsdp.errors import DataError
from lit_fsdp.models.tokenizers import miniature_tokenizer

Out = pytest.CaptureFixture[str]


def test_predictions_are_written_in_row_order_once(tmp_path: Path):
    writer, trainer = PredictionWriter(), SimpleNamespace(is_global_zero=True, default_root_dir=str(tmp_path / "run"))
    for rows in ([2, 0], [], [1]):
        outputs = [{"row": row, "loss_sum": row / 2} for row in rows]
        writer.on_predict_batch_end(trainer, None, outputs, None, 0)  # type: ignore[arg-type]
    writer.on_predict_end(trainer, None)  # type: ignore[arg-type]
    file = tmp_path / "run" / "predictions.jsonl"
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        {"row": row, "loss_sum": row / 2} for row in range(3)
    ]
    writer.on_predict_end(trainer, None)  # type: ignore[arg-type]
    assert file.read_text() == ""  # another call starts anew

    other: Any = SimpleNamespace(is_global_zero=False, default_root_dir=str(tmp_path / "other"))
    PredictionWriter().on_predict_end(other, None)  # type: ignore[arg-type]
    assert not (tmp_path / "other").exists()


def unit(name: str, cls: str = "Block", **changes: Any) -> dict[str, Any]:
    row = {"name": name, "class": cls, "num_params": 10, "num_bytes": 2**30, "share": 0.25, "tied": []}
    return {**row, "recompute": "full", **changes}


def test_equal_neighbors_share_a_line_of_the_audit(capsys: pytest.CaptureFixture[str]):
    units = [unit("layers.0"), unit("layers.1"), unit("layers.2"), unit("(root)", "Net", tied=["head.weight"])]
    record = {
        "wrapped_by": "classes Block",
        "num_params": 40,
        "num_trainable": 30,
        "num_units": 4,
        "replaced": {"sharding": "full_shard → no_shard"},
        "num_params_on_this_rank": 20,
        "units": units,
        "peak_host_memory_per_rank": [{"before_bytes": 2**30, "after_bytes": 2**31}],
    }
    print_audit(record)
    out, err = capsys.readouterr()
    assert out == ""
    assert "FSDP units by classes Block" in err
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in err.splitlines() if line.startswith("│")]
    assert lines == [
        ["layers.0 … layers.2", "3 × Block", "10", "1.000", "75.0%", "-", "full"],
        ["(root)", "Net", "10", "1.000", "25.0%", "head.weight", "full"],
    ]
    assert "40 parameters (30 trained, 10 frozen) in 4 units, 20 on rank 0" in err
    assert "peak host memory per rank while loading: 1.00 → 2.00 GiB" in err


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
