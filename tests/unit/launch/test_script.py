"""The sbatch file: as text, and as the shell and a stand-in for SLURM understand it."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lit_fsdp.config.parser import check_recipe
from lit_fsdp.errors import ConfigError
from lit_fsdp.launch.slurm_job import plan_job
from lit_fsdp.launch.slurm_script import render, sbatch_value
from tests.ports import own_port
from tests.unit.launch.fake_step import SLURM, Cluster, text_of
from tests.unit.launch.jobs import planned, recipe

GOLDEN = Path(__file__).parents[2] / "golden" / "sbatch"
NASTY = 'it\'s "quoted" $(touch pwned) `touch pwned` $HOME \\ ; touch pwned & # %j'
CASES: dict[str, dict[str, Any]] = {
    "two_nodes": {"slurm": {**SLURM, "time": "12:00:00", "partition": "gpu", "account": "lab"}},
    "cpu": {"slurm": SLURM, "trainer": {"accelerator": "cpu", "devices": 4}, "ckpt_path": "best"},
    "array_of_seeds": {"slurm": {**SLURM, "seeds": [1, 2, 30], "requeue": False}},
    "pyxis": {
        "slurm": {
            "container": "registry/image:1",
            "container_mounts": ["/data", "/a:/b"],
            "cpus_per_task": 8,
            "env": {"NCCL_DEBUG": "WARN"},
        }
    },
    "apptainer": {
        "slurm": {"container": "/images/a b.sif", "container_runtime": "apptainer", "env": {"NCCL_DEBUG": "WARN"}}
    },
    "meeting_point": {"slurm": {**SLURM, "master_addr": "{node}-ib0", "master_port": 29500, "max_requeues": 0}},
    "everything": {
        "slurm": {
            **SLURM,
            "time": "1-00:00:00",
            "qos": "high",
            "constraint": "a100&nvlink",
            "mem": "0",
            "job_name": NASTY,
            "env": {"NCCL_DEBUG": "WARN", "ODD": NASTY},
            "env_file": "/shared/modules of mine.sh",
            "setup": ["module load cuda", "ulimit -n 65536"],
            "dependency": "afterok:12",
            "extra": ["--exclusive", "--mail-user=me@example.org", f"--comment={NASTY}"],
            "cpu_bind": "none",
            "signal_lead_seconds": 300,
            "max_requeues": 3,
        }
    },
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_file_that_was_read_and_approved(name: str, monkeypatch: pytest.MonkeyPatch):
    """After a wanted change: write the new text with LIT_FSDP_WRITE_GOLDEN=1 and read the difference."""
    monkeypatch.setattr("lit_fsdp.launch.slurm_script.__version__", "1.2.3")
    text = render(planned(**CASES[name])[0])
    path = GOLDEN / f"{name}.sbatch"
    if os.environ.get("LIT_FSDP_WRITE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("name", CASES)
def test_it_is_a_shell_script(name: str):
    done = subprocess.run(["bash", "-n"], input=render(planned(**CASES[name])[0]), text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("runtime", ["pyxis", "apptainer"])
def test_a_home_and_files_beside_us_are_whole_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: str):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "y.sqsh").touch()
    (tmp_path / "ubuntu").touch()
    images = {"~/x.sif": f"{tmp_path}/x.sif", "y.sqsh": f"{tmp_path}/y.sqsh", "./z": f"{tmp_path}/z"}
    for image, written in {**images, "reg/i:1": "reg/i:1", "ubuntu": "ubuntu", "docker://a/b": "docker://a/b"}.items():
        slurm = {"container": image, "container_runtime": runtime, "container_mounts": ["~/data:/data", "rows"]}
        text = render(planned(slurm, ckpt_path="~/ck/step-00000001")[0])
        assert f"{written} " in text.replace("container-image=", "") + " "
        assert (f"{tmp_path}/data:/data" in text, f"{tmp_path}/rows" in text) == (True, True)
        assert f"words+=(--ckpt_path {tmp_path}/ck/step-00000001)" in text
        assert "~" not in text


@pytest.mark.parametrize("name", ["a:b", "a,b"])
def test_a_run_folder_that_would_part_a_mount(name: str):
    folder = {"default_root_dir": f"/shared/{name}"}
    with pytest.raises(ConfigError, match=r"with slurm\.container"):
        planned({"container": "reg/i:1"}, trainer=folder)
    planned(trainer=folder)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def test_no_value_runs_anything(cluster: Cluster, tmp_path: Path):
    """Quotes, $( ), backticks, semicolons in the run folder, the environment, a container and the command."""
    folder = tmp_path / NASTY.replace("\\", "")
    (folder / "slurm").mkdir(parents=True)
    slurm = {"env": {"ODD": NASTY}, "command": ["prog", NASTY], "cpu_bind": "mask_cpu:0xf*2", "job_name": NASTY}
    done = cluster.run(text_of(folder, slurm))
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.rglob("pwned"))
    words = cluster.words("srun-srun")
    assert words is not None
    assert words[words.index("prog") + 1 :] == [NASTY, "fit", "--config", f"{folder}/slurm/recipe.yaml"]
    assert "--cpu-bind=mask_cpu:0xf*2" in words
    assert f"--output={str(folder).replace('%', '%%')}/slurm/%j.rank-%t.log" in words


@pytest.mark.parametrize("runtime", ["pyxis", "apptainer"])
def test_no_value_of_a_container_runs_anything(cluster: Cluster, tmp_path: Path, runtime: str):
    slurm = {"container": NASTY, "container_runtime": runtime, "container_mounts": [NASTY], "command": ["prog"]}
    assert cluster.run(text_of(tmp_path, slurm)).returncode == 0
    assert not list(tmp_path.rglob("pwned"))
    words = cluster.words("srun-srun")
    assert words is not None
    assert NASTY in " ".join(words)


@pytest.mark.parametrize("value", ["plain", NASTY, "a b", 'x"y', "a\\b", "", "é"])
def test_a_value_of_an_sbatch_line_is_one_word(value: str):
    """sbatch knows the quotes of the shell but expands nothing; a shell without expansions reads the same."""
    assert shlex.split(sbatch_value(value)) == [value]


def test_a_run_folder_is_no_pattern(cluster: Cluster, tmp_path: Path):
    """``run[1]`` would match ``run1``."""
    for name in ("run[1]", "run*"):
        (tmp_path / name / "checkpoints" / "step-00000010").mkdir(parents=True)
        cluster.run(text_of(tmp_path / name), SLURM_RESTART_COUNT="1")
        called = cluster.words("srun-srun")
        assert called is not None
        assert called[-2:] == ["--ckpt_path", "last"]


def test_numbers_of_the_environment_are_text_in_the_script_and_in_the_recipe():
    """Lightning's parser, which reads the recipe in the job, takes no number there."""
    values = recipe({"env": {"NCCL_IB_TIMEOUT": 22, "B": -1}})
    script = render(plan_job(values, check_recipe(values, "fit").slurm))
    assert "\nexport NCCL_IB_TIMEOUT=22\nexport B=-1\n" in script
    assert values["slurm"]["env"] == {"NCCL_IB_TIMEOUT": "22", "B": "-1"}


