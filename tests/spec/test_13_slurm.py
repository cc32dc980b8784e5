"""A recipe goes to a cluster as one page of script, checked before it is submitted; a preempted job loses nothing."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.runs import losses
from tests.slurm.conftest import Cluster, cluster  # noqa: F401 (a fixture)
from tests.spec.running import RECIPE, run

# what a shell, sbatch and SLURM's file names could each take for something else
ODD = 'it\'s a $(touch pwned) `touch pwned` "run" ; 5%j & ü [x]*?'


def test_render(tmp_path: Path) -> None:
    words = ("--nodes", "2", "--gpus-per-node", "0", "--time", "1:00:00", "--trainer.devices", "4")
    words += ("--data.global_batch_size", "8")
    script, _ = run("slurm", "render", *RECIPE, *words, "--slurm.extra", '["--comment=it\'s $(hostname)"]')
    lines = script.splitlines()
    assert lines[0] == "#!/bin/bash"
    for option in ("--nodes=2", "--ntasks-per-node=4", "--time=1:00:00", "--requeue"):
        assert any(line.startswith("#SBATCH") and option in line for line in lines), option
    assert len([line for line in lines if "srun" in line and not line.startswith("#")]) == 1
    (tmp_path / "job.sbatch").write_text(script)
    assert subprocess.run(["bash", "-n", "job.sbatch"], check=False).returncode == 0


@pytest.mark.timeout(900)
def test_a_preempted_job_goes_on(cluster: Cluster) -> None:  # noqa: F811
    """With the losses of a run that was never stopped, in a folder whose name runs nothing."""
    whole = cluster.recipe("whole", trainer={"max_steps": 20, "devices": 2})
    odd = {"max_steps": 20, "devices": 2, "default_root_dir": str(cluster.folder / ODD)}
    stopped = cluster.recipe("odd", trainer=odd, slurm=cluster.forked())
    second = cluster.submit(stopped)
    cluster.wait_for_step(ODD, 1)
    cluster.signal(second)
    run("fit", "--config", whole, "--trainer.num_nodes", "1", "--trainer.devices", "4", ranks=4)
    state = cluster.wait_until(second, "COMPLETED")
    assert (state["Restarts"], state["ExitCode"], state["NodeList"]) == ("1", "0:0", "node[1-2]")
    assert losses(cluster.folder / ODD) == losses(cluster.folder / "whole")
    saved = cluster.folder / ODD / "checkpoints" / "step-00000020"
    run("export", "--ckpt", saved, "--out", cluster.folder / "model", "--verify")
    assert not list(Path.home().glob("pwned")) + list(cluster.folder.rglob("pwned"))
