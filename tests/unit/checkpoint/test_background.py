"""The thread that writes checkpoints, alone in its process: order, errors, what training changes meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_fsdp.checkpoint import store
from lit_fsdp.checkpoint.manifest import read_manifest
from lit_fsdp.checkpoint.run_folder import step_folder
from lit_fsdp.checkpoint.store import BackgroundSaver
from lit_fsdp.errors import CheckpointError


@pytest.fixture
def saver() -> Iterator[BackgroundSaver]:
    made = BackgroundSaver(torch.device("cpu"), 10.0)
    yield made
    made.close()


class Gate:
    """Holds every write back until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
        self.open = threading.Event()
        write: Callable[..., None] = store._write

        def held(snapshot: Any, ranks: Any) -> None:
            assert self.open.wait(100)
            if error is not None:
                raise error
            write(snapshot, ranks)

        monkeypatch.setattr(store, "_write", held)


def parts(value: float) -> dict[str, Any]:
    return {
        "tensors": {"model/w": torch.full((3, 5), value), "model/b": torch.full((7,), value).bfloat16()},
        "state": {"list": [value]},
        "manifest": {"global_step": int(value)},
        "rank_state": {"own": value},
    }


def test_what_changes_after_the_call_is_not_saved(
    saver: BackgroundSaver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    gate = Gate(monkeypatch)
    folder, given, file = step_folder(tmp_path, 1), parts(1.0), tmp_path / "recipe.yaml"
    file.write_text("first")
    saver.save(folder, layout="sharded", files={"recipe.yaml": file}, **given)
    assert saver.is_writing
    assert not folder.exists()
    for tensor in given["tensors"].values():
        tensor.fill_(9)
    given["state"]["list"].append(9)
    given["rank_state"]["own"] = 9
    given["manifest"]["global_step"] = 9
    file.write_text("second")
    behind: list[bool] = []
    saver.then(lambda: behind.append(folder.is_dir()))
    gate.open.set()
    saver.wait()
    assert (saver.is_writing, behind) == (False, [True])
    into = parts(5.0)["tensors"]
    store.load_tensors(folder, into)
    assert all(torch.equal(into[name], tensor) for name, tensor in parts(1.0)["tensors"].items())
    assert store.load_state(folder) == {"list": [1.0]}
    assert store.load_rank_state(folder, 0) == {"own": 1.0}
    assert read_manifest(folder).global_step == 1
    assert (folder / "recipe.yaml").read_text() == "first"


def test_an_error_nobody_asked_for_is_logged_at_the_end(
    saver: BackgroundSaver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    Gate(monkeypatch, CheckpointError("gone")).open.set()
    saver.save(step_folder(tmp_path, 1), layout="sharded", **parts(1.0))
    saver.then(lambda: pytest.fail("there is nothing to tidy"))
    saver.close()
    assert [record.message for record in caplog.records] == ["not saved: gone"]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("checkpoint-save")]
