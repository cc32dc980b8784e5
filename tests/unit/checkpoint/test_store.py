"""Saving and loading in one process: exact, refused when it does not fit, nothing half-written."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from lit_fsdp.checkpoint import store
from lit_fsdp.checkpoint.manifest import TensorSpec, read_manifest
from lit_fsdp.checkpoint.ranks import Ranks
from lit_fsdp.checkpoint.run_folder import step_folder
from lit_fsdp.checkpoint.storage import Planner, Snapshot
from lit_fsdp.checkpoint.verify import sound_checkpoint
from lit_fsdp.errors import CheckpointError
from tests.unit.checkpoint.conftest import TENSORS


def blanks() -> dict[str, torch.Tensor]:
    """Tensors of the right names, shapes and dtypes with other content."""
    return {name: torch.full_like(tensor, 1) for name, tensor in TENSORS.items()}


def test_the_files_are_plain_safetensors(save):
    """The whole one, and the sharded ones to torch alone."""
    whole, parts = load_file(save(layout="full") / "tensors.safetensors"), blanks()
    dcp.load(parts, storage_reader=dcp.HuggingFaceStorageReader(str(save(2) / "tensors")))
    for found in (whole, parts):
        assert found.keys() == TENSORS.keys()
        for name, tensor in TENSORS.items():
            assert (found[name].dtype, torch.equal(found[name], tensor)) == (tensor.dtype, True), name


def test_names_shapes_and_dtypes_must_fit(save):
    folder, into = save(), blanks()
    del into["model/model.empty"]
    into["model/extra"] = torch.zeros(1)
    into["model/model.weight"] = torch.zeros(3, 5)
    into["model/model.flags"] = torch.zeros(3)
    into["model/model.number"] = torch.zeros((), device="meta")
    with pytest.raises(CheckpointError) as error:
        store.load_tensors(folder, into)
    assert str(error.value).splitlines() == [
        f"{folder}: does not fit:",
        "  missing in the checkpoint: model/extra",
        "  only in the checkpoint: model/model.empty",
        "  model/model.flags: bool[3] in the checkpoint, float32[3] here",
        "  model/model.number: on the meta device here, so there is nothing to load into",
        "  model/model.weight: float32[5, 3] in the checkpoint, float32[3, 5] here",
    ]
    assert torch.equal(into["model/model.transposed"], torch.ones(4, 3, dtype=torch.bfloat16))


def test_what_does_not_fit_is_ten_names_and_of_optimizers_one_sentence(save):
    state, model = blanks(), blanks()
    state |= {f"optim/model.{n}/exp_avg": torch.zeros(1) for n in range(90)}
    del state["optim/model.weight/counts"]
    names = "optim/model.0/exp_avg, optim/model.1/exp_avg, ... and 88 more; only in the checkpoint: "
    for more, where in (({}, ""), ({"recipe.yaml": b""}, " (model.optim, model.freeze of its recipe.yaml)")):
        folder = save(files=more)
        with pytest.raises(CheckpointError) as error:
            store.load_tensors(folder, state)
        assert str(error.value).splitlines() == [
            f"{folder}: has other optimizer state (missing in the checkpoint: {names}optim/model.weight/counts)",
            f"  fix: resume with its optimizer and trained parameters{where}, or export it and start a new run",
        ]
    model |= {f"model/model.{n:02}": torch.zeros(1) for n in range(90)}
    with pytest.raises(CheckpointError) as error:
        store.load_tensors(folder, model)
    assert str(error.value).splitlines()[1:] == [
        *(f"  missing in the checkpoint: model/model.{n:02}" for n in range(10)),
        "  ... and 80 more",
        "  fix: if on_save_checkpoint drops them, set strict_loading = False in the module",
    ]


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
        ({"tensors": {"a": torch.empty(1, device="meta")}}, "meta"),
        ({"manifest": {}}, "None is not an integer >= 0"),
        ({"manifest": {"global_step": 1, "metrics": {"x": torch.ones(2)}}}, "numeric metrics"),
        ({"files": {"../evil": b""}}, "not a file name inside a checkpoint"),
        ({"files": {"manifest.json": b""}}, r"manifest\.json: File exists"),
        ({"files": {"hf/tokenizer.json": Path("gone.json")}}, r"gone\.json: No such file"),
        ({"layout": "full", "tensors": {"a": torch.ones(1, dtype=torch.complex128)}}, "safetensors has no dtype"),
    ):
        with pytest.raises(CheckpointError, match=match):
            save(**changes)
        parent = step_folder(tmp_path, 1).parent
        assert not parent.exists() or list(parent.iterdir()) == []


def test_no_torch_is_needed():
    code = (
        "import sys, lit_fsdp.checkpoint.verify, lit_fsdp.checkpoint.run_folder; "
        "print({'torch', 'numpy', 'safetensors'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_every_change_of_a_manifest_is_noticed(save):
    """Also one that leaves every value as it was: an exponent in capitals, the last digit of a long number, a space."""
    path = save(manifest={"global_step": 1, "metrics": {"lr": torch.tensor(6.5e-06)}}) / "manifest.json"
    text = path.read_text()
    document = json.loads(text)
    changed = [json.dumps({**document, key: "other"}) for key in document]
    changed += [json.dumps({k: v for k, v in document.items() if k != key}) for key in document]
    changed += ["", "[]", text[:-40], text + " ", text.replace('"global_step": 1', '"global_step": 2')]
    changed += [text.replace("e-06", "E-06"), text.replace("9e-06", "8e-06").replace("5e-06", "4e-06")]
    for broken in changed:
        assert broken != text
        path.write_text(broken)
        with pytest.raises(CheckpointError, match=r"manifest\.json: damaged or invalid"):
            read_manifest(path.parent)


def test_a_plan_compares_no_parts_with_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of a matrix wider than high DCP's own compares every part with every other one."""
    monkeypatch.setattr("torch.distributed.checkpoint.default_planner._check_box_overlap", pytest.fail)
    shape, planners = (64, 100), []
    for rank in range(64):
        chunks = {"model/wide": ChunkStorageMetadata(torch.Size((rank, 0)), torch.Size((1, 100)))}
        rest: dict[str, Any] = {
            "specs": {"model/wide": TensorSpec("float32", shape)},
            "tensors": {},
            "rank_state": None,
        }
        planners.append(Planner(Snapshot(folder=tmp_path, layout="sharded", chunks=chunks, **rest)))
    plans = [planner.create_local_plan() for planner in planners]
    assert planners[0].create_global_plan(plans)[0] == plans
    for wrong in (plans[1:], [*plans[:-1], plans[0]]):  # a part is missing, one is there twice
        with pytest.raises(CheckpointError, match="model/wide: the parts of the ranks do not cover the tensor"):
            planners[0].create_global_plan(wrong)


def test_a_load_looks_at_the_files_that_it_reads(save):
    folder, name = save(), "tensors/rank-00000.safetensors"
    with (folder / name).open("ab") as file:
        file.write(b"more")
    store.load_tensors(folder, {}, skip=TENSORS)
    with pytest.raises(CheckpointError, match=f"{name}: [0-9]+ bytes, [0-9]+ in the manifest"):
        store.load_tensors(folder, blanks())
