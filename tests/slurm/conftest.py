"""A real SLURM on this host: one controller, two nodes, ended with the tests."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, chdir, redirect_stderr, redirect_stdout
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
_ENDED = ("FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
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
            return self._run_here(list(words[1:]))
        if words[0] == "lit-fsdp":  # others set loggers and handlers of their process
            words = (server().python, "-m", "lit_fsdp", *words[1:])
        return subprocess.run(words, env=self.env, cwd=self.folder, capture_output=True, text=True, timeout=timeout)

    def _run_here(self, words: list[str]) -> subprocess.CompletedProcess[str]:
        from lit_fsdp.__main__ import main

        out, err = io.StringIO(), io.StringIO()
        with ExitStack() as stack:
            for context in (mock.patch.dict(os.environ, self.env, clear=True), chdir(self.folder)):
                stack.enter_context(context)
            stack.enter_context(redirect_stdout(out))
            stack.enter_context(redirect_stderr(err))
            code = main(words)
        return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())

    def submit(self, recipe: Path, *flags: str) -> str:
        """The number of the job of a recipe."""
        done = self.run("lit-fsdp", "slurm", "submit", "--config", str(recipe), *flags)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def states(self, number: str) -> list[dict[str, str]]:
        """What the controller says of a job, or of each task of an array."""
        for _ in range(5):  # a controller that is busy does not answer
            done = self.run("scontrol", "show", "job", "--oneliner", number)
            if done.returncode == 0:
                break
            time.sleep(1)
        lines = done.stdout.splitlines()
        return [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in lines if line]

    def wait_until(self, number: str, *wanted: str, seconds: float = 600) -> list[dict[str, str]]:
        """Its states, once every task is in one of those wanted; at once an error if one has ended in another."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            states = self.states(number)
            if states and all(state["JobState"] in wanted for state in states):
                return states
            if any(state["JobState"] in {*_ENDED, *("COMPLETED", "CANCELLED")} - {*wanted} for state in states):
                break
            time.sleep(0.5)
        raise AssertionError(f"{number} is {self.states(number)}\n{self.logs()}")

    def restarted(self, number: str, times: int, seconds: float = 600) -> None:
        """Waits until a job has been requeued so often, and no end was the last one."""

        def is_back() -> bool:
            (state,) = self.states(number)
            assert state["JobState"] not in _ENDED, self.logs()
            return state["Restarts"] == str(times)

        self._wait(is_back, f"start {times + 1} of job {number}", seconds)

    def signal(self, number: str, name: str = "USR1") -> None:
        """What a time limit and a preemption send to every process of the step."""
        done = self.run("scancel", f"--signal={name}", number)
        assert done.returncode == 0, done.stderr

    def wait_for_step(self, name: str, step: int, seconds: float = 600) -> None:
        """Until a run has logged a step."""
        self._wait(lambda: max(losses(self.folder / name), default=-1) >= step, f"{name} to log step {step}", seconds)

    def wait_for(self, path: Path, seconds: float = 600) -> None:
        """Until a file is there."""
        self._wait(path.exists, str(path), seconds)

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
