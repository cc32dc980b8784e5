"""What filled a GPU that is out of memory is written down."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lit_fsdp.callbacks.records import RunRecord


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
    assert error.__notes__ == [f"memory snapshot: {path}, for pytorch.org/memory_viz"]
