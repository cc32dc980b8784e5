"""Which checkpoint is meant by last, best or a path; without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lit_fsdp.checkpoint.run_folder import checkpoints, choose, damaged, remove, step_folder
from lit_fsdp.errors import CheckpointError
from tests.unit.checkpoint.conftest import make


def steps(found) -> list[int]:
    return [entry.step for entry in found]


def test_the_command_line_finds_checkpoints_without_torch():
    code = "import sys, lit_fsdp.checkpoint.run_folder; print({'torch', 'numpy', 'safetensors'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_only_complete_ones_are_found_in_order_of_their_steps(tmp_path):
    assert checkpoints(tmp_path) == []
    for step in (100, 20, 3):
        make(tmp_path, step, val_loss=1.0)
    make(tmp_path, 50, name="by-hand")
    make(tmp_path, 60, name=".hidden")
    make(tmp_path, 7)
    (step_folder(tmp_path, 7) / "data").unlink()
    make(tmp_path, 8)
    (step_folder(tmp_path, 8) / "data").write_bytes(b"123")
    step_folder(tmp_path, 9).mkdir()
    (tmp_path / "checkpoints" / "notes").mkdir()
    found = checkpoints(tmp_path)
    assert steps(found) == [3, 20, 50, 100]
    assert (found[0].path, found[0].metrics, found[0].num_bytes) == (step_folder(tmp_path, 3), {"val_loss": 1.0}, 4)
    reasons = {entry.path.name: entry.damage for entry in damaged(tmp_path)}
    assert sorted(reasons) == ["step-00000007", "step-00000008", "step-00000009"]
    assert "No such file" in reasons["step-00000007"]
    assert "3 bytes, 4 in the manifest" in reasons["step-00000008"]
    assert "has no manifest.json" in reasons["step-00000009"]


def test_a_path_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    make(tmp_path, 1)
    path = choose("~/checkpoints/step-00000001", "elsewhere", "val_loss", "min").path
    assert path == step_folder(tmp_path, 1)


def test_last_best_and_a_path(tmp_path):
    make(tmp_path, 1, val_loss=0.5, accuracy=0.1)
    make(tmp_path, 2, val_loss=0.4, accuracy=float("nan"))
    make(tmp_path, 3, val_loss=0.4)
    make(tmp_path, 4)

    def resolve(word, monitor="val_loss", mode="min"):
        return choose(word, tmp_path, monitor, mode).path.name

    assert resolve("last") == "step-00000004"
    assert resolve("best") == "step-00000003"
    assert resolve("best", mode="max") == "step-00000001"
    assert resolve("best", monitor="accuracy", mode="max") == "step-00000001"
    assert resolve(step_folder(tmp_path, 2)) == "step-00000002"
    with pytest.raises(CheckpointError, match="has a value of bleu; metrics there: accuracy, val_loss; give last"):
        resolve("best", monitor="bleu")
    with pytest.raises(CheckpointError, match="a run folder, not a checkpoint; give one of its checkpoints"):
        resolve(tmp_path)


def test_a_damaged_newest_one_is_not_passed_over(tmp_path):
    good, newest = make(tmp_path, 1, val_loss=1.0), make(tmp_path, 2)
    (newest / "data").unlink()
    with pytest.raises(CheckpointError) as error:
        choose("last", tmp_path, "val_loss", "min")
    assert f"{newest} is damaged: " in str(error.value)
    assert f"the newest complete one is {good}" in str(error.value)
    assert choose("best", tmp_path, "val_loss", "min").path == good
    (good / "data").unlink()
    with pytest.raises(CheckpointError, match=r"no complete checkpoint in .*; damaged:\n  step-00000001: "):
        choose("last", tmp_path, "val_loss", "min")


def test_an_empty_place_says_what_is_there(tmp_path):
    with pytest.raises(CheckpointError, match="there is no run folder"):
        choose("last", tmp_path / "gone", "val_loss", "min")
    (tmp_path / "recipe.yaml").write_text("")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*/checkpoints; in .*: recipe\.yaml"):
        choose("last", tmp_path, "val_loss", "min")
    folder = make(tmp_path / "run", 1)
    with pytest.raises(CheckpointError, match="is a checkpoint, not a run folder"):
        choose("last", folder, "val_loss", "min")


def test_removing_hides_first(tmp_path, monkeypatch):
    folder = make(tmp_path, 1)

    def killed(path):
        assert not folder.exists()
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        remove(folder)
    monkeypatch.undo()
    assert checkpoints(tmp_path) == damaged(tmp_path) == []
    assert [path.name.startswith(".step-00000001.removed-") for path in folder.parent.iterdir()] == [True]


def test_only_checkpoints_are_removed(tmp_path):
    kept = make(tmp_path, 1)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "link").symlink_to(kept)
    for name in ("thesis", "gone"):
        with pytest.raises(CheckpointError, match="not removed"):
            remove(tmp_path / name)
    remove(tmp_path / "link")
    assert not (tmp_path / "link").is_symlink()
    assert checkpoints(tmp_path)[0].path == kept
    remove(kept)
    assert list(kept.parent.iterdir()) == []
