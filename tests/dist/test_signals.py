"""Signals: one complete checkpoint at a step boundary, the documented exit code, nobody left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.dist.forks import ROOT, command, server
from tests.runs import MORE, whole_steps

SMOKE = [str(ROOT / "recipes/qwen3-0.6b_full_fsdp2_8x24gb.yaml"), str(ROOT / "configs/debug/smoke.yaml")]
# One phase of the run made slow, so that a signal can fall into it; a script, as rank 1 is started with the same words.
PHASES = str(ROOT / "tests/dist/slow_phases.py")
PATIENCE = 240  # seconds for a start or an end; a busy machine needs many for the imports of two processes
pytestmark = pytest.mark.timeout(900)
FEW_STEPS = ["--trainer.max_steps", "3", "--trainer.limit_val_batches", "2", "--trainer.val_check_interval", "4"]


class Command:
    """The command in a session of its own: it starts its second rank itself."""

    def __init__(self, cwd: Path, words: list[str], env: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *words],
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": str(ROOT), **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def send(self, number: signal.Signals, whom: str) -> None:
        """To all processes of the run, or to one."""
        if whom == "all":
            os.killpg(self._process.pid, number)
        else:
            os.kill(self._process.pid if whom == "first" else self._child(), number)

    def _child(self) -> int:
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        return int(children[0])

    def finish(self) -> tuple[int, str]:
        """Exit code and output; no process of the session may be left."""
        output, _ = self._process.communicate(timeout=PATIENCE)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                os.killpg(self._process.pid, 0)
            except ProcessLookupError:
                return self._process.returncode, output
            time.sleep(0.1)
        raise AssertionError("a rank was left behind")

    def end(self) -> None:
        if self.is_alive():
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


class Forked:
    """Its two ranks as somebody else starts them, with their imports done; the code of the first one is that of all."""

    def __init__(self, cwd: Path, words: list[str], env: dict[str, str]) -> None:
        self._job = server().start("script", 2, env, words=words, cwd=cwd)

    def is_alive(self) -> bool:
        return self._job.wait(0)[0].code is None

    def send(self, number: signal.Signals, whom: str) -> None:
        self._job.kill({"all": None, "first": [0], "child": [1]}[whom], number)

    def finish(self) -> tuple[int, str]:
        first, second = self._job.wait(PATIENCE)
        assert first.code is not None, first.output
        assert second.code in (0, first.code), second.output
        deadline = time.monotonic() + 60
        while self._job.is_alive():
            assert time.monotonic() < deadline, "a loader was left behind"
            time.sleep(0.1)
        return first.code, first.output + second.output

    def end(self) -> None:
        server().end_jobs()


Run = Command | Forked
Begin = Callable[..., Run]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Start a miniature run on two processes."""
    begun: list[Run] = []

    def start(launch: type[Run], verb: str, *more: str, phase: str) -> Run:
        words = [PHASES, verb, "--config", SMOKE[0], "--config", SMOKE[1], "--trainer.default_root_dir", "run", *more]
        begun.append(launch(tmp_path, words, {"SLOW_PHASE": phase, "SLOW_SECONDS": "120"}))
        return begun[-1]

    yield start
    for run in begun:
        run.end()


def train(begin: Begin, launch: type[Run], folder: Path, every: int, phase: str = "none") -> Run:
    """An endless run with loaders; returns once it takes steps."""
    words = ["fit", "--trainer.max_steps", "1000000", "--trainer.max_epochs", "-1", "--trainer.limit_val_batches", "0"]
    run = begin(launch, *words, "--checkpoint.every_steps", str(every), "--data.num_workers", "2", phase=phase)
    wait_for(folder / "run" / "metrics.csv", run)
    return run


def wait_for(path: Path, run: Run) -> None:
    """Until the file is there."""
    deadline = time.monotonic() + PATIENCE
    while not path.exists():
        assert run.is_alive(), run.finish()
        assert time.monotonic() < deadline, f"no {path.name}"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("launch", "number", "whom", "code"),
    [
        (Command, signal.SIGINT, "all", 130),
        (Forked, signal.SIGTERM, "first", 75),
        pytest.param(Forked, signal.SIGUSR1, "child", 75, marks=MORE),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_saved_stopped_and_resumed(
    tmp_path: Path, begin: Begin, launch: type[Run], number: signal.Signals, whom: str, code: int
) -> None:
    run = train(begin, launch, tmp_path, 1_000_000)
    run.send(number, whom)
    found, output = run.finish()
    assert found == code, output
    assert "Traceback" not in output
    (step,) = whole_steps(tmp_path / "run", may_hide=True)
    assert f"stopped by a signal after step {step}; the checkpoint is complete; resume with --ckpt_path last" in output
    words = ["fit", "--config", "run/recipe.yaml", "--ckpt_path", "last", "--trainer.max_steps", str(step + 1)]
    resumed = command(2, words, tmp_path)
    assert [rank.code for rank in resumed] == [0, 0], resumed[0].err
    assert whole_steps(tmp_path / "run", may_hide=True) == [step, step + 1]


@pytest.mark.parametrize(
    "case",
    [
        (Command, "imports", "fit", signal.SIGTERM, "first", 75, []),
        (Command, "rows", "fit", signal.SIGUSR1, "first", 75, []),  # the other rank waits to be released
        (Command, "setup", "fit", signal.SIGINT, "child", 130, []),  # after the first collective
        (Forked, "validation", "fit", signal.SIGTERM, "first", 75, [2, 3]),  # the best so far, saved; then a step
        (Forked, "save", "fit", signal.SIGTERM, "all", 75, [2, 3]),  # with loaders, which live as long
        pytest.param(
            (Command, "exit", "fit", signal.SIGTERM, "all", 0, [2, 3]),
            marks=pytest.mark.long("everything is saved by then"),
        ),
        pytest.param(
            (Command, "test", "test", signal.SIGTERM, "first", 75, []),
            marks=pytest.mark.long("fit is stopped in the same way"),
        ),
    ],
    ids=lambda case: case[1],
)
def test_in_every_phase(tmp_path: Path, begin: Begin, case: tuple[Any, ...]) -> None:
    """Neither half of a run nor a hang: what lit_fsdp/signals.py says, for every phase."""
    launch, phase, verb, number, whom, code, steps = case
    words = [*(FEW_STEPS if verb == "fit" else []), *(["--data.num_workers", "2"] if phase == "save" else [])]
    run = begin(launch, verb, *words, "--checkpoint.every_steps", "1000", phase=phase)
    wait_for(tmp_path / f"{phase}-{1 if whom == 'child' else 0}", run)
    for again in (number, *[signal.SIGTERM, signal.SIGUSR1] * (number != signal.SIGINT), *[signal.SIGINT] * (not code)):
        if run.is_alive():
            run.send(again, whom)
        time.sleep(0.1)
    time.sleep(0.3)
    (tmp_path / f"{phase}-go").touch()  # ends the phase
    found, output = run.finish()
    assert found == code, output
    assert "Traceback" not in output
    assert ("stopped by a signal" in output, "interrupted" in output).count(True) == (code != 0), output
    is_last = "after step 3; the checkpoint is complete; this was the last step" in output
    assert is_last == (phase in ("validation", "save")), output
    saved = whole_steps(tmp_path / "run", may_hide=True) if (tmp_path / "run" / "checkpoints").exists() else []
    assert saved == steps
