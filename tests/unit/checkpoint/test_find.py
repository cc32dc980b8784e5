"""What a run has: which checkpoint a word means, what takes the place of a damaged one, which ones stay."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from lit_fsdp.checkpoint import run_folder
from lit_fsdp.checkpoint.manifest import record_metrics
from lit_fsdp.checkpoint.run_folder import Found, checkpoints, choose, named_checkpoint, remove, step_folder
from lit_fsdp.config.run import CheckpointConfig
from lit_fsdp.errors import CheckpointError, ConfigError
from tests.unit.checkpoint.conftest import make


def pick(run: Path, word: str | Path, fallback: bool = False, monitor: str = "loss", mode: Any = "min") -> list[Path]:
    return choose(word, run, monitor, mode, fallback)


def test_last_best_and_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make(tmp_path, 1, loss=0.5, accuracy=0.1)
    make(tmp_path, 2, loss=0.4, accuracy=float("nan"))
    make(tmp_path, 3, loss=0.4, accuracy=-math.inf)
    make(tmp_path, 4)
    monkeypatch.setenv("HOME", str(tmp_path))
    for word, monitor, mode, steps in (
        ("last", "loss", "min", [4, 3, 2, 1]),
        ("best", "loss", "min", [3, 2, 1]),
        ("best", "loss", "max", [1, 3, 2]),
        ("best", "accuracy", "max", [1]),
        (step_folder(tmp_path, 2), "loss", "min", [2]),
        (tmp_path, "loss", "min", [4]),
        (tmp_path / "last", "loss", "min", [4]),
        (tmp_path / "step-00000003", "loss", "min", [3]),
        ("~/checkpoints/step-00000001", "loss", "min", [1]),
    ):
        found = pick(tmp_path, word, monitor=monitor, mode=mode)
        assert found == [step_folder(tmp_path, step) for step in steps], (word, monitor)
    monkeypatch.chdir(tmp_path)
    Path("r").symlink_to(tmp_path)
    assert pick(tmp_path, "r/last") == [step_folder(Path("r"), 4)]  # similar to last, which is another run's
    with pytest.raises(CheckpointError, match=r"has a value of bleu, only of accuracy, loss; use last"):
        pick(tmp_path, "best", monitor="bleu")
    with pytest.raises(CheckpointError, match=r"manifest\.json: missing, so this is not a checkpoint; use a folder"):
        pick(tmp_path, tmp_path / "checkpoints")
    for word, fix in (("lst", "last"), ("bets", "best"), ("latest", "last")):
        with pytest.raises(ConfigError, match=f"write --ckpt_path {fix}"):
            pick(tmp_path, word)
    for text in ("", "checkpoint: {monitor: loss, key_of_a_later_version: 1}", "checkpoint: {monitor: loss}"):
        (tmp_path / "recipe.yaml").write_text(text)
        word = "best" if text.endswith("loss}") else "last"
        assert named_checkpoint(tmp_path / word) == step_folder(tmp_path, 3 if word == "best" else 4)
    with pytest.raises(CheckpointError, match=r"ckpt_path last: no complete checkpoint in .*gone/checkpoints"):
        pick(tmp_path / "gone", "last")


def test_a_damaged_one_that_may_come_first_is_never_passed_over_in_silence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    four = [make(tmp_path, step, loss=loss) for step, loss in {1: 0.3, 2: 0.1, 3: 0.2, 4: 0.4}.items()]
    (four[3] / "data").write_bytes(b"123")
    (four[2] / "manifest.json").write_bytes(b"{}")
    for word in ("last", "best"):
        with pytest.raises(CheckpointError) as error:
            pick(tmp_path, word)
        text = str(error.value)
        assert text.index(f"  {four[3]} is damaged: ") < text.index(f"  {four[2]} is damaged: ")
        assert text.endswith(f"set --ckpt_path {four[1]}, or add --resume.fallback true")
        assert pick(tmp_path, word, fallback=True) == [four[1], four[0]]
        assert f"{four[3]} is damaged: " in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="damaged or invalid"):  # a path never is replaced
        pick(tmp_path, four[2], fallback=True)
    (four[1] / "data").unlink()
    (four[0] / "data").unlink()
    with pytest.raises(CheckpointError, match=r"no complete checkpoint in .*(\n.*){3}\n  .*step-00000001 is damaged: "):
        pick(tmp_path, "last", fallback=True)


def test_a_manifest_is_read_again_only_after_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Reading 1,000 manifests of 600 tensors took 18 s after every save."""
    folders = [make(tmp_path, step, loss=step / 10) for step in (1, 2, 3)]
    read = []
    original = run_folder.read_manifest
    monkeypatch.setattr(run_folder, "read_manifest", lambda folder: read.append(folder) or original(folder))
    expected = checkpoints(tmp_path)
    assert (sorted(read), checkpoints(tmp_path)) == (folders, expected)
    record_metrics(folders[1], {"loss": 0.9})
    found = checkpoints(tmp_path)
    assert [entry.metrics["loss"] for entry in found] == [0.1, 0.9, 0.3]
    assert read[3:] == folders[1:2]
    (folders[0] / "manifest.json").write_text("{}")
    (folders[2] / "data").write_bytes(b"")
    assert [entry.step for entry in checkpoints(tmp_path)] == [2]


