"""``ckpt ls`` and ``ckpt verify``: their table, their JSON, their exit codes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_fsdp import commands
from lit_fsdp.checkpoint.store import save_checkpoint
from lit_fsdp.errors import CheckpointError, ConfigError

Out = pytest.CaptureFixture[str]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Saves a step of the run ``run`` in the working folder and returns its folder, relative."""
    monkeypatch.chdir(tmp_path)

    def write(step: int, **metrics: float) -> Path:
        folder = Path("run/checkpoints") / f"step-{step:08d}"
        save_checkpoint(folder, {"w": torch.ones(2)}, {"step": step}, {"global_step": step, "metrics": metrics}, "full")
        return folder

    return write


def as_json(capsys: Out, verb: str, code: int = 0) -> list[dict[str, Any]]:
    assert commands.run(["ckpt", verb, "run", "--json"]) == code
    return json.loads(capsys.readouterr().out)["checkpoints"]


def test_the_table(run: Callable[..., Path], capsys: Out):
    for step, loss in {2: 0.5, 4: 0.25, 10: 0.75}.items():
        run(step, val_loss=loss)
    for verb, state in (("ls", "complete"), ("verify", "verified")):
        for word in ("run", "run/checkpoints"):
            assert commands.run(["ckpt", verb, word]) == 0
            head, *rows = [line.split() for line in capsys.readouterr().out.splitlines()]
            assert head == ["checkpoint", "time", "(UTC)", "size", "val_loss", "state"]
            assert [[row[0], *row[5:]] for row in rows] == [
                ["step-00000002", "0.5", state],
                ["step-00000004", "0.25", state, "best"],
                ["step-00000010", "0.75", state, "last"],
            ]


def test_a_list_reads_each_manifest_once(run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch):
    folders, opened, read = [run(step) for step in (2, 4, 6)], list[Path](), Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: opened.append(path) or read(path))
    assert commands.run(["ckpt", "ls", "run"]) == 0
    assert sorted(opened) == [folder / "manifest.json" for folder in folders]


def test_damage_is_named_file_by_file(run: Callable[..., Path], capsys: Out):
    good, bad, cut = run(2, val_loss=0.5), run(4, val_loss=0.1), run(6, val_loss=0.7)
    (bad / "state.json").write_bytes(b'{"mine": 1}'.ljust((bad / "state.json").stat().st_size))
    (cut / "tensors.safetensors").unlink()
    (cut.parent / "damaged-step-00000003-20260101T000000000000").mkdir()
    (cut.parent / "step-00000008").mkdir()
    missing = "damaged   tensors.safetensors: No such file or directory"
    for verb, words, code in (
        ("ls", ["complete", "complete  last, best", missing, "manifest.json: missing, so this is not a checkpoint"], 0),
        ("verify", ["verified", "damaged   state.json: xxh3 differs from the manifest", missing, "manifest.json: "], 1),
    ):
        assert commands.run(["ckpt", verb, "run"]) == code
        lines = capsys.readouterr().out.splitlines()[1:]
        assert all(word in line for word, line in zip(words, lines, strict=True)), lines
    first, second, third, _ = as_json(capsys, "verify", 1)
    assert (first["verified"], first["differences"], first["path"], first["sha256"]) == (True, {}, str(good), None)
    assert second["differences"] == {"state.json": "xxh3 differs from the manifest"}
    assert (second["metrics"], second["verified"], third["verified"]) == ({"val_loss": 0.1}, False, False)
    assert second["bytes"] == sum(path.stat().st_size for path in bad.iterdir() if path.name != "manifest.json")


def test_one_checkpoint_and_its_sha256(run: Callable[..., Path], capsys: Out):
    """As coreutils compute it."""
    folder = run(1)
    assert commands.run(["ckpt", "verify", "--sha256", str(folder)]) == 0
    command = "find . -type f ! -name manifest.json -printf '%P\\n' | LC_ALL=C sort | xargs sha256sum | sha256sum"
    done = subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True, check=True)
    assert capsys.readouterr().out.splitlines()[1].split()[-1] == done.stdout.split()[0]


def test_the_best_by_the_runs_own_recipe(run: Callable[..., Path], capsys: Out):
    for step, accuracy in {1: 0.1, 2: 0.9, 3: 0.5}.items():
        run(step, acc=accuracy, val_loss=accuracy)
    assert [row["means"] for row in as_json(capsys, "ls")] == [["best"], [], ["last"]]  # no recipe: the defaults
    Path("run/recipe.yaml").write_text("checkpoint: {monitor: acc, mode: max}")
    assert [row["means"] for row in as_json(capsys, "ls")] == [[], ["best"], ["last"]]


def test_what_is_no_run(run: Callable[..., Path], tmp_path: Path):
    (tmp_path / "empty").mkdir()
    file = str(run(1) / "state.json")
    for verb in ("ls", "verify"):
        for given in ("rum", file):
            with pytest.raises(ConfigError, match="which is not a folder"):
                commands.run(["ckpt", verb, given])
        with pytest.raises(CheckpointError, match="so this is not a checkpoint"):
            commands.run(["ckpt", verb, "empty"])
