"""Saving and loading on several gloo ranks: any sharding into any other, errors on all ranks."""

from __future__ import annotations

from pathlib import Path

import torch

from lit_fsdp.checkpoint import store
from lit_fsdp.checkpoint.manifest import read_manifest
from lit_fsdp.checkpoint.run_folder import step_folder
from lit_fsdp.checkpoint.safetensors_file import spec_of
from tests.dist.forks import on_ranks
from tests.dist.store_jobs import whole_tensors


def test_any_mesh_into_any_other(tmp_path: Path) -> None:
    """Two ranks and four, each into one process, two ranks and four; the manifest says what was written."""
    for size in (2, 4):
        folder = tmp_path / str(size)
        assert on_ranks("save_all", size, folder=folder) == [["no error"] * 2] * size
        for step, layout in ((1, "sharded"), (2, "full")):
            manifest, truth = read_manifest(step_folder(folder, step)), whole_tensors(step)
            store.verify_files(manifest.folder)
            assert (manifest.layout, manifest.world_size, manifest.global_step) == (layout, size, step)
            assert manifest.tensors == {name: spec_of(tensor) for name, tensor in truth.items()}
            into = {name: torch.full_like(tensor, 9) for name, tensor in truth.items()}
            store.load_tensors(manifest.folder, into)
            assert [name for name in truth if not torch.equal(into[name], truth[name])] == []
            assert store.load_state(manifest.folder) == {"step": step}
            assert store.load_state(manifest.folder, size - 1) == {"rank": size - 1}
        assert on_ranks("load_all", 2, folder=folder) == [[[]] * 2] * 2
        assert on_ranks("load_all", 4, folder=folder) == [[[]] * 4] * 4


def test_what_one_rank_cannot_save_is_an_error_on_all(tmp_path: Path) -> None:
    for unknown, different in on_ranks("refused_saves", 2, folder=tmp_path):
        assert "\n  rank 1: thing: cannot save a builtins.object" in unknown
        assert "tensor names, shapes or dtypes to save differ between ranks" in different
    assert not list((tmp_path / "checkpoints").glob("*"))


def test_without_memory_on_one_rank_no_other_waits_for_it(tmp_path: Path) -> None:
    """A rank that fails before a collective begins cannot take part in it."""
    for text, seconds in on_ranks("no_memory_to_gather", 2, folder=tmp_path):
        assert "rank 1: RuntimeError" in text
        assert "can't allocate memory" in text
        assert seconds < 20
    assert not list((tmp_path / "checkpoints").glob("*"))


def test_what_rank_0_reads_for_all_is_sent_once(tmp_path: Path) -> None:
    """Of gathered objects every rank makes room for as many of the longest as there are ranks."""
    assert on_ranks("first_of_all", 2, folder=tmp_path) == [[100_000, 0]] * 2
