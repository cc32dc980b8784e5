"""What a run writes down: its FSDP units, and what filled a GPU that is out of memory."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lit_fsdp.callbacks.records import RunRecord, audit_lines, show


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
    }
    show(*audit_lines(record))
    out, err = capsys.readouterr()
    assert out == ""
    assert "FSDP units by classes Block" in err
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in err.splitlines() if line.startswith("│")]
    assert lines == [
        ["layers.0 … layers.2", "3 × Block", "10", "1.000", "75.0%", "-", "full"],
        ["(root)", "Net", "10", "1.000", "25.0%", "head.weight", "full"],
    ]
    assert "40 parameters (30 trained, 10 frozen) in 4 units, 20 on rank 0" in err
    assert "replaced: sharding: full_shard → no_shard" in err


def test_a_snapshot_of_a_gpu_without_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[Any] = []
    memory = torch.cuda.memory
    monkeypatch.setattr(memory, "_record_memory_history", lambda enabled, **how: recorded.append(enabled))
    monkeypatch.setattr(memory, "_dump_snapshot", lambda path: Path(path).write_text("snapshot"))
    error, other = torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("made to fail")
    for kind in ("cpu", "cuda"):
        strategy = SimpleNamespace(root_device=torch.device(kind))
        trainer: Any = SimpleNamespace(strategy=strategy, default_root_dir=tmp_path, global_rank=3)
        record, module = RunRecord(), torch.nn.Module()
        record.setup(trainer, module, "fit")  # type: ignore[arg-type]
        record.on_exception(trainer, module, other)  # type: ignore[arg-type]
        assert not list(tmp_path.iterdir())
        record.on_exception(trainer, module, error)  # type: ignore[arg-type]
    path = tmp_path / "debug" / "rank-3.memory.pickle"
    assert path.read_text() == "snapshot"
    assert recorded == ["state"]
    assert error.__notes__ == [f"what was allocated, and by which lines: {path}, for pytorch.org/memory_viz"]
