"""A run folder belongs to one job, however the job before it ended."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lit_fsdp.checkpoint.run_lock import RunLock
from lit_fsdp.errors import CheckpointError

# Holds the lock without the imports of torch; the child of a fork outlives it, as a loader's worker may.
HOLDER = """
import os, sys, time
from lit_fsdp.checkpoint.run_lock import RunLock
from lit_fsdp.errors import CheckpointError
try:
    RunLock(sys.argv[1])
except CheckpointError as error:
    sys.exit(str(error))
child = 0
if sys.argv[2] == "fork":
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(1)
        os.close(2)
        os.write(tell, b".")
        time.sleep(60)
        os._exit(0)
    os.read(ready, 1)
print(f"held {child}" if child else "held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def start(started):
    def begin(folder: Path, mode: str = "plain") -> subprocess.Popen[str]:
        words = [sys.executable, "-c", HOLDER, str(folder), mode]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(process)
        return process

    return begin


def test_a_second_job_is_refused_and_told_who_holds_the_folder(tmp_path, start):
    first = start(tmp_path)
    assert first.stdout.readline() == "held\n"
    with pytest.raises(CheckpointError) as error:
        RunLock(tmp_path)
    lines = str(error.value).splitlines()
    assert lines[0].startswith(f"{tmp_path}: another job is at work in this run folder: process {first.pid} on host ")
    assert f"on host {socket.gethostname()}, started 20" in lines[0]
    assert "name another trainer.default_root_dir" in lines[1]
    assert f"remove {tmp_path / 'run.lock'}" in lines[2]


def test_the_lock_ends_with_its_holder_also_when_a_forked_worker_lives_on(tmp_path, start):
    first = start(tmp_path, "fork")
    worker = int(first.stdout.readline().removeprefix("held "))
    try:
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
        lock = RunLock(tmp_path)
        assert f"pid: {os.getpid()}\n" in lock.path.read_text()
        second = start(tmp_path)
        assert second.wait() == 1
        assert f"process {os.getpid()} on host" in second.stderr.read()
        lock.release()
        assert lock.path.read_text() == ""
        third = start(tmp_path)
        assert third.stdout.readline() == "held\n"
    finally:
        os.kill(worker, signal.SIGKILL)


def test_one_process_may_hold_it_twice_and_the_last_release_counts(tmp_path, start):
    folder = tmp_path / "new" / "run"
    first, second = RunLock(folder), RunLock(folder)
    first.release()
    first.release()
    assert start(folder).wait() == 1
    second.release()
    assert start(folder).stdout.readline() == "held\n"


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_without_locks_one_warning_says_so(tmp_path, monkeypatch, caplog, number):
    def unsupported(handle: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with caplog.at_level(logging.WARNING):
        locks = [RunLock(tmp_path), RunLock(tmp_path)]
    assert len(caplog.messages) == 1
    assert "nothing keeps a second job out of this run folder" in caplog.text
    for lock in locks:
        lock.release()


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/run/run\.lock: Not a directory"):
        RunLock(tmp_path / "file" / "run")


def test_a_lock_file_without_a_name_in_it(tmp_path, start):
    first = start(tmp_path)
    assert first.stdout.readline() == "held\n"
    (tmp_path / "run.lock").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match="in this run folder: another process\n"):
        RunLock(tmp_path)
