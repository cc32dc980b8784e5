"""A real SLURM on this host: one controller, two nodes, ended with the tests."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml

from tests.dist.forks import server
from tests.runs import losses

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
_PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "unshare")
_MODEL = ROOT / "configs" / "model" / "SmolLM2-135M-Instruct.json"


class Cluster:
    """Two nodes, and a folder that both of them see."""

    def __init__(self, folder: Path, conf: str) -> None:
        self.folder = folder
        self.env = {**os.environ, "SLURM_CONF": conf, "LIT_FSDP_CACHE": str(folder / "cache"), "PYTHONPATH": str(ROOT)}
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            self.env.pop(name, None)

    def recipe(self, name: str, **sections: Any) -> Path:
        """A miniature on the CPU of two nodes, 40 steps, a checkpoint every 10; sections are merged in."""
        values: dict[str, Any] = {
            "trainer": {"accelerator": "cpu", "devices": 1, "num_nodes": 2, "max_steps": 40, "log_every_n_steps": 1},
            "model": {"name": str(_MODEL), "miniature": True},
            "data": {"train": "generated:64", "max_seq_length": 64, "global_batch_size": 4},
            "checkpoint": {"every_steps": 10},
            "slurm": {"gpus_per_node": 0, "time": "20:00"},
        }
        values["trainer"]["default_root_dir"] = str(self.folder / name)
        for section, more in sections.items():
            values[section] = {**values.get(section, {}), **more}
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(values))
        return path

    def forked(self) -> dict[str, Any]:
        """A ``slurm`` section whose ranks have their imports done; they run on this host, which knows no node names."""
        return {"command": [server().python, "-m", "lit_fsdp"], "master_addr": "127.0.0.1"}

    def run(self, *words: str, timeout: float = 500) -> subprocess.CompletedProcess[str]:
        """A command of SLURM, or ``lit-fsdp``; its verb slurm in this process, which has imported everything."""
        if words[:2] == ("lit-fsdp", "slurm"):
            from lit_fsdp.__main__ import main

            out, err = io.StringIO(), io.StringIO()
            patch = mock.patch.dict(os.environ, self.env, clear=True)
            with patch, chdir(self.folder), redirect_stdout(out), redirect_stderr(err):
                code = main(list(words[1:]))
            return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())
        if words[0] == "lit-fsdp":  # others set loggers and handlers of their process
            words = (server().python, "-m", "lit_fsdp", *words[1:])
        return subprocess.run(words, env=self.env, cwd=self.folder, capture_output=True, text=True, timeout=timeout)

    def submit(self, recipe: Path, *flags: str) -> str:
        """The number of the job of a recipe."""
        done = self.run("lit-fsdp", "slurm", "submit", "--config", str(recipe), *flags)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def state(self, number: str) -> dict[str, str]:
        """What the controller says of a job."""
        for _ in range(5):  # a controller that is busy does not answer
            done = self.run("scontrol", "show", "job", "--oneliner", number)
            if done.returncode == 0:
                break
            time.sleep(1)
        return dict(word.split("=", 1) for word in done.stdout.split() if "=" in word)

    def wait_until(self, number: str, *wanted: str, restarts: int = 0, seconds: float = 600) -> dict[str, str]:
        """Its state, once it is one of these after so many restarts; at once an error if it has ended in another."""
        ends = {"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"} - {*wanted}

        def is_there() -> bool:
            state = self.state(number)
            assert state.get("JobState") not in ends, f"{state}\n{self.logs()}"
            return state.get("JobState") in wanted and int(state["Restarts"]) >= restarts

        self._wait(is_there, f"job {number} to be {wanted}", seconds)
        return self.state(number)

    def signal(self, number: str, name: str = "USR1") -> None:
        """What a time limit and a preemption send to every process of the step."""
        done = self.run("scancel", f"--signal={name}", number)
        assert done.returncode == 0, done.stderr

    def wait_for_step(self, name: str, step: int, seconds: float = 600) -> None:
        """Until a run has logged a step."""
        self._wait(lambda: max(losses(self.folder / name), default=-1) >= step, f"{name} to log step {step}", seconds)

    def _wait(self, is_there: Callable[[], bool], what: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not is_there():
            assert time.monotonic() < deadline, f"waited for {what}\n{self.logs()}"
            time.sleep(0.2)

    def logs(self) -> str:
        """The end of every log."""
        found = sorted(self.folder.rglob("*.log"))
        return "\n".join(f"== {path}\n{path.read_text(errors='replace')[-3000:]}" for path in found)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """One cluster for all tests; skipped with the reason where it cannot be started."""
    os.environ["PATH"] += os.pathsep + os.pathsep.join(("/usr/sbin", "/sbin"))
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    if missing:
        pytest.skip(f"no {', '.join(missing)} on this machine: `make test-slurm` installs them (root, Debian)")
    if os.geteuid() != 0:
        pytest.skip("a private SLURM needs root for its namespaces")
    folder = Path(tempfile.mkdtemp(prefix=".lit_fsdp_slurm_", dir=Path.home()))  # /tmp is no place for a cluster
    started = subprocess.run([str(HERE / "start.sh"), str(folder / "cluster")], capture_output=True, text=True)
    try:
        assert started.returncode == 0, started.stderr
        yield Cluster(folder, started.stdout.strip())
    finally:
        subprocess.run([str(HERE / "stop.sh"), str(folder / "cluster")], check=False)
        shutil.rmtree(folder, ignore_errors=True)
