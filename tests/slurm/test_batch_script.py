"""The batch script on a real SLURM, around processes that end at once: who is started again, and what values do."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lit_fsdp.launch.slurm_script import render
from tests.slurm.conftest import Cluster
from tests.unit.launch.jobs import planned

pytestmark = pytest.mark.timeout(300)
TOUCH = '$(touch pwned) `touch pwned` ; touch pwned & "$(touch pwned)" \' #'
DUMP = "import json, os, sys; json.dump([sys.argv[1:], dict(os.environ)], open(os.environ['OUT'], 'w'))"


def begin(cluster: Cluster, name: str, **slurm: Any) -> subprocess.CompletedProcess[str]:
    """What sbatch answers to the script of a job with one process per node."""
    folder = cluster.folder / name
    nodes, ckpt_path = slurm.pop("nodes", 1), slurm.pop("ckpt_path", None)
    trainer = {"accelerator": "cpu", "devices": 1, "num_nodes": nodes, "default_root_dir": str(folder)}
    job, _ = planned(slurm, trainer=trainer, **({"ckpt_path": ckpt_path} if ckpt_path else {}))
    (folder / "slurm").mkdir(parents=True)
    script = folder / "slurm" / "job.sbatch"
    script.write_text(render(job))
    return cluster.run("sbatch", "--parsable", str(script))


def shell(cluster: Cluster, name: str, text: str, **slurm: Any) -> str:
    """The number of a job whose processes run a line of bash; ``$n`` is how often it has been started before."""
    words = ["bash", "-c", f"n=${{SLURM_RESTART_COUNT:-0}}; {text}", "_"]
    done = begin(cluster, name, command=words, **slurm)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def ended(cluster: Cluster, number: str) -> list[tuple[str, str, str]]:
    """State, exit code and restarts of a job, or of each task of an array in their order."""
    states = cluster.wait_until(number, "COMPLETED", "FAILED", "CANCELLED")
    states.sort(key=lambda state: state.get("ArrayTaskId", ""))
    return [(state["JobState"], state["ExitCode"], state["Restarts"]) for state in states]


def after_other(act: str) -> str:
    """Of two ranks the first one acts, as soon as the other one runs and would die of SIGTERM."""
    other = "exec env --default-signal=TERM sh -c 'touch beside-$SLURM_JOB_ID; exec sleep 60'"
    return f"[ $SLURM_PROCID = 0 ] || {{ {other}; }}; until [ -e beside-$SLURM_JOB_ID ]; do sleep 0.1; done; {act}"


@pytest.fixture
def jobs(cluster: Cluster) -> dict[str, str]:
    """Started side by side, since SLURM lets a requeued job wait; numbers by name."""
    first = "[ $n = 1 ] || "
    last_of_array = f"[ $SLURM_ARRAY_TASK_ID = 0 ] && sleep 4 || {{ {first}exit 75; }}"
    return {
        "died": shell(cluster, "died", f"{first}kill -USR1 $$"),
        # srun sends SIGTERM to the other one, which does not listen yet
        "beside": shell(cluster, "beside", f"{first}{{ [ $SLURM_PROCID = 1 ] || kill -USR1 $$; sleep 60; }}", nodes=2),
        # or has not even come as far as to ignore it
        "stopped": shell(cluster, "stopped", f"{first}{{ {after_other('exit 75')}; }}", nodes=2),
        "unheard": shell(cluster, "unheard", f"{first}{{ {after_other('kill -USR1 $$')}; }}", nodes=2),
        "missing": shell(cluster, "missing", f"{{ {after_other('exit 127')}; }}", nodes=2),
        "capped": shell(cluster, "capped", "exit 75", max_requeues=1),
        "failed": shell(cluster, "failed", "exit 3"),
        "array": shell(cluster, "array", f"echo $WANDB_RUN_ID >> $SLURM_ARRAY_TASK_ID; {last_of_array}", seeds=[5, 6]),
    }


def test_who_is_started_again(cluster: Cluster, jobs: dict[str, str]):
    assert ended(cluster, jobs["died"]) == [("COMPLETED", "0:0", "1")]
    for name in ("beside", "stopped", "unheard"):
        assert ended(cluster, jobs[name]) == [("COMPLETED", "0:0", "1")], name
    assert ended(cluster, jobs["failed"]) == [("FAILED", "3:0", "0")]
    assert ended(cluster, jobs["missing"]) == [("FAILED", "143:0", "0")]

    # after as many requeues as are allowed the job ends and says so
    assert ended(cluster, jobs["capped"]) == [("FAILED", "75:0", "1")]
    log = (cluster.folder / "capped" / "slurm" / f"{jobs['capped']}.log").read_text()
    assert log.count("not put back into the queue: 1 times are enough (slurm.max_requeues)") == 1

    # a task of an array leaves the others alone: the last one has the number of the array, by which scontrol would
    # mean all; each has one run of W&B
    number = jobs["array"]
    assert ended(cluster, number) == [("COMPLETED", "0:0", "0"), ("COMPLETED", "0:0", "1")]
    first, second = ((cluster.folder / task).read_text().split() for task in "01")
    assert first == [f"slurm-test-{number}_0"]
    assert second == [f"slurm-test-{number}_1"] * 2


def test_a_signal_for_the_batch_shell_does_not_end_it(cluster: Cluster):
    number = shell(cluster, "full", 'trap "exit 0" USR1; touch ready; for i in $(seq 600); do sleep 0.1; done; exit 4')
    cluster.wait_for(cluster.folder / "ready", seconds=200)
    assert cluster.run("scancel", "--full", "--signal=USR1", number).returncode == 0
    assert ended(cluster, number) == [("COMPLETED", "0:0", "0")]


def test_values_arrive_as_they_were_given(cluster: Cluster):
    odd = f"{TOUCH} two\nlines \t ü %j \\ $HOME"
    out = cluster.folder / "arrived.json"
    file = cluster.folder / "my env ' $(touch pwned).sh"
    file.write_text("set -e\nFROM_FILE=$NOT_SET_ANYWHERE'yes'; export FROM_FILE\nlogs=x words=x restarts=9\n")
    name = "odd ' \" $(touch pwned) `touch pwned` 5%j & ü"
    slurm = {"env": {"ODD": odd, "OUT": str(out)}, "env_file": str(file), "job_name": TOUCH}
    extra = ["--exclusive", f"--comment={TOUCH}"]
    done = begin(cluster, name, command=[sys.executable, "-c", DUMP, odd], ckpt_path=odd, extra=extra, **slurm)
    assert done.returncode == 0, done.stderr
    number = done.stdout.strip()
    assert ended(cluster, number) == [("COMPLETED", "0:0", "0")]
    words, env = json.loads(out.read_text())
    recipe = str(cluster.folder / name / "slurm" / "recipe.yaml")
    assert words == [odd, "fit", "--config", recipe, "--ckpt_path", str(Path(odd).absolute())]
    assert (env["ODD"], env["FROM_FILE"]) == (odd, "yes")
    assert cluster.run("squeue", "--states=all", "--noheader", "--format=%j", f"--jobs={number}").stdout == f"{TOUCH}\n"
    logs = sorted(path.name for path in (cluster.folder / name / "slurm").glob("*.log"))
    assert logs == [f"{number}.log", f"{number}.rank-0.log"]
    assert not list(cluster.folder.rglob("pwned"))


def test_no_value_of_any_key_runs_anything(cluster: Cluster):
    """sbatch refuses some, srun others."""
    keys = ("partition", "account", "qos", "constraint", "mem", "job_name", "dependency", "env_file")
    cases: dict[str, dict[str, Any]] = {key: {key: TOUCH} for key in keys}
    for runtime in ("pyxis", "apptainer"):
        cases[runtime] = {"container": TOUCH, "container_runtime": runtime, "container_mounts": [TOUCH]}
    cases |= {"extra": {"extra": [f"--comment={TOUCH}"]}, "option": {"extra": [f"-{TOUCH}"]}}
    cases |= {"command": {"command": [TOUCH, TOUCH]}, "env": {"env": {"X": TOUCH}}, "ckpt": {"ckpt_path": TOUCH}}
    answers = {name: begin(cluster, f"runs {name}", **{"command": ["true"], **more}) for name, more in cases.items()}
    taken = {name: answer.stdout.strip() for name, answer in answers.items() if answer.returncode == 0}
    assert {"job_name", "extra", "command", "env", "ckpt", "pyxis", "apptainer", "env_file"} <= set(taken)
    deadline = time.monotonic() + 280
    for number in taken.values():
        while cluster.states(number)[0]["JobState"] in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"):
            assert time.monotonic() < deadline, cluster.states(number)
            time.sleep(0.2)
    assert not [*cluster.folder.rglob("pwned"), *Path.home().glob("pwned"), *Path.cwd().glob("pwned")]
