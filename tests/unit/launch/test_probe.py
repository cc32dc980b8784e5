"""``--probe``: nodes that differ are named before anything is submitted."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from lit_fsdp.errors import ConfigError
from lit_fsdp.launch.slurm_probe import probe
from tests.unit.launch.fake_slurm import FakeSlurm
from tests.unit.launch.jobs import planned

VERSIONS = {"lit_fsdp": "1", "torch": "2.13.0", "lightning": "2.6.6", "transformers": "5.23.0"}


def answer(node: str, sees: bool = True, python: str = "3.11.2", **versions: Any) -> str:
    return json.dumps({"node": node, "python": python, "packages": {**VERSIONS, **versions}, "sees": sees})


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return FakeSlurm(tmp_path / "fake", monkeypatch)


def asked(slurm: FakeSlurm, *answers: str, **config: Any) -> str:
    slurm.answer("srun", "\n".join(["a greeting", *answers]))
    run_folder = slurm.folder.parent / "run"
    job, _ = planned({"partition": "gpu", "account": "lab", **config}, trainer={"default_root_dir": str(run_folder)})
    try:
        return probe(job)
    finally:
        assert list((run_folder / "slurm").iterdir()) == []  # its token is gone


def test_nodes_that_agree(slurm: FakeSlurm):
    said = asked(slurm, answer("n1"), answer("n2"))
    assert said.startswith("2 nodes agree: Python 3.11.2, lit_fsdp 1, torch 2.13.0")
    call = slurm.calls("srun")[0]
    for word in ("--nodes=2", "--ntasks-per-node=1", "--immediate=300", "--partition=gpu", "--account=lab"):
        assert word in call.split()
    assert sys.executable in call


def test_the_nodes_asked_are_those_the_job_may_get(slurm: FakeSlurm):
    asked(slurm, answer("n1"), answer("n2"), extra=["--reservation=course", "--mail-user=me@example.org"])
    words = slurm.calls("srun")[0].split()
    assert "--reservation=course" in words
    assert "--mail-user=me@example.org" not in words


@pytest.mark.parametrize(
    ("second", "field", "says"),
    [
        (answer("n2", torch="2.12.0"), "--probe", "torch: 2.13.0 on n1, 2.12.0 on n2"),
        (answer("n2", lightning=None), "--probe", "lightning: 2.6.6 on n1, none on n2"),
        (answer("n2", python="3.12.1"), "--probe", "python: 3.11.2 on n1, 3.12.1 on n2"),
        (answer("n2", sees=False), "trainer.default_root_dir", "which n2 does not see"),
        ("killed", "--probe", "answers of 1 nodes"),
    ],
)
def test_nodes_that_do_not(slurm: FakeSlurm, second: str, field: str, says: str):
    with pytest.raises(ConfigError) as caught:
        asked(slurm, answer("n1"), second)
    assert caught.value.field == field
    assert says in str(caught.value)


def test_a_step_that_cannot_run(slurm: FakeSlurm):
    slurm.answer("srun.err", "srun: error: Unable to allocate resources: Requested nodes are busy")
    with pytest.raises(ConfigError, match="Requested nodes are busy") as caught:
        asked(slurm)
    assert "without --probe" in caught.value.fix


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"container": "reg/i:1"}, ["--container-image=reg/i:1", "python3"]),
        ({"container": "/i.sif", "container_runtime": "apptainer"}, ["apptainer", "exec", "/i.sif", "python3"]),
    ],
)
def test_an_image_is_asked_by_its_own_python(slurm: FakeSlurm, config: dict[str, Any], words: list[str]):
    asked(slurm, answer("n1"), answer("n2"), **config)
    call = slurm.calls("srun")[0].split()
    assert [word for word in call if word in words] == words
    assert sys.executable not in call
