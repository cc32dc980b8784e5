"""Which ends of its ranks a real SLURM of two nodes starts a job again after."""

from __future__ import annotations

import pytest

from lit_fsdp.launch.slurm_job import render
from tests.slurm.conftest import Cluster
from tests.unit.launch.conftest import planned

pytestmark = pytest.mark.timeout(600)


def after_other(act: str) -> str:
    """Of two ranks the first one acts, as soon as the other one runs and would die of SIGTERM."""
    other = "exec env --default-signal=TERM sh -c 'touch beside-$SLURM_JOB_ID; exec sleep 60'"
    return f"[ $SLURM_PROCID = 0 ] || {{ {other}; }}; until [ -e beside-$SLURM_JOB_ID ]; do sleep 0.1; done; {act}"


@pytest.mark.long("the script is run with stand-ins for SLURM in tests/unit/launch")
def test_who_is_started_again(cluster: Cluster):
    """Around processes that end at once, side by side, since SLURM lets a requeued job wait."""
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
        "failed": ("exit 3", 1, ("FAILED", "3:0", "0")),
        "capped": ("exit 75", 1, ("FAILED", "75:0", "1")),
    }
    numbers = {}
    for name, (text, nodes, _) in cases.items():
        folder = cluster.folder / name
        words = ["bash", "-c", f"n=${{SLURM_RESTART_COUNT:-0}}; {text}", "_"]
        trainer = {"accelerator": "cpu", "devices": 1, "num_nodes": nodes, "default_root_dir": str(folder)}
        (folder / "slurm").mkdir(parents=True)
        script = folder / "slurm" / "job.sbatch"
        script.write_text(render(planned({"command": words, "max_requeues": 1}, trainer=trainer)[0]))
        done = cluster.run("sbatch", "--parsable", str(script))
        assert done.returncode == 0, done.stderr
        numbers[name] = done.stdout.strip()
    states = {name: cluster.wait_until(number, "COMPLETED", "FAILED") for name, number in numbers.items()}
    found = {name: (state["JobState"], state["ExitCode"], state["Restarts"]) for name, state in states.items()}
    assert found == {name: wanted for name, (_, _, wanted) in cases.items()}, cluster.logs()
