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


class RunLock:
    """Keeps other jobs out of a run folder from now until :meth:`release`, or until this process ends.

    The same process may hold a folder several times; the last release counts.

    Args:
        run_folder: Made if it is not there.

    Raises:
        CheckpointError: Another job holds it (named), or the file cannot be written.
    """

    def __init__(self, run_folder: Path | str) -> None:
        self.path = Path(run_folder) / NAME
        with naming(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
        self._place = self.path.parent.resolve()
        held = _held.get(self._place)
        if held is not None:
            _held[self._place] = (held[0], held[1] + 1)
        else:
            _held[self._place] = (_locked(self.path), 1)
        self._released = False

    def release(self) -> None:
        """Let others in; a second call does nothing."""
        if self._released:
            return
        self._released = True
        held = _held.pop(self._place, None)
        if held is None:  # this process was forked from the one that holds it
            return
        handle, count = held
        if count > 1:
            _held[self._place] = (handle, count - 1)
            return
        if handle is not None:
            os.ftruncate(handle, 0)  # an empty file names nobody
            os.close(handle)


_held: dict[Path, tuple[int | None, int]] = {}
"""Open files by run folder and how often each is held; None where the file system has no locks."""


def is_held(run_folder: Path) -> bool:
    """Whether a job is at work in a run folder, as far as its lock tells this host."""
    try:
        handle = os.open(run_folder / NAME, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
    return False


def holder(path: Path) -> str:
    """Who wrote a lock file, in words; it may have died since."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    fields = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)
    if not {"host", "pid", "started"} <= fields.keys():
        return "another process"
    return f"process {fields['pid']} on host {fields['host']}, started {fields['started']}"


def _locked(path: Path) -> int | None:
    with naming(path):
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise CheckpointError(_refusal(path)) from None
    except OSError as error:
        os.close(handle)
        _log.warning("%s: no lock (%s), so nothing keeps a second job out of this run folder", path, error.strerror)
        return None
    with naming(path):
        os.ftruncate(handle, 0)
        os.pwrite(handle, _description().encode(), 0)
    return handle


def _description() -> str:
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    lines = [f"host: {socket.gethostname()}", f"pid: {os.getpid()}", f"started: {now}"]
    job = os.environ.get("SLURM_JOB_ID")
    return "\n".join([*lines, *([f"slurm job: {job}"] if job else [])]) + "\n"


def _refusal(path: Path) -> str:
    return (
        f"{path.parent}: another job is at work in this run folder: {holder(path)}\n"
        "  fix:     let it end or stop it, or name another trainer.default_root_dir; if that host is gone and its\n"
        f"           network file system still keeps the lock, remove {path}"
    )


def _close_after_fork() -> None:
    for handle, _ in _held.values():
        if handle is not None:
            os.close(handle)
    _held.clear()


os.register_at_fork(after_in_child=_close_after_fork)