def test_a_missing_env_file_ends_the_job(cluster: Cluster, tmp_path: Path):
    assert cluster.run(text_of(tmp_path, {"env_file": "/no/such file"})).returncode == 1
    assert cluster.words("srun-srun") is None


def test_a_port_in_use_is_passed_over(cluster: Cluster, tmp_path: Path):
    with socket.create_server(("127.0.0.1", own_port())) as taken:
        port = taken.getsockname()[1]
        said = cluster.run(text_of(tmp_path).replace("$((20000 + SLURM_JOB_ID % 10000))", str(port))).stdout
    found = re.search(r"meeting at 127\.0\.0\.1:(\d+)", said)
    assert found, said
    assert 1 <= int(found[1]) - port <= 3  # the next one may be taken too


@pytest.mark.parametrize(
    ("given", "address"), [("{node}-ib0", "127.0.0.1-ib0"), ("ib.{node}", "ib.127.0.0.1"), ("10.0.0.1", "10.0.0.1")]
)
def test_the_ranks_meet_where_they_are_told(cluster: Cluster, tmp_path: Path, given: str, address: str):
    text = text_of(tmp_path, {"master_addr": given, "master_port": 29500})
    (cluster.folder / "bin" / "srun").write_text('#!/bin/bash\necho "at $MASTER_ADDR:$MASTER_PORT"\n')
    assert f"at {address}:29500\n" in cluster.run(text.replace("/dev/tcp/", "/dev/none/")).stdout


