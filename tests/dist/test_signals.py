"""Signals: one complete checkpoint at a step boundary, the documented exit code, nobody left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lit_fsdp.checkpoint.run_folder import checkpoints, damaged
from lit_fsdp.checkpoint.store import verify_files
from tests.dist.forks import command
from tests.pages import Page

ROOT = Path(__file__).resolve().parents[2]
SMOKE = [str(ROOT / "recipes/qwen3-0.6b_full_fsdp2_8x24gb.yaml"), str(ROOT / "configs/debug/smoke.yaml")]
# One phase of the run made slow, so that a signal can fall into it; a script, as rank 1 is started with the same words.
PHASES = str(ROOT / "tests/dist/slow_phases.py")
PATIENCE = 240  # seconds for a start or an end; a busy machine needs many for the imports of two processes
pytestmark = pytest.mark.timeout(900)
FEW_STEPS = ["--trainer.max_steps", "3", "--trainer.limit_val_batches", "2", "--trainer.val_check_interval", "4"]


@pytest.fixture
def running(tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def begin(tmp_path: Path, entry: list[str], words: list[str], **env: str) -> subprocess.Popen[str]:
    """A miniature run on two processes in a session of its own."""
    verb, *more = words
    words = [verb, "--config", SMOKE[0], "--config", SMOKE[1], "--trainer.default_root_dir", "run", *more]
    return subprocess.Popen(
        [sys.executable, *entry, *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def start(
    tmp_path: Path, running: list[subprocess.Popen[str]], every: int, *more: str, phase: str | None = None
) -> subprocess.Popen[str]:
    """An endless run; returns once it takes steps. Its phase lasts until :func:`go_on`."""
    words = ["fit", "--trainer.max_steps", "1000000", "--trainer.max_epochs", "-1", "--trainer.limit_val_batches", "0"]
    words += ["--checkpoint.every_steps", str(every), *more]
    entry = [PHASES] if phase else ["-m", "lit_fsdp"]
    process = begin(tmp_path, entry, words, SLOW_PHASE=phase or "", SLOW_SECONDS="120")
    running.append(process)
    wait_for(tmp_path / "run" / "metrics.csv", process)
    return process


def go_on(tmp_path: Path, phase: str) -> None:
    """End the phase, a while after a signal was sent in it."""
    time.sleep(1)
    (tmp_path / f"{phase}-go").touch()


def wait_for(path: Path, process: subprocess.Popen[str], seconds: float = PATIENCE) -> None:
    """Until the file is there."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"no {path.name} after {seconds} s"
        time.sleep(0.05)


def children(pid: int) -> list[int]:
    """Further ranks that Lightning started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # gone in the meantime
            continue
        if int(fields[1]) == pid:
            found.append(int(stat.parent.name))
    return found


def finish(process: subprocess.Popen[str]) -> str:
    """Output up to the end; no process of the session may be left."""
    output, _ = process.communicate(timeout=PATIENCE)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return output
        time.sleep(0.1)
    raise AssertionError("a rank was left behind")


def check_nothing_half_written(run: Path) -> list[int]:
    """Steps of the checkpoints, each of which is whole."""
    assert damaged(run) == []
    found = checkpoints(run)
    for entry in found:
        verify_files(entry.path)
    visible = {path.name for path in (run / "checkpoints").iterdir() if not path.name.startswith(".")}
    assert visible == {entry.path.name for entry in found}
    return [entry.step for entry in found]


@pytest.mark.parametrize(
    ("number", "whom", "code"),
    [(signal.SIGINT, "all", 130), (signal.SIGTERM, "first", 75), (signal.SIGUSR1, "child", 75)],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_saved_stopped_and_resumed(
    tmp_path: Path,
    running: list[subprocess.Popen[str]],
    number: signal.Signals,
    whom: str,
    code: int,
) -> None:
    process = start(tmp_path, running, 1_000_000, "--data.num_workers", "2")
    send(process, number, whom)
    output = finish(process)
    assert process.returncode == code, output
    assert "Traceback" not in output
    (step,) = check_nothing_half_written(tmp_path / "run")
    assert f"stopped by a signal after step {step}; the checkpoint is complete; resume with --ckpt_path last" in output
    words = ["fit", "--config", "run/recipe.yaml", "--ckpt_path", "last", "--trainer.max_steps", str(step + 1)]
    assert steps_on_page(tmp_path / "run") == f"{step} of 1,000,000"
    resumed = command(2, words, tmp_path)
    assert [rank.code for rank in resumed] == [0, 0], resumed[0].err
    assert steps_on_page(tmp_path / "run") == f"{step + 1} of {step + 1}"
    assert check_nothing_half_written(tmp_path / "run") == [step, step + 1]


def steps_on_page(run: Path) -> str:
    """What ``report.html`` says of the run's length."""
    return dict(Page((run / "report.html").read_text()).tables["At a glance"])["optimizer steps"]


