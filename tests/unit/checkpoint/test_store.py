"""Saving and loading in one process: exact, refused when it does not fit, nothing half-written."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import checkpoint as dcp

from lit_fsdp.checkpoint import store
from lit_fsdp.checkpoint.ranks import Ranks
from lit_fsdp.checkpoint.run_folder import step_folder
from lit_fsdp.checkpoint.verify import sound_checkpoint
from lit_fsdp.errors import CheckpointError
from tests.unit.checkpoint.conftest import STATE, TENSORS


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(a, b)


def test_everything_comes_back(save):
    for layout in ("sharded", "full"):
        folder = save(layout=layout)
        into = {name: torch.full_like(tensor, 1) for name, tensor in TENSORS.items()}
        before = {name: tensor.data_ptr() for name, tensor in into.items()}
        store.load_tensors(folder, into)
        assert all(same(into[name], TENSORS[name]) for name in TENSORS)
        assert {name: tensor.data_ptr() for name, tensor in into.items()} == before
        state = store.load_state(folder)
        assert same(state.pop("best"), STATE["best"])
        assert state == {key: value for key, value in STATE.items() if key != "best"}
        assert store.load_rank_state(folder, 0)["rng"].tolist() == [0, 1, 2, 3]
        assert store.load_rank_state(folder, 1) is None
        store.verify_files(folder)
        some = {"model/model.weight": torch.nn.Parameter(torch.zeros(5, 3))}
        store.load_tensors(folder, some, skip=set(TENSORS) - set(some))
        assert same(some["model/model.weight"].detach(), TENSORS["model/model.weight"])


def test_the_files_are_plain_safetensors(save, blanks):
    """The whole one, and the sharded ones to torch alone."""
    tensors = load_file(save(layout="full") / "tensors.safetensors")
    assert tensors.keys() == TENSORS.keys()
    assert all(same(tensors[name], TENSORS[name]) for name in TENSORS)
    dcp.load(blanks, storage_reader=dcp.HuggingFaceStorageReader(str(save(2) / "tensors")))
    assert all(same(blanks[name], TENSORS[name]) for name in TENSORS)


def test_names_shapes_and_dtypes_must_fit(save, blanks):
    folder = save()
    del blanks["model/model.empty"]
    blanks["model/extra"] = torch.zeros(1)
    blanks["model/model.weight"] = torch.zeros(3, 5)
    blanks["model/model.flags"] = torch.zeros(3)
    blanks["model/model.number"] = torch.zeros((), device="meta")
    with pytest.raises(CheckpointError) as error:
        store.load_tensors(folder, blanks)
    assert str(error.value).splitlines() == [
        f"{folder}: does not fit:",
        "  missing in the checkpoint: model/extra",
        "  only in the checkpoint: model/model.empty",
        "  model/model.flags: bool[3] in the checkpoint, float32[3] here",
        "  model/model.number: on the meta device here, so there is nothing to load into",
        "  model/model.weight: float32[5, 3] in the checkpoint, float32[3, 5] here",
    ]
    assert torch.equal(blanks["model/model.transposed"], torch.ones(4, 3, dtype=torch.bfloat16))


class BuiltLate(torch.nn.Module):
    """Two names for one weight, made on meta, and only when a Trainer or a load asks for it."""

    def configure_model(self) -> None:
        with torch.device("meta"):
            self.first = torch.nn.Linear(3, 5, bias=False)
        self.again = self.first


def test_weights_of_a_module_that_is_built_late(save):
    weight = torch.rand(5, 3)
    folder = save(
        tensors={"model/first.weight": weight}, manifest={"global_step": 1, "tied": {"again.weight": "first.weight"}}
    )
    module = store.load_weights(BuiltLate(), folder)
    assert same(module.first.weight.detach(), weight)
    assert module.again is module.first
    with next((folder / "tensors").iterdir()).open("r+b") as file:
        file.write(b"x")
    with pytest.raises(CheckpointError, match="xxh3 differs"):
        store.load_weights(BuiltLate(), folder)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_kill_while_one_is_replaced_leaves_the_old_or_the_new(save):
    """Killed before each renaming and removal in turn; every change of a first save is in tests/faults."""
    folder = save(layout="full")
    found = set()
    for moment in range(1000):
        child = os.fork()
        if child == 0:
            changes = itertools.count()

            def kill(name: str, args: object, changes: Any = changes, moment: int = moment) -> None:
                if name in ("os.rename", "os.remove", "os.rmdir") and next(changes) == moment:
                    os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(kill)
            save(layout="full", state=moment)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        assert sound_checkpoint(folder, [], Ranks())[0] == folder
        found.add(store.load_state(folder) == moment)
        if status == 0:
            break
    assert (moment > 2, found) == (True, {True, False})
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_what_cannot_be_saved_leaves_nothing(save, tmp_path):
    for changes, match in (
        ({"state": {"callbacks": {"Odd": {"thing": object()}}}}, r"callbacks\.Odd\.thing: cannot save a builtins\."),
        ({"rank_state": {"rng": object()}}, "rng: cannot save"),
        ({"tensors": {"a": 3}}, "a: int, but only tensors"),
        ({"tensors": {"a": torch.empty(1, device="meta")}}, "a: on the meta device"),
        ({"manifest": {}}, "None is not a whole number"),
        ({"files": {"../evil": b""}}, "not a file name inside a checkpoint"),
        ({"files": {"manifest.json": b""}}, "a name of the checkpoint's own"),
        ({"files": {"tensors/x": b""}}, "a name of the checkpoint's own"),
        ({"files": {"hf/tokenizer.json": "gone.json"}}, r"gone\.json: No such file"),
        ({"layout": "full", "tensors": {"a": torch.ones(1, dtype=torch.complex128)}}, "safetensors has no dtype"),
    ):
        with pytest.raises(CheckpointError, match=match):
            save(**changes)
        parent = step_folder(tmp_path, 1).parent
        assert not parent.exists() or list(parent.iterdir()) == []