def test_a_port_that_was_asked_for_and_is_in_use_ends_the_job(cluster: Cluster, tmp_path: Path):
    with socket.create_server(("127.0.0.1", own_port())) as taken:
        port = taken.getsockname()[1]
        done = cluster.run(text_of(tmp_path, {"master_port": port}), step_code=75)
    assert done.returncode == 1
    assert f"somebody listens on 127.0.0.1:{port} already: set another slurm.master_port" in done.stdout
    assert done.stdout.endswith(" ended with exit code 1\n")
    assert (cluster.words("srun-srun"), cluster.words("scontrol-requeue")) == (None, None)


def test_what_users_add_runs_without_our_options_and_cannot_change_our_names(cluster: Cluster, tmp_path: Path):
    """Files that load modules read variables that are not set; conda's do; others end with `set -e`."""
    file = tmp_path / "load modules.sh"
    file.write_text("export LOADED=$NOT_SET_ANYWHERE'yes'\n")
    setup = ["set -e", "words=x run_folder=x logs=/nowhere restarts=9 job=x code=0 seeds=x", "cap=x"]
    done = cluster.run(text_of(tmp_path, {"env_file": str(file), "setup": setup}), step_code=75)
    assert done.returncode == 75, done.stderr
    words = cluster.words("srun-srun")
    assert words is not None
    assert words[-3:] == ["fit", "--config", f"{tmp_path}/slurm/recipe.yaml"]
    assert cluster.words("scontrol-requeue") == ["4711"]


def test_an_env_file_is_found_where_the_job_was_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Quoted, a tilde stays one; and bash looks for a bare name in PATH."""
    monkeypatch.setenv("HOME", "/home/somebody/of mine")
    monkeypatch.chdir(tmp_path)
    assert "\n. '/home/somebody/of mine/modules.sh' || { echo " in text_of(tmp_path, {"env_file": "~/modules.sh"})
    assert f"\n. {tmp_path}/modules.sh || {{ echo " in text_of(tmp_path, {"env_file": "modules.sh"})


@pytest.mark.parametrize("name", ["two\nlines", "tab\there", "back\\slash", "bell\x7f"])
def test_a_run_folder_that_slurm_would_not_take_as_it_is_is_refused(tmp_path: Path, name: str):
    with pytest.raises(ConfigError) as caught:
        text_of(tmp_path / name)
    assert caught.value.field == "trainer.default_root_dir"


def test_a_run_folder_without_a_name_gives_the_job_one():
    assert "#SBATCH --job-name=lit_fsdp\n" in text_of(Path("/"))


@pytest.mark.parametrize("given", [None, "mine"])
def test_one_run_of_wandb_per_job_and_per_seed(cluster: Cluster, tmp_path: Path, given: str | None):
    """Numbers of jobs begin with 1 on every cluster."""
    env = {"SLURM_CLUSTER_NAME": "big", **({"WANDB_RUN_ID": given} if given else {})}
    found = set()
    for seeds, more in ((None, {}), ([5, 7], {"SLURM_ARRAY_TASK_ID": "0"}), ([5, 7], {"SLURM_ARRAY_TASK_ID": "1"})):
        text = text_of(tmp_path, {"seeds": seeds}).replace("\nsrun ", '\necho "id $WANDB_RUN_ID"\nsrun ')
        said = [cluster.run(text, SLURM_ARRAY_JOB_ID="40", SLURM_RESTART_COUNT=n, **env, **more).stdout for n in "01"]
        ids = {line.removeprefix("id ") for out in said for line in out.splitlines() if line.startswith("id ")}
        assert len(ids) == 1, said
        found |= ids
    of_array = {"slurm-big-40_0", "slurm-big-40_1"}
    assert found == (
        {"slurm-big-4711"} | of_array if given is None else {"mine", *(f"mine-{name}" for name in of_array)}
    )
