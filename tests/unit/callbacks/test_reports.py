"""What a run shows and leaves behind: predictions, tables, plain progress lines."""

from __future__ import annotations

import itertools
import json
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lit_fsdp.callbacks import progress
from lit_fsdp.callbacks.progress import RunProgress
from lit_fsdp.callbacks.records import PredictionWriter, print_audit, print_dtypes, write_json


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


def test_other_ranks_write_nothing(tmp_path: Path):
    trainer: Any = SimpleNamespace(is_global_zero=False, default_root_dir=str(tmp_path))
    PredictionWriter().on_predict_end(trainer, None)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def unit(name: str, cls: str = "Block", **changes: Any) -> dict[str, Any]:
    row = {"name": name, "class": cls, "num_params": 10, "num_bytes": 2**30, "share": 0.25, "tied": []}
    return {**row, "recompute": "full", **changes}


def test_equal_neighbours_share_a_line_of_the_audit(capsys: pytest.CaptureFixture[str]):
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


def test_dtypes_declared_and_found(capsys: pytest.CaptureFixture[str]):
    declared = {"param": "fp32", "compute": "bf16"}
    print_dtypes({"mode": "mixed", "declared": declared, "realised": {"activations": {"bf16": 4, "fp32": 1}}})
    err = capsys.readouterr().err
    assert "Realised dtypes; precision mixed declares param fp32, compute bf16" in err
    assert "│ activations │ 4 × bf16, 1 × fp32 │" in err


def test_json_appears_whole(tmp_path: Path):
    write_json(tmp_path / "a" / "b.json", {"x": 1})
    assert json.loads((tmp_path / "a" / "b.json").read_text()) == {"x": 1}
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b.json"]


@pytest.fixture
def trainer() -> Any:
    return SimpleNamespace(
        global_step=0,
        estimated_stepping_batches=20,
        log_every_n_steps=2,
        sanity_checking=False,
        validating=False,
        state=SimpleNamespace(fn="fit"),
        callback_metrics={
            "train_loss": torch.tensor(1.25),
            "tokens_per_second": torch.tensor(12345.6),
            "peak_memory_gib": torch.tensor(0.5),
            "val_loss": torch.tensor(2.0),
        },
    )


def run(bar: RunProgress, trainer: Any, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    bar.on_train_start(trainer, None)  # type: ignore[arg-type]
    for _ in range(steps):
        now[0] += 5
        trainer.global_step += 1
        for batch in range(2):  # the second micro-batch of an accumulation says nothing new
            bar.on_train_batch_end(trainer, None, None, None, batch)  # type: ignore[arg-type]
    bar.on_validation_end(trainer, None)  # type: ignore[arg-type]
    bar.on_train_end(trainer, None)  # type: ignore[arg-type]


def test_plain_lines_where_there_is_no_terminal(
    trainer: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    run(RunProgress(), trainer, monkeypatch, steps=4)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "step 1/20  loss 1.2500  12,346 tokens/s  peak 0.50 GiB  1:35 left",
        "step 2/20  loss 1.2500  12,346 tokens/s  peak 0.50 GiB  1:30 left",
        "step 4/20  loss 1.2500  12,346 tokens/s  peak 0.50 GiB  1:20 left",
        "step 4: val_loss 2.0000",
    ]


def test_there_is_a_line_at_least_every_20_seconds(
    trainer: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    now, bar = [0.0], RunProgress()
    trainer.log_every_n_steps = 50
    monkeypatch.setattr(progress.threading, "Thread", lambda **_: SimpleNamespace(start=lambda: None))
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    bar.on_train_start(trainer, None)  # type: ignore[arg-type]
    spoken = [0.0]
    for seconds_of_step in (40, 2, 2, 2, 2, 2, 14, 35, 3):  # the first is slow, and one that another process disturbs
        for _ in range(seconds_of_step):
            now[0] += 1
            bar.break_silence(trainer)
            spoken += [now[0]] if capsys.readouterr().err else []
        trainer.global_step += 1
        bar.on_train_batch_end(trainer, None, None, None, 0)  # type: ignore[arg-type]
        spoken += [now[0]] if capsys.readouterr().err else []
    assert 40.0 in spoken  # after the first step
    assert max(b - a for a, b in itertools.pairwise(spoken)) <= 20
    trainer.validating = True
    now[0] += 16
    bar.break_silence(trainer)
    assert capsys.readouterr().err == "step 9/20  validation: 16 s so far  2:04 left\n"


def test_it_speaks_by_itself_while_a_step_goes_on_and_not_after_the_end(
    trainer: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(progress, "_SILENCE_SECONDS", 0.0)
    bar = RunProgress()
    bar.on_train_start(trainer, None)  # type: ignore[arg-type]
    threads = [thread for thread in threading.enumerate() if thread.name == "progress"]
    while not (err := capsys.readouterr().err):
        threads[0].join(0.05)
    assert re.match(r"step 0/20  next step: \d s so far\n", err)
    bar.on_exception(trainer, None, KeyboardInterrupt())  # type: ignore[arg-type]
    threads[0].join(10)
    assert not threads[0].is_alive()


def test_the_time_left_counts_the_steps_of_this_start_only(
    trainer: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    trainer.global_step = 16
    run(RunProgress(), trainer, monkeypatch, steps=2)
    assert [line[-9:] for line in capsys.readouterr().err.splitlines()[:2]] == ["0:15 left", "0:10 left"]


def test_other_ranks_are_silent(trainer: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    bar = RunProgress()
    bar.disable()
    run(bar, trainer, monkeypatch, steps=4)
    assert capsys.readouterr() == ("", "")
