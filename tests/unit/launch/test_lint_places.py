"""Paths that other nodes do not see, files that are missing, run folders that are in use, disks without room."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lit_fsdp.launch import slurm_lint_places
from lit_fsdp.launch.slurm_facts import GIB
from lit_fsdp.launch.slurm_lint import lint
from tests.unit.launch.jobs import planned
from tests.unit.launch.test_lint import COMMAND, FINE, _a_shared_place_with_room, found  # noqa: F401 (a fixture)

ONE = {"num_nodes": 1}


def data(**more: Any) -> dict[str, Any]:
    return {"train": "generated:640", "global_batch_size": 64, **more}


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """Rows, a model folder, an environment file and an image, all below a place that is a node's own."""
    for name in ("rows.jsonl", "env.sh", "image.sif"):
        (tmp_path / name).touch()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path


@pytest.fixture(autouse=True)
def _tests_run_below_tmp(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_lint_places, "_LOCAL_PLACES", (str(here),))


@pytest.mark.parametrize(
    ("field", "sections"),
    [
        ("data.train", lambda p: {"data": data(train=f"{p}/rows.jsonl")}),
        ("data.val", lambda p: {"data": data(val=f"{p}/rows.jsonl")}),
        ("data.train[1]", lambda p: {"data": data(train=["generated:640", f"{p}/rows.jsonl"])}),
        ("data.train", lambda p: {"data": data(train=f"{p}/*.jsonl")}),
        ("data.train", lambda p: {"data": data(train=f"{p}:train")}),
        ("data.cache_dir", lambda p: {"data": data(cache_dir=f"{p}/cache")}),
        ("model.name", lambda p: {"model": {"name": f"{p}/model"}}),
        ("model.tokenizer", lambda p: {"model": {"name": "org/model", "tokenizer": f"{p}/model"}}),
        ("trainer.default_root_dir", lambda p: {"trainer": {"default_root_dir": f"{p}/run"}}),
        ("slurm.env_file", lambda p: {"slurm": {**COMMAND, "env_file": f"{p}/env.sh"}}),
        ("slurm.container", lambda p: {"slurm": {"container": f"{p}/image.sif"}}),
    ],
)
def test_a_path_of_one_node_is_refused_for_several(field: str, sections: Any, here: Path):
    given = sections(here)
    errors = found(**given)
    assert list(errors) == [field]
    assert "is a node's own" in errors[field].given
    alone = {**given, "trainer": {**given.get("trainer", {}), **ONE}}
    assert found(**alone) == {}


def test_a_link_to_a_place_of_one_node_is_followed(here: Path, tmp_path_factory: pytest.TempPathFactory):
    shared = tmp_path_factory.mktemp("shared")
    (shared / "run").symlink_to(here)
    assert list(found(trainer={"default_root_dir": str(shared / "run" / "a")})) == ["trainer.default_root_dir"]
    assert found(trainer={"default_root_dir": str(shared / "other")}) == {}


def test_python_of_one_node_is_refused_for_several(here: Path):
    python = here / "python"
    python.touch(mode=0o755)
    assert list(found({"command": [str(python), "-m", "lit_fsdp"]})) == ["slurm.command"]
    assert found({"command": [str(python), "-m", "lit_fsdp"]}, trainer=ONE) == {}


def test_a_single_node_gets_a_note_and_a_disk_of_this_machine_too(monkeypatch: pytest.MonkeyPatch, here: Path):
    job, run = planned(COMMAND, trainer={**ONE, "default_root_dir": str(here / "run")})
    assert "only if it runs on this very machine" in " ".join(lint(job, run, FINE)[1])
    monkeypatch.setattr(slurm_lint_places, "file_system", lambda path: "ext4")
    job, run = planned(COMMAND)
    errors, notes = lint(job, run, FINE)
    assert (errors, "--probe tells" in " ".join(notes)) == ([], True)


@pytest.mark.parametrize(
    ("field", "sections"),
    [
        ("data.train", {"data": data(train="no/such/rows.jsonl")}),
        ("data.val", {"data": data(val="/no/such/folder")}),
        ("model.name", {"model": {"name": "./no_such_model"}}),
        ("slurm.env_file", {"slurm": {**COMMAND, "env_file": "/no/such.sh"}}),
        ("slurm.container", {"slurm": {"container": "/no/such.sqsh"}}),
        ("slurm.command", {"slurm": {"command": ["/no/such/python"]}}),
    ],
)
def test_missing_files(field: str, sections: dict[str, Any]):
    assert list(found(**sections)) == [field]


def test_an_image_may_bring_what_is_not_here_and_lint_says_so(here: Path):
    slurm = {"container": "registry/image:1", "container_mounts": [f"{here}:/data"]}
    inside, outside = data(train="/data/rows.jsonl"), data(train="/elsewhere/rows.jsonl")
    for section, said in ((inside, False), (outside, True)):
        job, run = planned(slurm, data=section, model={"name": "org/model"})
        errors, notes = lint(job, run, FINE)
        assert errors == []
        assert ("data.train /elsewhere/rows.jsonl" in " ".join(notes)) is said


def test_a_run_folder_that_is_in_use_is_resumed_or_refused(here: Path):
    used = dataclasses.replace(FINE, num_kept=2)
    assert list(found(facts=used)) == ["trainer.default_root_dir"]
    assert "--ckpt_path last" in found(facts=used)["trainer.default_root_dir"].fix
    assert found(facts=used, ckpt_path="last") == {}
    assert list(found(ckpt_path="last")) == ["ckpt_path"]
    assert list(found(ckpt_path=str(here / "nothing"))) == ["ckpt_path"]
    assert found(ckpt_path=str(here / "model")) == {}


def test_devices_by_number_are_those_of_the_job():
    errors = found(trainer={"devices": [2, 3], "num_nodes": 1})
    assert list(errors) == ["trainer.devices"]
    assert errors["trainer.devices"].fix == "set trainer.devices: 2"
    assert found(trainer={"devices": [1, 0], "num_nodes": 1}) == {}


def test_room_for_all_that_the_run_keeps_less_what_lies_there():
    facts = dataclasses.replace(FINE, checkpoint_bytes=10 * GIB, num_checkpoints=11)
    assert "110.0 GiB free" in found(facts=facts)["checkpoint"].allowed  # 100 are
    there = dataclasses.replace(facts, num_kept=1, kept_bytes=10 * GIB)
    assert found(facts=there, ckpt_path="last") == {}


def test_room_for_files(monkeypatch: pytest.MonkeyPatch):
    """4 checkpoints of 16 ranks: 4 x (3 x 16 + 16) files."""
    for free, total, is_fine in ((255, 1000, False), (256, 1000, True), (0, 0, True)):
        system = SimpleNamespace(f_files=total, f_favail=free)
        with monkeypatch.context() as patch:
            patch.setattr(os, "statvfs", lambda path, system=system: system)
            assert list(found()) == ([] if is_fine else ["checkpoint"])


def test_a_cap_below_one_checkpoint():
    facts = dataclasses.replace(FINE, checkpoint_bytes=2 * GIB)
    assert list(found(facts=facts, checkpoint={"max_total_gib": 1.5})) == ["checkpoint.max_total_gib"]
    assert found(facts=facts, checkpoint={"max_total_gib": 8}) == {}


def test_a_growing_number_of_checkpoints_is_said():
    job, run = planned(COMMAND, checkpoint={"keep_last": -1})
    assert "more and more" in " ".join(lint(job, run, FINE)[1])
