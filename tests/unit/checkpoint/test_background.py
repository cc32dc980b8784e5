"""The thread that writes checkpoints, alone in its process: order, errors, memory."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_fsdp.checkpoint import background, host_buffers, store
from lit_fsdp.checkpoint.background import BackgroundSaver
from lit_fsdp.checkpoint.find import step_folder
from lit_fsdp.checkpoint.host_buffers import HostBuffers, plan_blocks, planned_bytes
from lit_fsdp.checkpoint.manifest import TensorSpec, read_manifest
from lit_fsdp.errors import CheckpointError


@pytest.fixture
def saver() -> Iterator[BackgroundSaver]:
    made = BackgroundSaver(torch.device("cpu"), 10.0)
    yield made
    made.close()


class Gate:
    """Holds every write back until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
        self.open, self.order = threading.Event(), []  # type: ignore[var-annotated]
        write: Callable[..., None] = background.write_part

        def held(folder: Path, *rest: Any) -> None:
            assert self.open.wait(100)
            self.order.append(folder.name)
            if error is not None:
                raise error
            write(folder, *rest)

        monkeypatch.setattr(background, "write_part", held)


def parts(value: float) -> dict[str, Any]:
    return {
        "tensors": {"model/w": torch.full((3, 5), value), "model/b": torch.full((7,), value).bfloat16()},
        "state": {"list": [value]},
        "manifest": {"global_step": int(value)},
        "rank_state": {"own": value},
    }


@pytest.mark.parametrize("layout", ["sharded", "full"])
def test_what_changes_after_the_call_is_not_saved(
    saver: BackgroundSaver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: Any
):
    gate = Gate(monkeypatch)
    folder, given, file = step_folder(tmp_path, 1), parts(1.0), tmp_path / "recipe.yaml"
    file.write_text("first")
    saver.save(folder, layout=layout, files={"recipe.yaml": file}, **given)
    assert saver.pending == folder
    assert not saver.poll()
    assert not folder.exists()
    for tensor in given["tensors"].values():
        tensor.fill_(9)
    given["state"]["list"].append(9)
    given["rank_state"]["own"] = 9
    given["manifest"]["global_step"] = 9
    file.write_text("second")
    gate.open.set()
    assert saver.wait()
    assert saver.pending is None
    assert saver.poll()
    into = parts(5.0)["tensors"]
    store.load_tensors(folder, into)
    assert all(torch.equal(into[name], tensor) for name, tensor in parts(1.0)["tensors"].items())
    assert store.load_state(folder) == {"list": [1.0]}
    assert store.load_rank_state(folder, 0) == {"own": 1.0}
    assert read_manifest(folder).global_step == 1
    assert (folder / "recipe.yaml").read_text() == "first"


def test_one_after_the_other_in_the_same_memory(
    saver: BackgroundSaver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    gate = Gate(monkeypatch)
    timer = threading.Timer(0.2, gate.open.set)
    timer.start()
    pointers = set()
    for step in (1, 2, 3):
        saver.save(step_folder(tmp_path, step), layout="sharded", **parts(float(step)))
        assert gate.order[: step - 1] == [f"step-{before:08d}" for before in range(1, step)]
        pointers.add(saver.buffers._blocks[0].data_ptr())
        assert saver.buffers.num_bytes == 128  # 60 and 14 bytes, each aligned
    saver.wait()
    timer.join()
    assert gate.order == [f"step-{step:08d}" for step in (1, 2, 3)]
    assert len(pointers) == 1
    for step in (1, 2, 3):
        into = parts(0.0)["tensors"]
        store.load_tensors(step_folder(tmp_path, step), into)
        assert into["model/w"][0, 0] == step


@pytest.mark.parametrize("hear", ["wait", "save"])
def test_a_failure_is_told_once_and_the_next_save_works(
    saver: BackgroundSaver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hear: str
):
    with monkeypatch.context() as patch:
        gate = Gate(patch, CheckpointError("rank 0: shard: No space left on device"))
        gate.open.set()
        saver.save(step_folder(tmp_path, 1), layout="sharded", **parts(1.0))
        again = {"folder": step_folder(tmp_path, 2), "layout": "sharded", **parts(2.0)}
        with pytest.raises(CheckpointError, match="No space left"):
            saver.wait() if hear == "wait" else saver.save(**again)
    assert saver.wait()
    assert saver.pending is None
    saver.save(step_folder(tmp_path, 2), layout="sharded", **parts(2.0))
    saver.wait()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]


