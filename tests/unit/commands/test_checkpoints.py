"""``ckpt ls`` and ``ckpt verify``: their tables, their JSON, their exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_fsdp import commands
from lit_fsdp.checkpoint import files as disk
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


def listed(capsys: Out, *words: str, code: int = 0) -> dict[str, Any]:
    assert commands.run(["ckpt", "ls", *words, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def means(record: dict[str, Any]) -> dict[int, list[str]]:
    return {row["step"]: row["means"] for row in record["checkpoints"] if row["means"]}


def test_the_table(run: Callable[..., Path], capsys: Out):
    for step, loss in {2: 0.5, 4: 0.25, 10: 0.75}.items():
        run(step, val_loss=loss)
    for word in ("run", "run/checkpoints"):
        assert commands.run(["ckpt", "ls", word]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        head, *rows = [line.split() for line in out.splitlines()]
        assert head == ["step", "time", "(UTC)", "size", "val_loss", "complete", "verified"]
        assert [[row[0], *row[5:]] for row in rows] == [
            ["2", "0.5", "yes", "-"],
            ["4", "0.25", "yes", "-", "best"],
            ["10", "0.75", "yes", "-", "last"],
        ]


def test_damage_is_in_the_table(run: Callable[..., Path], capsys: Out):
    good, bad, cut = run(2, val_loss=0.5), run(4, val_loss=0.1), run(6, val_loss=0.7)
    (bad / "state.json").write_bytes(b'{"mine": 1}'.ljust((bad / "state.json").stat().st_size))
    (cut / "tensors.safetensors").unlink()
    assert commands.run(["ckpt", "ls", "run"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[2].endswith("0.1  yes       -         last, best")
    assert out.splitlines()[3].endswith("0.7  no        -         tensors.safetensors: No such file or directory")
    assert err == ""
    assert commands.run(["ckpt", "ls", "run", "--verify"]) == 1
    out, _ = capsys.readouterr()
    assert "no: state.json" in out.splitlines()[2]
    assert "no: tensors.safetensors" in out.splitlines()[3]
    assert " yes       yes" in out.splitlines()[1]
    record = listed(capsys, "run", "--verify", code=1)
    first, second, third = record["checkpoints"]
    assert (first["verified"], first["differences"], first["path"]) == (True, {}, str(good))
    assert second["differences"] == {"state.json": "xxh3 differs from the manifest"}
    assert (second["complete"], second["metrics"], second["bytes"]) == (True, {"val_loss": 0.1}, _size(bad))
    assert (third["complete"], third["verified"]) == (False, False)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.name != "manifest.json")


def test_the_best_by_the_runs_own_recipe(run: Callable[..., Path], capsys: Out):
    run(1, acc=0.1, val_loss=0.1)
    run(2, acc=0.9, val_loss=0.9)
    run(3, acc=0.5, val_loss=0.5)
    assert means(listed(capsys, "run")) == {1: ["best"], 3: ["last"]}  # no recipe: the defaults
    Path("run/recipe.yaml").write_text("checkpoint: {monitor: acc, mode: max}")
    record = listed(capsys, "run")
    assert (record["monitor"], record["mode"], means(record)) == ("acc", "max", {2: ["best"], 3: ["last"]})
    assert means(listed(capsys, "run", "--mode", "min")) == {1: ["best"], 3: ["last"]}
    assert means(listed(capsys, "run", "--monitor", "val_loss")) == {2: ["best"], 3: ["last"]}
    assert means(listed(capsys, "run", "--monitor", "absent")) == {3: ["last"]}


def test_what_else_lies_there(run: Callable[..., Path], capsys: Out):
    parent = run(1).parent
    dead = disk.hidden_name(parent / "step-00000002", "tmp")
    gone = disk.hidden_name(parent / "step-00000000", "removed")
    for folder in (dead, gone, parent / "damaged-step-00000003-20260101T000000000000"):
        folder.mkdir()
    assert commands.run(["ckpt", "ls", "run"]) == 0
    err = capsys.readouterr().err
    for path in (dead, gone):
        assert f"{path.name}: being written or removed, or left by a kill until the next run starts\n" in err
    assert "damaged-step-00000003-20260101T000000000000: moved aside" in err
    assert dead.is_dir()  # looking changes nothing


def test_an_empty_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Out):
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    assert commands.run(["ckpt", "ls", "run"]) == 0
    assert capsys.readouterr() == ("", "run/checkpoints: no checkpoints yet\n")
    assert listed(capsys, "run")["checkpoints"] == []


def test_what_is_no_run(run: Callable[..., Path], tmp_path: Path):
    for given in ("rum", str(run(1) / "state.json")):
        for verb, field in (("ls", "RUN"), ("verify", "PATH")):
            with pytest.raises(ConfigError, match="which is no folder") as caught:
                commands.run(["ckpt", verb, given])
            assert caught.value.field == field
    with pytest.raises(ConfigError, match="which is a checkpoint"):
        commands.run(["ckpt", "ls", str(run(1))])
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="nothing to verify"):
        commands.run(["ckpt", "verify", "empty"])


def test_verify_names_every_file(run: Callable[..., Path], capsys: Out):
    good, bad = run(1), run(2)
    assert commands.run(["ckpt", "verify", "run"]) == 0
    assert [line.split(": ")[0] for line in capsys.readouterr().out.splitlines()] == [str(good), str(bad)]
    (bad / "extra").write_text("")
    (bad / "state.json").unlink()
    words = f"{bad} is damaged:\n  extra: not in the manifest\n  state.json: No such file or directory\n"
    assert commands.run(["ckpt", "verify", str(bad)]) == 1
    assert capsys.readouterr().out == words
    assert commands.run(["ckpt", "verify", "run/checkpoints"]) == 1
    out = capsys.readouterr().out
    assert out.endswith(words)
    assert f"{good}: 2 files, " in out
    assert commands.run(["ckpt", "verify", "run", "--json"]) == 1
    first, second = json.loads(capsys.readouterr().out)
    assert first == {"path": str(good), "verified": True, "differences": {}}
    assert second["differences"] == {"extra": "not in the manifest", "state.json": "No such file or directory"}
    assert commands.run(["ckpt", "verify", "--sha256", str(good)]) == 0
    sha256, path = capsys.readouterr().out.splitlines()[-1].split()
    assert (len(sha256), path) == (64, str(good))
