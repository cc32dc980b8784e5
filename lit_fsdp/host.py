"""This process among others: which one speaks, where caches are, and a folder that is made once by one of them."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import platform
import random
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lit_fsdp.errors import CheckpointError

_log = logging.getLogger(__name__)
_POLL_SECONDS = 0.2
_REMIND_SECONDS = 30.0
_IDLE_SECONDS = 3600.0
_PORTS = range(10000, 20000)
"""Below those of outgoing connections (from 32768 on, on Linux) and those derived from the number of a SLURM job."""
_PORTS_TRIED = 200
_ISA_WITHOUT_BF16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI")
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


def cache_root() -> Path:
    """``$LIT_FSDP_CACHE``, else ``~/.cache/lit_fsdp``."""
    return Path(os.environ.get("LIT_FSDP_CACHE") or "~/.cache/lit_fsdp").expanduser()


def cpu_has_bf16() -> bool:
    """Whether this CPU multiplies in bf16 (AVX512-BF16, AMX or Arm BF16) and ``ONEDNN_MAX_CPU_ISA`` lets it."""
    if os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper() in _ISA_WITHOUT_BF16:
        return False
    cpuinfo = Path("/proc/cpuinfo")
    flags = set(cpuinfo.read_text(encoding="utf-8").split()) if cpuinfo.is_file() else set()
    return not flags.isdisjoint(("avx512_bf16", "amx_bf16", "bf16"))  # the last is Arm's


def return_freed_memory() -> None:
    """Give memory that has been freed back to the system now, where the C library can (glibc); else do nothing.

    glibc keeps freed blocks of up to 32 MiB for later, so many short-lived ones stay resident: loading a 135M model
    under FSDP1 left 210 MB too much in a process that held 270 MB of weights.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(ctypes.c_size_t(0))


def make_once(folder: Path, make: Callable[[Path], None], what: str) -> Path:
    """``folder``, made by ``make`` in a temporary folder and renamed when complete, unless it is there already.

    Of several processes (also on several nodes with one file system) one makes it and the others wait; when that one
    is killed, the next takes over. Where locks do not work, as on some network file systems, several make it at the
    same time; the first to be ready wins and the others throw theirs away.

    Args:
        folder: Its name must identify the content, as an existing one is used as it is.
        make: Called with an empty folder to fill.
        what: Named in the log, for those who wait.

    Raises:
        CheckpointError: The disk is full, or the place cannot be written.
    """
    try:
        if folder.is_dir():
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.parent / f"{folder.name}.lock", what) as alone:
            if not folder.is_dir():
                _make(folder, make, what, alone)
    except OSError as error:
        raise CheckpointError(
            f"{folder}: cannot be written ({error}); set data.cache_dir or LIT_FSDP_CACHE to another place"
        ) from error
    return folder


def _make(folder: Path, make: Callable[[Path], None], what: str, alone: bool) -> None:
    start = time.monotonic()
    _remove_leftovers(folder, alone)
    _log.info("%s: once, into %s", what, folder)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.{_boot()}.", suffix=".partial", dir=folder.parent))
    try:
        make(partial)
        for path in [*partial.rglob("*"), partial]:
            path.chmod(0o755 if path.is_dir() else 0o644)  # mkdtemp and safetensors write for their owner alone
            _sync(path)
        try:
            partial.rename(folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            _log.info("%s: another process was first, its result is used", what)
        _sync(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    _log.info("%s: done in %.1f s", what, time.monotonic() - start)


def _remove_leftovers(folder: Path, alone: bool) -> None:
    """Temporary folders of killed processes: of this machine if we hold its lock, else what has long been idle.

    A lock may hold among the processes of one machine only, so that another one's folder may be at work.
    """
    for leftover in folder.parent.glob(f".{folder.name}.*.partial"):
        try:
            changed = max(path.stat().st_mtime for path in [leftover, *leftover.rglob("*")])
        except OSError:  # it is just being renamed or removed
            continue
        if (alone and f".{_boot()}." in leftover.name) or time.time() - changed > _IDLE_SECONDS:
            shutil.rmtree(leftover, ignore_errors=True)


def _boot() -> str:
    """This machine since it was started: processes that have it in common share every lock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()[:13]
    except OSError:
        return platform.node().replace(".", "-") or "here"


@contextmanager
def locked(lock: Path, what: str) -> Iterator[bool]:
    """Hold an exclusive lock, polled, so that Ctrl-C works and waiting can be reported; false: there are no locks."""
    with open(lock, "a", encoding="utf-8") as handle:
        start = reported = time.monotonic()
        alone = True
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                now = time.monotonic()
                if reported == start or now - reported >= _REMIND_SECONDS:
                    _log.info("%s: waiting for another process (%.0f s, %s)", what, now - start, lock)
                    reported = now
                time.sleep(_POLL_SECONDS)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                _log.warning("%s: no file locks here (%s), so every process may do this work", what, error)
                alone = False
                break
        yield alone


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_port() -> int:
    """A TCP port for ranks to meet at, which nobody listens on.

    One that the system chooses (``bind`` to port 0) is among those that it gives to outgoing connections too: any of
    them may get it in the seconds until rank 0 listens there, which then fails with ``EADDRINUSE``.

    Raises:
        OSError: None of many is free.
    """
    for port in random.SystemRandom().sample(_PORTS, _PORTS_TRIED):  # processes of one seed must not choose alike
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
    raise OSError(errno.EADDRINUSE, f"none of {_PORTS_TRIED} ports tried from {_PORTS[0]} to {_PORTS[-1]} is free")


def is_first_process() -> bool:
    """Whether this process, of those started by Lightning, torchrun or srun, is the one that speaks."""
    names = ("RANK", "SLURM_PROCID", "LOCAL_RANK")
    return next((os.environ[name] for name in names if name in os.environ), "0") == "0"


def is_launched_by_lightning() -> bool:
    """Whether Lightning started this process as a further rank, rather than a user, torchrun or srun."""
    others = ("TORCHELASTIC_RUN_ID", "SLURM_PROCID")
    return os.environ.get("LOCAL_RANK", "0") != "0" and not any(name in os.environ for name in others)


def follows_first_task() -> bool:
    """Whether srun started this process and it is not the one whose exit code counts."""
    return os.environ.get("SLURM_PROCID", "0") != "0"


def is_requeued() -> bool:
    """Whether SLURM has started this job before."""
    return os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
