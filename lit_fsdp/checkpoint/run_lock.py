"""One job per run folder: a lock that the kernel releases however its holder dies.

A lock of ``flock`` belongs to the open file. Only rank 0 acquires it, so that ranks of one job do not block each other.
Forked processes (data loader workers) close their copy, so that the lock does not outlive the job.
"""

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
"""Open lock files, and how often each is held."""


class RunLock:
    """Exclude other jobs from a run folder (created if missing) until :meth:`release`, or until this process ends.

    A process may acquire a folder several times; the last release unlocks it. On a file system without locks, this
    logs a warning and excludes no job.

    Raises:
        CheckpointError: Another job holds the lock, or the file cannot be written.
    """

    def __init__(self, run_folder: Path | str) -> None:
        self.path = Path(run_folder).resolve() / NAME
        with naming(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle, count = _held[self.path] if self.path in _held else (_locked(self.path), 0)
        _held[self.path] = (handle, count + 1)

    def release(self) -> None:
        """Release the lock."""
        handle, count = _held.pop(self.path, (-1, 0))  # not held: this process was forked from the one that holds it
        if count > 1:
            _held[self.path] = (handle, count - 1)
        elif count:
            os.ftruncate(handle, 0)  # an empty file means no holder
            os.close(handle)


def _locked(path: Path) -> int:
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        holder = path.read_text(errors="replace") or "a process"
        raise CheckpointError(
            f"{path.parent}: another job uses this run folder: {holder}\n"
            f"  fix:     stop it, or set another trainer.default_root_dir; if its host is gone, remove {path}"
        ) from None
    except OSError as error:
        _log.warning("%s: cannot lock (%s), so a second job could use this run folder", path, error.strerror)
    os.ftruncate(handle, 0)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    os.pwrite(handle, f"process {os.getpid()} on host {socket.gethostname()}, started {now}".encode(), 0)
    return handle


def _close_after_fork() -> None:
    for handle, _ in _held.values():
        os.close(handle)
    _held.clear()


os.register_at_fork(after_in_child=_close_after_fork)
