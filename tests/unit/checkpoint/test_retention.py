"""Which checkpoints stay, and what a removal that fails or is killed leaves."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

from lit_fsdp.checkpoint import run_folder
from lit_fsdp.checkpoint.run_folder import Found, checkpoints, step_folder
from lit_fsdp.config.run import CheckpointConfig
from tests.unit.checkpoint.conftest import make


def left(losses: dict[int, Any], current: int | None = None, **options: Any) -> list[int]:
    there = [Found(s, Path(f"step-{s}"), {} if loss is None else {"val_loss": loss}) for s, loss in losses.items()]
    gone = run_folder.to_remove(there, CheckpointConfig(**options), current)
    assert gone == [entry for entry in sorted(there, key=lambda e: e.step) if entry in gone]
    return [entry.step for entry in there if entry not in gone]


def test_the_newest_the_best_and_every_nth_stay():
    losses = {10: 0.9, 20: 0.1, 30: 0.5, 40: math.nan, 50: 0.5, 60: None}
    signs = {1: -3.0, 2: -7.5, 3: -math.inf, 4: 2.0, 5: math.inf, 6: 0.0}
    every: dict[str, Any] = {"keep_last": 1, "keep_best": 0, "every_steps": 10}
    for values, options, expected in (
        (losses, {"keep_last": 1, "keep_best": 0}, [60]),
        (losses, {"keep_last": 2}, [20, 50, 60]),
        (losses, {"keep_last": 1, "keep_best": 2}, [20, 50, 60]),  # 30 and 50 are equal: the newer one stays
        (losses, {"keep_last": 1, "keep_best": 99}, [10, 20, 30, 50, 60]),  # nan and nothing are never the best
        (losses, {"keep_last": 1, "mode": "max"}, [10, 60]),
        (losses, {"keep_last": -1, "keep_best": 0}, [10, 20, 30, 40, 50, 60]),
        (losses, {**every, "keep_every": 20}, [20, 40, 60]),
        (signs, {"keep_last": 1, "keep_best": 2}, [1, 2, 6]),  # infinities do not count
        (signs, {"keep_last": 1, "keep_best": 2, "mode": "max"}, [4, 6]),
    ):
        assert left(values, **options) == expected, options
        assert left(dict(reversed(values.items())), **options)[::-1] == expected, options


def test_of_those_saved_on_a_signal_only_the_newest_counts():
    for signalled, options, expected in (
        ([5, 11, 17], {"keep_last": 2, "keep_best": 0}, [10, 17]),  # whole intervals are not pushed out
        ([5, 11], {"keep_last": -1, "keep_best": 0}, [10, 11, 17]),
        ([5, 11, 17], {"keep_last": 1, "keep_best": 0}, [17]),
        ([5, 11, 17], {"keep_last": -1, "keep_best": 1}, [5, 10, 17]),  # 5 is the best
        ([5, 11, 17], {"keep_last": 1, "keep_best": 0, "every_steps": 1, "keep_every": 11}, [11, 17]),
    ):
        there = [Found(s, Path(f"step-{s}"), {"val_loss": s}, on_signal=s in signalled) for s in (5, 10, 11, 17)]
        gone = run_folder.to_remove(there, CheckpointConfig(**options))
        assert [entry.step for entry in there if entry not in gone] == expected, (signalled, options)


def test_the_one_just_saved_stays_beside_newer_ones():
    assert left({10: 1.0, 25: 2.0, 30: 3.0, 40: 4.0}, current=25, keep_last=1, keep_best=0) == [25, 40]


def test_what_another_callback_saved_beside_them_stays(tmp_path):
    for step in (1, 2, 3):
        make(tmp_path, step)
    theirs = make(tmp_path, 1, "epoch=0-step=1.ckpt")
    run_folder.retain(tmp_path, CheckpointConfig(keep_last=1))
    assert {entry.path for entry in checkpoints(tmp_path)} == {theirs, step_folder(tmp_path, 3)}


def test_a_removal_that_fails_is_a_warning_and_swept_later(tmp_path, monkeypatch, caplog):
    folder = make(tmp_path, 1)
    make(tmp_path, 2)
    (other := folder.with_name(".notes")).mkdir()

    def refused(path, ignore_errors=False):
        if not ignore_errors:
            raise PermissionError(13, "Permission denied", str(path / "data"))

    monkeypatch.setattr("shutil.rmtree", refused)
    run_folder.retain(tmp_path, CheckpointConfig(keep_last=1))
    assert [entry.step for entry in checkpoints(tmp_path)] == [2]
    (hidden,) = folder.parent.glob(".step-00000001.removed-*")
    said = f"{folder}: the old checkpoint cannot be deleted: {hidden}/data: Permission denied"
    assert caplog.messages == [said]
    run_folder.sweep(tmp_path)
    assert f"{hidden}: left by a killed save or removal, and cannot be deleted" in caplog.text
    monkeypatch.undo()
    caplog.clear()
    with caplog.at_level(logging.INFO):
        run_folder.sweep(tmp_path)
    assert sorted(folder.parent.iterdir()) == [other, step_folder(tmp_path, 2)]
    assert caplog.messages == [f"{hidden}: cleared away after a killed save or removal"]
