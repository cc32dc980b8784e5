"""Saving and loading on several gloo ranks: any sharding into any other, errors on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lit_fsdp.checkpoint import store
from lit_fsdp.checkpoint.manifest import read_manifest
from lit_fsdp.checkpoint.run_folder import step_folder
from lit_fsdp.checkpoint.safetensors_file import spec_of
from lit_fsdp.errors import CheckpointError
from tests.dist.forks import ForkServer
from tests.dist.store_worker import whole_tensors


class Scenarios:
    """Runs the scenarios of store_worker.py on forked ranks."""

    def __init__(self) -> None:
        self.forks = ForkServer("tests.dist.store_worker")

    def __call__(self, scenario: str, size: int, folder: Path) -> list:
        """The answer of each rank."""
        return self.forks.run("scenario", size, name=scenario, folder=str(folder))


@pytest.fixture(scope="module")
def run() -> Iterator[Scenarios]:
    """Runs a scenario on forked ranks."""
    scenarios = Scenarios()
    yield scenarios
    scenarios.forks.close()


@pytest.fixture(scope="module")
def saved(run: Scenarios, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with step 1 sharded and step 2 full, written by two ranks."""
    folder = tmp_path_factory.mktemp("run")
    assert run("save_all", 2, folder) == [2, 2]
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_two_ranks_wrote_what_the_manifest_says(saved):
    for step, layout in ((1, "sharded"), (2, "full")):
        manifest = read_manifest(step_folder(saved, step))
        store.verify_files(manifest.folder)
        assert (manifest.layout, manifest.world_size, manifest.global_step) == (layout, 2, step)
        assert manifest.tensors == {name: spec_of(tensor) for name, tensor in whole_tensors().items()}
        shards = {"tensors/rank-00000.safetensors", "tensors/rank-00001.safetensors"}
        assert manifest.files.keys() == {"state.json", *(shards if layout == "sharded" else ["tensors.safetensors"])}


@pytest.mark.parametrize("size", [2, 4])
def test_several_ranks_to_one_process(run, saved, tmp_path, size):
    folder = saved
    if size == 4:
        folder = tmp_path
        run("save_all", 4, folder)
    for step in (1, 2):
        into = {name: torch.full_like(tensor, 9) for name, tensor in whole_tensors().items()}
        store.load_tensors(step_folder(folder, step), into)
        whole = whole_tensors(step)
        assert [name for name in whole if not torch.equal(into[name], whole[name])] == []
        assert store.load_state(step_folder(folder, step)) == {"step": step}
        assert store.load_rank_state(step_folder(folder, step), size - 1) == {"rank": size - 1}


@pytest.mark.parametrize(("size", "loads"), [(2, 2), (4, 4)])
def test_two_ranks_to_other_meshes(run, saved, size, loads):
    assert run("load_all", size, saved) == [[len(whole_tensors())] * loads] * size


def test_a_failure_on_one_rank_is_an_error_on_all(run, saved):
    before = content(saved / "checkpoints")
    answers = run("fail_everywhere", 2, saved)
    for errors in answers:
        for text, (rank, file) in zip(
            errors,
            [
                (1, "tensors/rank-00001.safetensors: No space left on device"),
                (0, "state.json: No space left on device"),
                (0, "tensors.safetensors: No space left on device"),
                (0, "manifest.json: No space left on device"),
                (1, "thing: cannot save a builtins.object"),
            ],
            strict=False,
        ):
            assert f"\n  rank {rank}: " in text
            assert file in text
            assert f"rank {1 - rank}: " not in text
        assert "the ranks do not hold the same tensor names, shapes and dtypes" in errors[5]
    assert [len(errors) for errors in answers] == [6, 6]
    assert content(saved / "checkpoints") == before
    assert [path.name for path in sorted((saved / "checkpoints").iterdir())] == ["step-00000001", "step-00000002"]


def test_without_memory_on_one_rank_no_other_waits_for_it(run, tmp_path):
    """A rank that fails before a collective begins cannot take part in it."""
    for text, seconds in run("no_memory_to_gather", 2, tmp_path):
        assert "rank 1: RuntimeError" in text
        assert "can't allocate memory" in text
        assert seconds < 20
    assert not list((tmp_path / "checkpoints").glob("*"))


def test_a_checkpoint_without_tensors_is_one_too(tmp_path):
    store.save_checkpoint(step_folder(tmp_path, 1), {}, {"a": 1}, {"global_step": 1}, "full")
    store.load_tensors(step_folder(tmp_path, 1), {})
    with pytest.raises(CheckpointError, match="missing in the checkpoint: w"):
        store.load_tensors(step_folder(tmp_path, 1), {"w": torch.zeros(1)})