def test_only_checkpoints_are_removed(tmp_path: Path):
    (tmp_path / "thesis").mkdir()
    for name in ("thesis", "gone"):
        with pytest.raises(CheckpointError, match="not removed"):
            remove(tmp_path / name)


def test_the_newest_the_best_and_every_nth_stay():
    losses = {10: 0.9, 20: 0.1, 30: 0.5, 40: math.nan, 50: 0.5, 60: None}
    signs = {1: -3.0, 2: -7.5, 3: -math.inf, 4: 2.0, 5: math.inf, 6: 0.0}
    by_signal = {5: 5.0, 10: 10.0, 11: 11.0, 17: 17.0}
    last: dict[str, Any] = {"keep_last": 1, "keep_best": 0}
    for values, options, expected, current, signalled in (
        (losses, last, [60], None, ()),
        (losses, last, [20, 60], 20, ()),  # the one just saved stays beside newer ones
        (losses, {"keep_last": 2}, [20, 50, 60], None, ()),
        (losses, {"keep_last": 1, "keep_best": 2}, [20, 50, 60], None, ()),  # 30 and 50 are equal: the newer one
        (losses, {"keep_last": 1, "keep_best": 99}, [10, 20, 30, 50, 60], None, ()),  # nan is never the best
        (losses, {"keep_last": 1, "mode": "max"}, [10, 60], None, ()),
        (losses, {"keep_last": -1, "keep_best": 0}, [10, 20, 30, 40, 50, 60], None, ()),
        (losses, {**last, "every_steps": 10, "keep_every": 20}, [20, 40, 60], None, ()),
        (signs, {"keep_last": 1, "keep_best": 2}, [1, 2, 6], None, ()),  # infinities do not count
        # of those saved on a signal only the newest counts, so that whole intervals are not pushed out
        (by_signal, {"keep_last": 2, "keep_best": 0}, [10, 17], None, (5, 11, 17)),
        (by_signal, {"keep_last": -1, "keep_best": 0}, [10, 11, 17], None, (5, 11)),
        (by_signal, {"keep_last": -1, "keep_best": 1}, [5, 10, 17], None, (5, 11, 17)),  # 5 is the best
    ):
        there = [
            Found(s, Path(f"step-{s}"), {} if loss is None else {"val_loss": loss}, on_signal=s in signalled)
            for s, loss in values.items()
        ]
        for order in (there, there[::-1]):
            gone = run_folder.to_remove(order, CheckpointConfig(**options), current)
            assert [entry.step for entry in there if entry not in gone] == expected, options


def test_what_another_callback_saved_beside_them_stays(tmp_path: Path):
    for step in (1, 2, 3):
        make(tmp_path, step)
    theirs = make(tmp_path, 1, "epoch=0-step=1.ckpt")
    run_folder.retain(tmp_path, CheckpointConfig(keep_last=1))
    assert {entry.path for entry in checkpoints(tmp_path)} == {theirs, step_folder(tmp_path, 3)}
