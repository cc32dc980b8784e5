"""The batch script on a real SLURM, around processes that end at once: who is started again, and what values do."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lit_fsdp.launch.slurm_job import render
from tests.slurm.conftest import Cluster
from tests.unit.launch.conftest import planned

pytestmark = [pytest.mark.timeout(300), pytest.mark.long("with stand-ins for SLURM in tests/unit/launch")]
TOUCH = '$(touch pwned) `touch pwned` ; touch pwned & "$(touch pwned)" \' #'
DUMP = "import json, os, sys; json.dump([sys.argv[1:], dict(os.environ)], open(os.environ['OUT'], 'w'))"


def begin(cluster: Cluster, name: str, nodes: int = 1, **slurm: Any) -> subprocess.CompletedProcess[str]:
    """What sbatch answers to the script of a job with one process per node."""
    folder = cluster.folder / name
    trainer = {"accelerator": "cpu", "devices": 1, "num_nodes": nodes, "default_root_dir": str(folder)}
    job, _ = planned(slurm, slurm.pop("ckpt_path", None), trainer=trainer)
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


def ended(cluster: Cluster, number: str) -> tuple[str, str, str]:
    """State, exit code and restarts of a job."""
    (state,) = cluster.wait_until(number, "COMPLETED", "FAILED", "CANCELLED")
    return state["JobState"], state["ExitCode"], state["Restarts"]


def after_other(act: str) -> str:
    """Of two ranks the first one acts, as soon as the other one runs and would die of SIGTERM."""
    other = "exec env --default-signal=TERM sh -c 'touch beside-$SLURM_JOB_ID; exec sleep 60'"
    return f"[ $SLURM_PROCID = 0 ] || {{ {other}; }}; until [ -e beside-$SLURM_JOB_ID ]; do sleep 0.1; done; {act}"


def test_who_is_started_again(cluster: Cluster):
    """Started side by side, since SLURM lets a requeued job wait."""
    first, leave = "[ $n = 1 ] || ", "$LIT_FSDP_EXIT_DIR/exit.$SLURM_PROCID"
    again, saved = ("COMPLETED", "0:0", "1"), "touch $LIT_FSDP_EXIT_DIR/saved"
    cases: dict[str, tuple[str, int, tuple[str, str, str]]] = {
        "died": (f"{first}kill -USR1 $$", 1, again),
        # srun sends SIGTERM to the other one, which does not listen yet, or has not even come as far as to ignore it
        "beside": (f"{first}{{ [ $SLURM_PROCID = 1 ] || kill -USR1 $$; sleep 60; }}", 2, again),
        "stopped": (first + "{ " + after_other(f"echo 75 >{leave}; exit 75") + "; }", 2, again),
        "lost": (f"{first}{{ {saved}; echo 76 >{leave}; exit 76; }}", 1, again),
        "killed": (f"{first}{{ {saved}; kill -KILL $$; }}", 1, again),
        "killed-at-once": ("kill -KILL $$", 1, ("FAILED", "137:0", "0")),
        "refused": (f"{saved}; " + after_other(f"echo 2 >{leave}; exit 2"), 2, ("FAILED", "2:0", "0")),
        "missing": (after_other("exit 127"), 2, ("FAILED", "143:0", "0")),
        "failed": ("exit 3", 1, ("FAILED", "3:0", "0")),
        "capped": ("exit 75", 1, ("FAILED", "75:0", "1")),
    }
    jobs = {name: shell(cluster, name, text, nodes=nodes, max_requeues=1) for name, (text, nodes, _) in cases.items()}
    setup = begin(cluster, "setup", setup=["true", "false"], command=["touch", "begun"]).stdout.strip()
    found = {name: ended(cluster, number) for name, number in jobs.items()}
    assert found == {name: wanted for name, (_, _, wanted) in cases.items()}, cluster.logs()
    log = (cluster.folder / "capped" / "slurm" / f"{jobs['capped']}.log").read_text()
    assert log.count("not requeued: 1 times are enough (slurm.max_requeues)") == 1
    assert ended(cluster, setup) == ("FAILED", "1:0", "0")
    assert not (cluster.folder / "begun").exists()


def test_a_signal_for_the_batch_shell_does_not_end_it(cluster: Cluster):
    number = shell(cluster, "full", 'trap "exit 0" USR1; touch ready; for i in $(seq 600); do sleep 0.1; done; exit 4')
    cluster.wait_for(cluster.folder / "ready", seconds=200)
    assert cluster.run("scancel", "--full", "--signal=USR1", number).returncode == 0
    assert ended(cluster, number) == ("COMPLETED", "0:0", "0")


def test_values_arrive_as_they_were_given(cluster: Cluster):
    odd = f"{TOUCH} two\nlines \t ü %j \\ $HOME"
    out = cluster.folder / "arrived.json"
    file = cluster.folder / "my env ' $(touch pwned).sh"
    file.write_text("set -e\nFROM_FILE=$NOT_SET_ANYWHERE'yes'; export FROM_FILE\nrun=x ckpt=x start=99\n")
    env = {"ODD": odd, "OUT": str(out)}
    name = 'it\'s "a" $(touch pwned) ; 5%j & ü'
    slurm = {"env": env, "env_file": str(file), "setup": ["export FROM_SETUP=$FROM_FILE"], "job_name": TOUCH}
    slurm |= {"extra": ["--exclusive", f"--comment={TOUCH}"], "command": [sys.executable, "-c", DUMP, odd]}
    done = begin(cluster, name, ckpt_path=odd, **slurm)
    assert done.returncode == 0, done.stderr
    number = done.stdout.strip()
    assert ended(cluster, number) == ("COMPLETED", "0:0", "0"), cluster.logs()
    words, environment = json.loads(out.read_text())
    recipe = str(cluster.folder / name / "slurm" / "recipe.yaml")
    resume = ["--ckpt_path", str(Path(odd).absolute())]
    assert words == [odd, "fit", "--config", recipe, *resume, "--trainer.num_nodes", "1"]
    assert (environment["ODD"], environment["FROM_SETUP"]) == (odd, "yes")
    assert environment["MASTER_ADDR"] in ("node1", "node2")
    logs = sorted(path.name for path in (cluster.folder / name / "slurm").glob("*.log"))
    assert logs == [f"{number}.log", f"{number}.rank-0.log"]
    assert "warning" not in cluster.logs()
    assert not list(cluster.folder.rglob("pwned"))


def test_no_value_of_any_key_runs_anything(cluster: Cluster):
    """sbatch refuses some, srun others."""
    keys = ("partition", "account", "qos", "constraint", "mem", "job_name", "dependency", "env_file", "cpu_bind")
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
