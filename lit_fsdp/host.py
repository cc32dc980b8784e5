"""This process and its host: rank, job, caches, and folders that one process creates for all."""

import atexit
import ctypes
import errno
import functools
import gc
import json
import logging
import os
import platform
import random
import shutil
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lit_fsdp.errors import CheckpointError

GIB = 2**30
EXIT_DIR = "LIT_FSDP_EXIT_DIR"
"""Environment variable with the folder for the exit codes of a job's ranks; set by the batch script."""
EXIT_LOST = 76
"""Exit code of a rank that lost the others; the batch script of a job may restart it."""
GO = "LIT_FSDP_GO"
"""Environment variable with the file descriptor on which a rank waits for the first rank, which started it."""
FIRST = "LIT_FSDP_FIRST"
"""Environment variable with the process ID of the rank that starts the others on its machine."""
_log = logging.getLogger(__name__)
_PORTS = range(10000, 20000)
"""Below the ports of outgoing connections, which may use a port before rank 0 listens, and those of SLURM jobs."""
_RESERVED: deque[socket.socket] = deque()
_PAUSED = threading.Event()
"""Whether :func:`pause_collection` has disabled the garbage collector."""
_ISA_WITHOUT_BF16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI")


def json_bytes(content: object) -> bytes:
    """JSON in the layout of transformers."""
    return json.dumps(content, indent=2, sort_keys=True).encode() + b"\n"


def size_words(num_bytes: float) -> str:
    """``1.5 MiB`` for 1572864."""
    unit = "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if num_bytes < 1024:
            break
        num_bytes, unit = num_bytes / 1024, larger
    return f"{num_bytes:.0f} bytes" if unit == "bytes" else f"{num_bytes:.1f} {unit}"


def global_rank() -> int:
    """Global rank of this process under torchrun, srun or Lightning; 0 if it is alone."""
    if "RANK" in os.environ:
        return int(os.environ["RANK"])
    # ranks that Lightning starts inside a batch script all inherit SLURM_PROCID=0
    return max(int(os.environ.get(name) or 0) for name in ("SLURM_PROCID", "LOCAL_RANK"))


def is_first_process() -> bool:
    """Whether this process is the first rank, which prints and logs."""
    return global_rank() == 0 and os.environ.get("NODE_RANK", "0") == "0"


@functools.cache
def say_once(text: str) -> None:
    """Print a message to standard error, once per process."""
    print(text, file=sys.stderr)


def is_launched_by_lightning() -> bool:
    """Whether Lightning, not a user, torchrun or srun, started this process as a further rank."""
    is_other = "TORCHELASTIC_RUN_ID" in os.environ or os.environ.get("SLURM_PROCID", "0") != "0"
    return os.environ.get("LOCAL_RANK", "0") != "0" and not is_other


def follows_first_task() -> bool:
    """Whether this is a task of srun other than the first, so that its exit code does not count."""
    return os.environ.get("SLURM_PROCID", "0") != "0"


def is_requeued() -> bool:
    """Whether SLURM has started this job before."""
    return os.environ.get("SLURM_RESTART_COUNT", "0") != "0"


def may_restart() -> bool:
    """Whether torchrun starts the ranks again after a failure (``--max-restarts``)."""
    return os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"


def tell_job(name: str, text: str = "") -> None:
    """Write a small file atomically for the batch script of this job; do nothing outside of a job."""
    if folder := os.environ.get(EXIT_DIR):
        with suppress(OSError):  # then only srun's exit code counts
            partial = Path(folder, f".{name}.{global_rank()}")
            partial.write_text(f"{text}\n", encoding="ascii")
            partial.replace(Path(folder, name))


@contextmanager
def first_one_speaks() -> Iterator[None]:
    """Let only the first rank report an error that occurs on all ranks."""
    try:
        yield
    except BaseException:
        wait_for_first()
        raise


def wait_for_first() -> None:
    """Wait until the first rank, which started this one, is ready for the rendezvous; end if it fails before."""
    waiting = os.environ.pop(GO, None)
    if waiting is None:
        return
    if not os.read(int(waiting), 1):
        os._exit(1)  # the first rank reports the reason
    os.close(int(waiting))


def wait_until_orphaned(parent: int, pause: Callable[[], object]) -> None:
    """Return once ``parent`` has ended, or once ``pause``, called between checks, returns true."""
    while os.getppid() == parent and not pause():
        pass


def end_with_first(is_running: Callable[[], bool]) -> None:
    """Start a thread that ends this rank with ``EXIT_LOST`` if the rank that started it ends while ``is_running``.

    A rank waiting in NCCL would notice only at the timeout of the collective. If an agent (torchrun, srun, a shell)
    starts all ranks, its end says nothing about rank 0, and no thread is started.
    """
    parent = os.getppid()
    if os.environ.get(FIRST) != str(parent) or not is_launched_by_lightning():
        return

    def watch() -> None:
        wait_until_orphaned(parent, lambda: time.sleep(1.0))
        while not is_running():  # it may have ended normally
            time.sleep(1.0)
        text = f"[rank {global_rank()}] error: lost contact: the rank that started this one has ended; see its own log"
        with suppress(OSError):
            print(text, file=sys.stderr, flush=True)
        tell_job(f"exit.{global_rank()}", str(EXIT_LOST))
        os._exit(EXIT_LOST)

    threading.Thread(target=watch, name="first rank", daemon=True).start()


def can_listen(port: int) -> bool:
    """Whether this process can listen on a TCP port, as no other one does."""
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind(("", port))
        except OSError:
            return False
        except OverflowError:  # no port, of which torch will complain
            return True
    return True


