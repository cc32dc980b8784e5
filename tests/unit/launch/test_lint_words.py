"""However it is written: options, launchers and variables that would undo what the script sets up."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.unit.launch.test_lint import COMMAND, FINE, _a_shared_place_with_room, found  # noqa: F401 (a fixture)


@pytest.mark.parametrize(
    ("option", "names"),
    [
        ("--ntasks 8", "--ntasks"),
        ("-n8", "gpus_per_node"),
        ("--exclusive --ntasks=8", "tasks per node"),
        ("--exclusive -n 8", "tasks per node"),
        ("--ntask=8", "tasks per node"),  # sbatch knows an option by its beginning
        ("--gpus-per-t 1", "NCCL no peers"),
        ("--gpus-per-task=1", "NCCL no peers"),
        ("--tres-per-task=gres/gpu:1", "NCCL no peers"),
        ("--gpu-bind=single:1", "NCCL no peers"),
        ("--ntasks-per-socket=4", "tasks per node"),
        ("-m cyclic", "ranks fill one node"),
        ("--distribution=cyclic", "ranks fill one node"),
        ("-p", "slurm.partition"),
        ("--partition=other", "slurm.partition"),
        ("-A lab", "slurm.account"),
        ("--mem=4G", "slurm.mem"),
        ("--cpus-per-task=2", "slurm.cpus_per_task"),
        ("--wait", "submit --wait"),
        ("-D /elsewhere", "starts where it is submitted"),
        ("--error=x", "run folder"),
    ],
)
def test_an_option_that_is_ours_is_refused_however_it_is_written(option: str, names: str):
    errors = found({"extra": [option]})
    assert list(errors) == ["slurm.extra[0]"]
    error = errors["slurm.extra[0]"]
    assert names in f"{error.allowed} {error.given}"
    assert error.fix.startswith("drop -")


@pytest.mark.parametrize(
    "option",
    [
        "--exclusive",
        "--comment=run with --ntasks=8",  # a value, which the script quotes
        "--mail-user=a@b.org",
        "--nodelist=n[1-4]",
        "--time-min=10",
        "--mem-per-gpu=80G",
        "--gpu-bind=none",
        "--reservation=week",
        "--gres-flags=enforce-binding",
        "-x n3",
        "--hold",
    ],
)
def test_any_other_option_is_let_through(option: str):
    assert found({"extra": [option]}) == {}


@pytest.mark.parametrize(
    "line",
    [
        "/usr/bin/srun hostname",
        "x=$(srun hostname)",
        "x=`srun hostname`",
        "time srun -N1 x",
        "python -m torch.distributed.run --nproc-per-node 8 x.py",
        "accelerate  launch x.py",
        "deepspeed x.py",
        "exec bash -l -i",
        "sh -ic ls",
        "python3 -i x.py",
        "python x.py --pty",
        "true; read answer",
        'bash -c "srun x"',
        "bash -lc 'cd x && srun y'",
        "bash -euo pipefail -c 'srun x'",
        "\\srun x",
        "'srun' x",
        'echo "$(srun hostname)"',
        "timeout -k 5 1h srun x",
        "OMP_NUM_THREADS=1 srun x",
        "mpiexec.hydra -n 2 x",
        "orterun x",
        "aprun x",
        "jsrun x",
        "python3 -ic 1",
        "bash --rcfile x -i",
        "exec bash",
        "bash",
        "python3",
        "jupyter lab --no-browser",
        "tmux",
        "screen -S x",
        "lit-fsdp slurm submit x",
        "python -m lit_fsdp slurm submit --config r.yaml",
        "if true; then read x; fi",
    ],
)
def test_a_launcher_or_a_terminal_in_the_setup(line: str):
    assert list(found({"setup": [line]})) == ["slurm.setup[0]"]


@pytest.mark.parametrize(
    "line",
    [
        "module load cuda # srun is called below",
        "# torchrun is not used",
        "export LAUNCHER=srun_of_ours",
        "export PATH=/usr/lib/mpirun/bin:$PATH",
        "cat hosts | while read host; do echo $host; done",
        "read -r version < VERSION",
        "source /etc/profile.d/bash-init.sh",
        "bash install.sh",
        "which srun",
        "type srun",
        "command -v srun",
        "which mpirun >/dev/null && true",
        'echo "no srun here"',
        "echo 'srun; # torchrun' # don't",
        "module load jupyter screen",
        "bash -c 'echo srun'",
        "curl -s x | bash",
        "while read -r host; do echo $host; done < hosts",
        'eval "$(conda shell.bash hook)"',
        "python3 - < script.py",
        "python -c 'import torch'",
        "python3 --version",
        "jupyter --version",
        "lit-fsdp slurm status run",
        "srun() { command false; }",
        "accelerate env",
        "time true",
    ],
)
def test_lines_that_only_look_like_one(line: str):
    assert found({"setup": [line]}) == {}


def test_a_setup_of_several_lines_is_read_line_by_line():
    assert list(found({"setup": ["module load cuda\ntrue\nsrun hostname"]})) == ["slurm.setup[0]"]


def test_the_environment_file_is_read_too(tmp_path: Path):
    file = tmp_path / "env.sh"
    file.write_text("module load cuda\n# srun comes later\nexport A=1\n")
    trainer = {"num_nodes": 1}
    data = {"train": "generated:640", "global_batch_size": 64}
    assert found({"env_file": str(file)}, trainer=trainer, data=data) == {}
    file.write_text("module load cuda\nsrun hostname\n")
    errors = found({"env_file": str(file)}, trainer=trainer, data=data)
    assert list(errors) == ["slurm.env_file, line 2"]
    assert errors["slurm.env_file, line 2"].fix == "drop srun from slurm.env_file"


@pytest.mark.parametrize("command", [["srun", "lit-fsdp"], ["bash", "-i"], ["torchrun", "-m", "lit_fsdp"]])
def test_a_command_that_is_a_launcher(command: list[str]):
    assert "slurm.command" in found({"command": command})


@pytest.mark.parametrize("name", ["bash", "interactive"])
def test_a_run_folder_whose_name_lightning_takes_for_a_shell(name: str):
    assert list(found(trainer={"default_root_dir": f"/shared/{name}"})) == ["slurm.job_name"]
    assert found({"job_name": "train"}, trainer={"default_root_dir": f"/shared/{name}"}) == {}


@pytest.mark.parametrize(
    ("name", "value", "slurm", "is_fine"),
    [
        ("SBATCH_ACCOUNT", "other", {"account": "lab"}, False),
        ("SBATCH_ACCOUNT", "lab", {"account": "lab"}, True),
        ("SBATCH_ACCOUNT", "other", {}, True),
        ("SBATCH_TIMELIMIT", "60", {"time": "2:00:00"}, False),
        ("SBATCH_TIMELIMIT", "120", {"time": "2:00:00"}, True),
        ("SBATCH_GPUS_PER_TASK", "1", {}, False),
        ("SBATCH_SIGNAL", "B:TERM@10", {}, False),
        ("SBATCH_OUTPUT", "here.log", {}, False),
        ("SBATCH_OPEN_MODE", "truncate", {}, False),
        ("SBATCH_OPEN_MODE", "append", {}, True),
        ("SBATCH_MEM_PER_NODE", "1G", {"mem": "0"}, False),
        ("SBATCH_EXPORT", "NONE", {}, True),  # srun is told otherwise
        ("SBATCH_NO_REQUEUE", "1", {}, False),
        ("SBATCH_NO_REQUEUE", "1", {"requeue": False}, True),
        ("SBATCH_DEBUG", "1", {}, True),
    ],
)
def test_variables_that_sbatch_follows_rather_than_the_script(name: str, value: str, slurm: dict, is_fine: bool):
    facts = dataclasses.replace(FINE, environment={**FINE.environment, name: value})
    errors = found(slurm, facts)
    assert list(errors) == ([] if is_fine else [name])
    assert is_fine or errors[name].fix == f"unset {name}"
