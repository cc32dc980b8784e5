"""``--probe``: nodes that differ are named before anything is submitted."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from lit_fsdp.errors import ConfigError
from lit_fsdp.launch.slurm_probe import probe, which_nodes
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
    asked(slurm, answer("n1"), answer("n2"), command=["/own/python3.11", "start.py"])
    assert any(" /own/python3.11 -c " in call for call in slurm.calls("srun"))


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


def test_all_options_that_choose_nodes_reach_the_step():
    extra = ["-w n1", "--nodelist n2", "--exclude=n3", "-x n4", "-xn5", "-F hosts", "--exclusive --nodel=n[6,7]"]
    assert which_nodes([*extra, "--mail-type=END", "--hold", "--comment=-w n8", "-L matlab"]) == [
        *("--nodelist=n1", "--nodelist=n2", "--exclude=n3", "--exclude=n4", "--exclude=n5"),
        *(f"--nodelist={Path('hosts').absolute()}", "--exclusive", "--nodelist=n[6,7]"),
    ]


@pytest.mark.parametrize(
    ("text", "python"),
    [
        ("#!/venv/bin/python3\nimport x\n", ["/venv/bin/python3"]),
        ("#!/usr/bin/env python3.11\n", ["/usr/bin/env", "python3.11"]),
        ("#!/bin/sh\n'''exec' \"/a/long path/bin/python\" \"$0\" \"$@\"\n' '''\n", ["/a/long path/bin/python"]),
        ("#!/bin/bash\nexec python -m lit_fsdp\n", None),
        ("", None),
    ],
)
def test_the_python_of_a_script_is_compared(slurm: FakeSlurm, text: str, python: list[str] | None):
    script = slurm.folder / "lit-fsdp"
    script.write_text(text)
    script.chmod(0o755)
    said = asked(slurm, answer("n1"), answer("n2"), command=[str(script)])
    assert f" {' '.join(python or [sys.executable])} -c " in slurm.calls("srun")[0]
    assert ("was compared" in said) is (python is None)


def test_the_step_gets_what_the_job_would_get(slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    env_file = tmp_path / "env file.sh"
    env_file.write_text("echo '{'\nA=1\nexport A\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/bash\necho "$A $B $C" >"{tmp_path}/seen"\n')
    python.chmod(0o755)
    (slurm.folder / "bin" / "srun").write_text(
        '#!/bin/bash\nwhile [ "${1#-}" != "$1" ]; do shift; done; "$@"; cat "$FAKE/srun"\n'
    )
    config = {"env_file": str(env_file), "env": {"B": "it's 2"}, "setup": ["echo {", "export C=3"]}
    asked(slurm, answer("n1"), answer("n2"), command=[str(python), "-m", "lit_fsdp"], **config)
    assert (tmp_path / "seen").read_text() == "1 it's 2 3\n"
