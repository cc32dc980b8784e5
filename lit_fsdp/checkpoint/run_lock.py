"""One job per run folder: a lock that the kernel gives back however its holder dies.

``flock`` belongs to the open file. It is taken on rank 0 only, so the ranks of a job do not refuse each other, and
processes forked from it (workers of a data loader) close their copy, so that the lock does not outlive the job.
"""

from __future__ import annotations

import datetime
import fcntl
import logging
import os
import socket
from pathlib import Path

from lit_fsdp.checkpoint.files import naming
from lit_fsdp.errors import CheckpointError

NAME = "run.lock"
_log = logging.getLogger(__name__)


_held: dict[Path, tuple[int, int]] = {}
"""Open lock files and how often each is held."""


class RunLock:
    """Keeps other jobs out of a run folder (made if need be) until :meth:`release`, or until this process ends.

    The same process may hold a folder several times; the last release counts. On a file system without locks there is
    a warning, and nothing is kept out.

    Raises:
        CheckpointError: Another job holds it (named), or the file cannot be written.
    """

    def __init__(self, run_folder: Path | str) -> None:
        self.path = Path(run_folder).resolve() / NAME
        with naming(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle, count = _held[self.path] if self.path in _held else (_locked(self.path), 0)
        _held[self.path] = (handle, count + 1)

    def release(self) -> None:
        """Let others in."""
        handle, count = _held.pop(self.path, (-1, 0))  # not held: this process was forked from the one that holds it
        if count > 1:
            _held[self.path] = (handle, count - 1)
        elif count:
            os.ftruncate(handle, 0)  # an empty file names nobody
            os.close(handle)


def _locked(path: Path) -> int:
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        holder = path.read_text(errors="replace") or "a process"
        raise CheckpointError(
            f"{path.parent}: another job is at work in this run folder: {holder}\n"
            f"  fix:     stop it, or name another trainer.default_root_dir; if its host is gone, remove {path}"
        ) from None
    except OSError as error:
        _log.warning("%s: no lock (%s), so nothing keeps a second job out of this run folder", path, error.strerror)
    os.ftruncate(handle, 0)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    os.pwrite(handle, f"process {os.getpid()} on host {socket.gethostname()}, started {now}".encode(), 0)
    return handle


def _close_after_fork() -> None:
    for handle, _ in _held.values():
        os.close(handle)
    _held.clear()


os.register_at_fork(after_in_child=_close_after_fork)