def free_port() -> int:
    """Find a TCP port for the rendezvous that nobody listens on, and reserve it while this process lives.

    Only sockets that reuse addresses, as those of ``torch.distributed`` do, can listen on it in the meantime.
    """
    for port in random.SystemRandom().choices(_PORTS, k=200):  # equal seeds must not give the same port
        reserved = socket.socket()
        try:
            reserved.bind(("", port))
        except OSError:
            reserved.close()
            continue
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # now, as two of us could bind otherwise
        if not _RESERVED:
            atexit.register(_close_reserved)
        _RESERVED.append(reserved)
        if len(_RESERVED) > 16:
            _RESERVED.popleft().close()
        return port
    raise OSError(errno.EADDRINUSE, "no port is free")


def _close_reserved() -> None:
    """Close the reserved ports, as Python warns about sockets that are open at its end."""
    while _RESERVED:
        _RESERVED.pop().close()


def cache_root() -> Path:
    """``$LIT_FSDP_CACHE``, else ``~/.cache/lit_fsdp``."""
    return Path(os.environ.get("LIT_FSDP_CACHE") or "~/.cache/lit_fsdp").expanduser()


def cpu_has_bf16() -> bool:
    """Whether this CPU multiplies in bf16 (AVX512-BF16, AMX or Arm BF16) and ``ONEDNN_MAX_CPU_ISA`` allows it."""
    if os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper() in _ISA_WITHOUT_BF16:
        return False
    cpuinfo = Path("/proc/cpuinfo")
    flags = set(cpuinfo.read_text(encoding="utf-8").split()) if cpuinfo.is_file() else set()
    return not flags.isdisjoint(("avx512_bf16", "amx_bf16", "bf16"))  # bf16 is the flag of Arm


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_of_rank(ranks_here: int, steps_on_host: bool) -> int | None:
    """Compute threads of one of ``ranks_here`` ranks on this node: its share of the cores; None: leave unchanged.

    The variable ``OMP_NUM_THREADS`` takes precedence, except for torchrun's default of 1 if the optimizer steps on the
    host. With ``--cpus-per-task`` srun has already assigned cores to each task.
    """
    has_agent, given = "TORCHELASTIC_RUN_ID" in os.environ, os.environ.get("OMP_NUM_THREADS")
    if ranks_here == 1 or (given and not (given == "1" and has_agent and steps_on_host)):
        return None
    own = os.environ.get("SLURM_CPUS_PER_TASK")
    if own and not has_agent and os.environ.get("SLURM_NTASKS", "1") != "1":  # else the task itself starts the ranks
        return min(num_cores(), int(own))
    return max(1, num_cores() // ranks_here)


@contextmanager
def heavy_imports() -> Iterator[None]:
    """Pause the garbage collector while heavy packages are imported; see :func:`pause_collection`."""
    pause_collection()
    try:
        yield
    finally:
        resume_collection()


def pause_collection() -> None:
    """Disable the garbage collector until :func:`resume_collection`, unless torch is already imported.

    torch, Lightning and transformers create 700,000 objects that live as long as the process. Scanning them takes a
    quarter of their import time.
    """
    if "torch" not in sys.modules and gc.isenabled():
        gc.disable()
        _PAUSED.set()


def resume_collection() -> None:
    """Enable the paused garbage collector; until the exit it does not scan objects that exist now."""
    if _PAUSED.is_set():
        _PAUSED.clear()
        gc.freeze()
        if "triton" in sys.modules:  # its binding library would report leaks at exit
            atexit.register(gc.unfreeze)
        gc.enable()


def return_freed_memory() -> None:
    """Return freed memory to the system, if the C library supports it (glibc)."""
    # glibc keeps freed blocks of up to 32 MiB for later: loading a 135M model under FSDP1 left 210 MB too much
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def make_once(folder: Path, make: Callable[[Path], None], what: str) -> Path:
    """Create ``folder`` with ``make`` in a temporary folder and rename it when complete, unless it exists.

    One of several processes (also on several nodes with a shared file system) creates it and the others wait; if it is
    killed, the next takes over. If locks work per machine only, each machine creates one and the first is kept. The
    folder's name must identify the content, because an existing folder is reused; the log names ``what``.
    """
    from filelock import FileLock, Timeout  # takes a third of the time of --help

    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.parent / f"{folder.name}.lock")
        try:
            held = lock.acquire(timeout=0.2)
        except Timeout:
            _log.info("%s: waiting for another process (%s)", what, lock.lock_file)
            held = lock.acquire(poll_interval=0.2)
        with held:
            if not folder.is_dir():
                _make(folder, make, what)
    except OSError as error:
        raise CheckpointError(
            f"{what}: {folder} cannot be written ({error}); set data.cache_dir or LIT_FSDP_CACHE to another folder"
        ) from error
    return folder


def _make(folder: Path, make: Callable[[Path], None], what: str) -> None:
    _log.info("%s (cached in %s)", what, folder)
    # one per machine: this process holds the lock, so existing content was left by a killed process
    partial = folder.parent / f".{folder.name}.{platform.node()}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        make(partial)
        for path in [*partial.rglob("*"), partial]:
            path.chmod(0o755 if path.is_dir() else 0o644)  # safetensors makes files readable only by their owner
            sync(path)
        try:
            partial.rename(folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # another machine was first
                raise
        sync(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def sync(path: Path) -> None:
    """Flush a file's content, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
