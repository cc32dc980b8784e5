"""What a run shows of its FSDP units, and data that teach nothing."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lit_fsdp import CausalLMDataModule
from lit_fsdp.callbacks.records import DataRecord, print_audit
from lit_fsdp.errors import DataError
from lit_fsdp.models.tokenizers import miniature_tokenizer


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


def test_a_stream_with_nothing_to_learn_stops_every_rank(tmp_path: Path):
    """Rank 0 looks, and tells the others; or they would wait for it."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"messages": [{"role": "user", "content": "only asked"}]}) + "\n")
    data = CausalLMDataModule(train=str(rows), streaming=True, num_tokenizers=1)
    data.attach(miniature_tokenizer(), 0)
    data.prepare(["train"])
    told: list[Any] = []
    for tell in (lambda refused: told.append(refused) or refused, lambda refused: told[0]):
        strategy = SimpleNamespace(broadcast=tell)
        rank: Any = SimpleNamespace(
            is_global_zero=not told, datamodule=data, strategy=strategy, default_root_dir=str(tmp_path)
        )
        with pytest.raises(DataError, match="of the stream: no token of any row is supervised"):
            DataRecord().setup(rank, None, "fit")  # type: ignore[arg-type]


def test_data_are_shown_by_rank_0_of_anybodys_trainer(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    data = CausalLMDataModule(train="generated:12", num_tokenizers=1)
    data.attach(miniature_tokenizer(), 0)
    data.prepare(["train"])
    for is_first in (False, True):
        strategy = SimpleNamespace(broadcast=lambda refused: refused)
        options = {"is_global_zero": is_first, "default_root_dir": str(tmp_path)}
        rank: Any = SimpleNamespace(datamodule=data, strategy=strategy, **options)
        DataRecord().setup(rank, None, "fit")  # type: ignore[arg-type]
        assert ("rows read" in capsys.readouterr().err) == (tmp_path / "data.json").exists() == is_first
