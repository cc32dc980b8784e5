"""A run folder belongs to one job, however the job before it ended; a second one beside it is in tests/dist."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lit_fsdp.checkpoint.run_lock import RunLock
from lit_fsdp.errors import CheckpointError

# Holds the lock; the child of its fork outlives it, as a loader's worker may.
HOLDER = """
import os, sys, time
from lit_fsdp.checkpoint.run_lock import RunLock
RunLock(sys.argv[1])
ready, tell = os.pipe()
child = os.fork()
if child == 0:
    os.close(1)
    os.close(2)
    os.write(tell, b".")
    time.sleep(60)
    os._exit(0)
os.read(ready, 1)
print(child, flush=True)
time.sleep(60)
"""


def test_a_lock_ends_with_its_job_though_a_forked_worker_lives_on(tmp_path: Path):
    words = [sys.executable, "-W", "ignore", "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as first:
        child = int(first.stdout.readline())  # type: ignore[union-attr]
        try:
            with pytest.raises(CheckpointError, match=rf"remove {tmp_path}/run\.lock"):
                RunLock(tmp_path)
        finally:
            first.kill()
    lock = RunLock(tmp_path)
    lock.release()
    assert lock.path.read_text() == ""
    os.kill(child, signal.SIGKILL)


def test_without_locks_a_warning_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any):
    def unsupported(handle: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with caplog.at_level(logging.WARNING):
        RunLock(tmp_path).release()
    assert "nothing keeps a second job out of this run folder" in caplog.text