def test_a_failure_is_found_by_the_next_question(
    saver: BackgroundSaver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    gate = Gate(monkeypatch, CheckpointError("gone"))
    saver.save(step_folder(tmp_path, 1), layout="sharded", **parts(1.0))
    assert not saver.poll()
    gate.open.set()
    saver._pending[1].exception(100)  # type: ignore[index]
    with pytest.raises(CheckpointError, match="gone"):
        saver.poll()


def test_what_cannot_be_saved_is_refused_at_once(saver: BackgroundSaver, tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"callbacks\.Thing: cannot save"):
        saver.save(
            step_folder(tmp_path, 1), layout="full", **{**parts(1.0), "state": {"callbacks": {"Thing": object()}}}
        )
    assert saver.pending is None


def test_an_error_nobody_asked_for_is_logged_at_the_end(
    saver: BackgroundSaver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    Gate(monkeypatch, CheckpointError("gone")).open.set()
    saver.save(step_folder(tmp_path, 1), layout="sharded", **parts(1.0))
    saver.close()
    assert [record.message for record in caplog.records] == ["not saved: gone"]
    assert saver.buffers.num_bytes == 0
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("checkpoint-save")]


def test_other_shapes_replace_the_memory_and_never_add_to_it():
    buffers = HostBuffers(pinned=False)
    small = buffers.fit({"a": (torch.float32, (4, 4)), "empty": (torch.float32, (0, 3)), "number": (torch.int64, ())})
    assert {name: (t.shape, t.dtype) for name, t in small.items()} == {
        "a": ((4, 4), torch.float32), "empty": ((0, 3), torch.float32), "number": ((), torch.int64),
    }  # fmt: skip
    assert small["a"].untyped_storage().nbytes() == 64  # exactly its own, or DCP would copy it again
    assert buffers.num_bytes == 128
    buffers.fit({"a": (torch.float32, (5, 4))})
    assert buffers.num_bytes == 128
    buffers.clear()
    assert buffers.num_bytes == 0


def test_tensors_never_overlap(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_buffers, "_BLOCK_BYTES", 256)
    sizes = {f"t{index}": size for index, size in enumerate((1, 64, 65, 100, 200, 300, 0, 7, 256))}
    blocks = plan_blocks(sizes)
    assert sorted(name for offsets, _ in blocks for name in offsets) == sorted(n for n, size in sizes.items() if size)
    for offsets, size in blocks:
        ends = sorted((offset, offset + sizes[name]) for name, offset in offsets.items())
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))
        assert ends[-1][1] <= size
        assert all(start % 64 == 0 for start, _ in ends)
        assert len(offsets) == 1 or size <= 320
    assert sum(size for _, size in blocks) < sum(sizes.values()) + 64 * len(sizes)


def test_memory_is_known_from_shapes():
    tensors = {"model/w": TensorSpec("float32", (5, 16)), "model/b": TensorSpec("float32", (16,))}
    tensors["optim/w/step"] = TensorSpec("float32", ())
    assert planned_bytes(tensors, {"model/w"}, 2, pinned=False) == 3 * 64 + 64 + 64  # three of five rows
    assert planned_bytes(tensors, {"model/w"}, 2, pinned=True) == 512
    assert planned_bytes({}, (), 1, pinned=True) == 0
