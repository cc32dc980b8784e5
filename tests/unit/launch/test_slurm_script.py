"""The sbatch file: as text, and as the shell and stand-ins for SLURM understand it."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lit_fsdp.launch.slurm_job import render, sbatch_value
from tests.unit.launch.conftest import FakeSlurm, planned

NASTY = 'it\'s "quoted" $(touch pwned) `touch pwned` $HOME \\ ; touch pwned & # %j'


def test_it_says_what_the_recipe_says_in_lines_that_bash_can_read():
    cases: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
        ({"gpus_per_node": 0}, {"accelerator": "cpu", "devices": 4}, ["4 processes on CPUs", "process(es) per node"]),
        (
            {"env": {"NCCL_DEBUG": "WARN"}, "setup": ["module load cuda"], "cpus_per_task": 8, "cpu_bind": "cores"},
            {},
            ["export NCCL_DEBUG=WARN\n", "\nmodule load cuda\n", "--cpu-bind=cores", "  --cpus-per-task=8"],
        ),
        ({"requeue": False}, {}, ["#SBATCH --no-requeue\n", "-gt 0 ]; then"]),
        ({"max_requeues": 3, "qos": "high", "time": "2:00"}, {}, ["--requeue\n", "--qos=high\n", "=2:00\n"]),
        ({"signal_lead_seconds": 30}, {}, ["USR1@30"]),
        ({"container": "reg/i:1", "env": {"A": "1"}}, {}, ["--container-image=reg/i:1", "--container-env=A"]),
        (
            {"container": "/i/a b.sif", "container_runtime": "apptainer", "env": {"A": "1"}},
            {},
            ["apptainer exec --nv --bind /shared/run", "'/i/a b.sif'", "APPTAINERENV_A=1"],
        ),
        ({"job_name": "interactive"}, {}, ["--job-name=lit_fsdp\n"]),  # Lightning would take it for a shell
        ({"master_addr": "{node}-ib0", "master_port": 29500}, {}, ['MASTER_ADDR="$node"-ib0\n', "PORT=29500\n"]),
        ({"job_name": NASTY}, {}, []),
    ]
    for slurm, trainer, has in cases:
        text = render(planned(slurm, trainer=trainer)[0])
        assert [part for part in has if part not in text] == []
        assert "{{" not in text
        assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).stderr == ""


def test_no_value_runs_anything_and_all_arrive(slurm: FakeSlurm, tmp_path: Path):
    """Quotes, $( ), backticks, semicolons, in every place of a value."""
    odd_path = NASTY.replace("\\", "").replace("$HOME", "$(HOME)")  # a recipe's paths have their variables put in
    folder = tmp_path / odd_path
    keys = {"command": ["prog", NASTY], "env": {"ODD": NASTY}, "job_name": NASTY, "cpu_bind": NASTY}
    job, _ = planned(keys, trainer={"default_root_dir": str(folder)}, ckpt_path=f"/x/{odd_path}")
    done = slurm.run(job, step='printf %s "$ODD" >"$FAKE/odd"')
    assert done.returncode == 0, done.stderr
    words = slurm.words("srun") or []
    recipe = f"{folder}/slurm/recipe.yaml"
    assert words[words.index("prog") + 1 :] == [NASTY, "fit", "--config", recipe, "--ckpt_path", f"/x/{odd_path}"]
    assert f"--output={str(folder).replace('%', '%%')}/slurm/%j.rank-%t.log" in words
    assert f"--cpu-bind={NASTY}" in words
    assert (slurm.folder / "odd").read_text() == NASTY
    for runtime in ("pyxis", "apptainer"):
        image = {"container": odd_path, "container_runtime": runtime, "container_mounts": [odd_path]}
        slurm.run(planned(image, trainer={"default_root_dir": str(tmp_path / "run")})[0])
        assert odd_path in " ".join(slurm.words("srun") or [])
    assert not list(tmp_path.rglob("pwned"))
    for value in ("plain", NASTY, "a b", 'x"y', "a\\b", "", "é"):
        assert shlex.split(sbatch_value(value)) == [value]  # sbatch knows quotes and expands nothing


def test_a_failing_line_of_setup_or_env_file_ends_the_job(slurm: FakeSlurm, tmp_path: Path):
    file = tmp_path / "load modules.sh"
    trainer = {"default_root_dir": str(tmp_path / "run")}
    cases: list[tuple[list[str], str, bool]] = [
        (["true", "no_such_program --now", "touch later"], "", False),
        (["[ -e /none ] || true", "if false; then true; fi", "set -eu"], "export LOADED=$NOT_SET_ANYWHERE'yes'", True),
        (["words=x run=/nowhere start=99 ckpt=x code=0"], "", True),  # our own names are set afterwards
    ]
    for setup, text, is_started in cases:
        file.write_text(f"{text}\n")
        done = slurm.run(planned({"setup": setup, "env_file": str(file)}, trainer=trainer)[0])
        assert (done.returncode == 0, slurm.words("srun") is not None) == (is_started, is_started), (setup, done)
        if "no_such_program --now" in setup:
            assert "this line failed and ends the job: no_such_program --now" in done.stdout
    assert not (slurm.folder / "later").exists()


def test_gloo_takes_the_network_that_nccl_is_told(slurm: FakeSlurm, tmp_path: Path):
    for given, own, found in (
        ("=lo,ib0", {}, "lo"),
        ("lo", {"GLOO_SOCKET_IFNAME": "eth0"}, "eth0"),
        ("^lo", {}, ""),
        ("no_such", {}, ""),
    ):
        job, _ = planned({"env": {"NCCL_SOCKET_IFNAME": given, **own}}, trainer={"default_root_dir": str(tmp_path)})
        assert f"<{found}>" in slurm.run(job, step='echo "<$GLOO_SOCKET_IFNAME>"').stdout


def leaves(**files: str) -> str:
    """A step whose ranks leave files for the script."""
    return "; ".join(f'echo {text} >"$LIT_FSDP_EXIT_DIR/{name.replace("_", ".")}"' for name, text in files.items())


def test_exit_codes_alone_decide_who_is_started_again(
    slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    cases: list[tuple[int, dict[str, str], int, bool]] = [
        (0, {"exit_0": "0", "saved": ""}, 0, False),
        (75, {}, 75, True),
        (143, {"exit_0": "75"}, 75, True),  # a rank that did not listen yet hides it
        (138, {}, 75, True),  # SIGUSR1 came before Python listened
        (137, {"exit_0": "1", "saved": ""}, 1, False),
        (137, {"exit_0": "76", "saved": ""}, 76, True),
        (137, {"exit_0": "76", "exit_1": "1", "saved": ""}, 1, False),  # the rank that was lost had failed
        (76, {"exit_0": "76"}, 76, False),  # it would end there again
        (137, {"saved": ""}, 137, True),
        (137, {}, 137, False),
        (134, {"saved": ""}, 134, True),  # SIGABRT: the watchdog of NCCL in ranks that lost another one
        (134, {"exit_1": "1", "saved": ""}, 1, False),  # which had failed
        (130, {"saved": ""}, 130, False),
    ]
    for number, (srun, left, code, again) in enumerate(cases):
        job, _ = planned({"max_requeues": 3}, trainer={"default_root_dir": str(tmp_path / f"run{number}")})
        done = slurm.run(job, srun, leaves(**left), start=2)
        assert (done.returncode, slurm.words("scontrol") == ["requeue", "4711"]) == (code, again), done
        assert ("no checkpoint was saved" in done.stdout) == (code in (76, 137) and "saved" not in left)
        assert ("SLURM did not requeue the job; resume manually" in done.stdout) is again
    for start, is_started, requeued in ((2, True, True), (3, True, False), (4, False, False)):
        done = slurm.run(job, 75, start=start)  # however often, whoever caused it
        assert (slurm.words("srun") is not None) is is_started
        assert (slurm.words("scontrol") == ["requeue", "4711"]) is requeued
        assert ("reached slurm.max_requeues (3)" in done.stdout) is not requeued
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "4708")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    slurm.run(job, 75)
    assert slurm.words("scontrol") == ["requeue", "4708_3"]  # 4711, the last task's own, is the whole array


def test_a_job_goes_on_from_what_it_has_saved_itself(slurm: FakeSlurm, tmp_path: Path):
    """The checkpoint of another job in the same folder is nothing to go on from, or to be put back for."""
    run = tmp_path / "run [1]*"
    job, _ = planned(ckpt_path="best", trainer={"default_root_dir": str(run)})
    of_another = f"mkdir -p {shlex.quote(f'{run}/checkpoints/step-00000010')}"
    found = []
    for start, step in enumerate((of_another, leaves(saved=""), "")):
        done = slurm.run(job, 137, step, start)
        words = slurm.words("srun") or []
        found.append((words[words.index("--ckpt_path") + 1], "no checkpoint was saved" in done.stdout))
    assert found == [("best", True), ("best", False), ("last", True)]