def send(process: subprocess.Popen[str], number: signal.Signals, whom: str) -> None:
    """To all processes of the run, or to one."""
    if whom == "all":
        os.killpg(process.pid, number)
    else:
        os.kill(process.pid if whom == "first" else children(process.pid)[0], number)


def test_with_loaders_in_a_save(tmp_path: Path, running: list[subprocess.Popen[str]]) -> None:
    """That save is completed, and so is the one at the end of the step after it; the loaders live as long."""
    process = start(tmp_path, running, 3, "--data.num_workers", "2", phase="save")
    wait_for(tmp_path / "save-0", process)
    send(process, signal.SIGTERM, "all")
    go_on(tmp_path, "save")
    output = finish(process)
    assert process.returncode == 75, output
    assert check_nothing_half_written(tmp_path / "run") == [3, 4]
    assert "Traceback" not in output


def test_ctrl_c_three_times_in_a_save(tmp_path: Path, running: list[subprocess.Popen[str]]) -> None:
    """The process ends at once; what was being written stays hidden."""
    process = start(tmp_path, running, 3, phase="save")
    wait_for(tmp_path / "save-0", process)
    sent, begun = 0, time.monotonic()
    while process.poll() is None and time.monotonic() - begun < 60:  # two that come at once are one
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        sent += 1
        time.sleep(0.5)
    output = finish(process)
    assert sent >= 3
    assert time.monotonic() - begun < 100  # the save would have taken 120 s
    assert process.returncode == 130, output
    assert check_nothing_half_written(tmp_path / "run") == []
    (hidden,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert hidden.name.startswith(".step-00000003.tmp-")


@pytest.mark.parametrize(
    ("phase", "verb", "number", "whom", "code", "steps"),
    [
        ("imports", "fit", signal.SIGTERM, "first", 75, []),
        ("rows", "fit", signal.SIGUSR1, "first", 75, []),
        ("setup", "fit", signal.SIGINT, "child", 130, []),  # after the first collective
        pytest.param("setup", "fit", signal.SIGTERM, "child", 75, [], marks=pytest.mark.long("as the one above")),
        pytest.param("setup", "fit", signal.SIGINT, "first", 130, [], marks=pytest.mark.long("as the one above")),
        ("validation", "fit", signal.SIGTERM, "first", 75, [2, 3]),  # the best so far, saved; then a step
        ("exit", "fit", signal.SIGTERM, "all", 0, [2, 3]),
        ("test", "test", signal.SIGTERM, "first", 75, []),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_in_every_phase(
    tmp_path: Path,
    running: list[subprocess.Popen[str]],
    phase: str,
    verb: str,
    number: signal.Signals,
    whom: str,
    code: int,
    steps: list[int],
) -> None:
    """Neither half of a run nor a hang: what lit_fsdp/signals.py says, for every phase."""
    words = [verb, *(FEW_STEPS if verb == "fit" else []), "--checkpoint.every_steps", "1000"]
    process = begin(tmp_path, [PHASES], words, SLOW_PHASE=phase, SLOW_SECONDS="120")
    running.append(process)
    wait_for(tmp_path / f"{phase}-{1 if whom == 'child' else 0}", process)
    for again in (number, *[signal.SIGTERM, signal.SIGUSR1] * (number != signal.SIGINT), *[signal.SIGINT] * (not code)):
        if process.poll() is None:
            send(process, again, whom)
        time.sleep(0.1)
    go_on(tmp_path, phase)
    output = finish(process)
    assert process.returncode == code, output
    assert "Traceback" not in output
    assert ("stopped by a signal" in output, "interrupted" in output).count(True) == (code != 0), output
    found = check_nothing_half_written(tmp_path / "run") if (tmp_path / "run" / "checkpoints").exists() else []
    assert found == steps
