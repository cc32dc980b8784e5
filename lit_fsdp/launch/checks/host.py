"""Shared memory, limits, host memory and cores of one machine."""

from __future__ import annotations

import os
import resource
import shutil
from dataclasses import dataclass
from pathlib import Path

from lit_fsdp.launch.checks.row import MIB, Grade, Row, Wanted, size_text

SHM = "/dev/shm"  # noqa: S108 (its size is looked at)
_SHM_BYTES_PER_PROCESS = 256 * MIB
"""NCCL takes about 10 MB per pair of local ranks without peer access, and loader workers pass batches through it."""
_OPEN_FILES = {"bad": 1024, "warning": 4096}
"""Below the first a few hundred ranks' sockets and a sharded checkpoint's files do not fit beside each other."""
_MEMLOCK_BYTES = 64 * MIB
"""InfiniBand registers its buffers as locked memory; sites set it to unlimited."""


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """What the kernel says; ``None`` where it does not."""

    shm_total: int | None
    shm_free: int | None
    open_files: int
    """Soft limit; -1: none."""
    open_files_hard: int
    memlock: int
    """Bytes; -1: no limit."""
    memory_total: int | None
    memory_available: int | None
    cores: int
    """That this process may use."""
    is_task: bool
    """Whether srun gave these cores to this process alone, and others to its neighbours."""
    has_infiniband: bool


def host_facts() -> HostFacts:
    """The facts of this machine, with the limits of a control group where one is set."""
    total, available = _memory()
    try:
        shm = shutil.disk_usage(SHM)
    except OSError:
        shm = None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    several = int(os.environ.get("SLURM_STEP_NUM_TASKS") or 1) > 1
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return HostFacts(
        shm_total=None if shm is None else shm.total,
        shm_free=None if shm is None else shm.free,
        open_files=_limit(soft),
        open_files_hard=_limit(hard),
        memlock=_limit(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        memory_total=total,
        memory_available=available,
        cores=cores,
        is_task=several and cores < (os.cpu_count() or 1),
        has_infiniband=Path("/sys/class/infiniband").is_dir() and any(Path("/sys/class/infiniband").iterdir()),
    )


def judge_host(facts: HostFacts, wanted: Wanted, processes: int) -> list[Row]:
    """Rows on one machine.

    Args:
        facts: Of it.
        wanted: By the recipe.
        processes: That will run on it.
    """
    return [
        _shared_memory(facts, processes),
        _open_files(facts),
        _locked_memory(facts),
        _host_memory(facts, wanted),
        _cores(facts, processes),
    ]


def _shared_memory(facts: HostFacts, processes: int) -> Row:
    if facts.shm_total is None or facts.shm_free is None:
        return Row(SHM, "not there", "bad", "mount a tmpfs there; in a container: --shm-size=16g, or --ipc=host")
    found = f"{size_text(facts.shm_total)}, {size_text(facts.shm_free)} free"
    needed = _SHM_BYTES_PER_PROCESS * processes
    fix = f"docker run --shm-size=16g or --ipc=host; on a machine: mount -o remount,size=16G {SHM}"
    if facts.shm_total <= 64 * MIB or facts.shm_free < 16 * MIB:  # 64 MiB: what a container gets where nobody asked
        return Row(SHM, f"{found}: too little for NCCL and for the workers that load data", "bad", fix)
    if facts.shm_free < needed:
        return Row(SHM, f"{found}; about {size_text(needed)} for {processes} processes", "warning", fix)
    return Row(SHM, found)


def _open_files(facts: HostFacts) -> Row:
    limit, hard = facts.open_files, facts.open_files_hard
    name, found = "open files", f"{limit if limit >= 0 else 'no limit'} (ulimit -n)"
    if limit < 0 or limit >= _OPEN_FILES["warning"]:
        return Row(name, found)
    within = hard < 0 or hard >= _OPEN_FILES["warning"]
    fix = f"ulimit -n {65536 if hard < 0 else min(hard, 65536)} before the run, or a slurm.setup line"
    if not within:
        fix = f"the hard limit is {hard}: raise it in /etc/security/limits.conf (nofile), for jobs slurmd's LimitNOFILE"
    return Row(name, found, "bad" if limit < _OPEN_FILES["bad"] else "warning", fix)


def _locked_memory(facts: HostFacts) -> Row:
    name = "locked memory"
    if facts.memlock < 0:
        return Row(name, "no limit (ulimit -l)")
    found = f"{size_text(facts.memlock)} (ulimit -l)"
    if not facts.has_infiniband:
        return Row(name, f"{found}; no InfiniBand here, which would need more")
    fix = "ulimit -l unlimited; for jobs: LimitMEMLOCK=infinity of slurmd, PropagateResourceLimitsExcept=MEMLOCK"
    grade: Grade = "bad" if facts.memlock < _MEMLOCK_BYTES else "warning"
    return Row(name, f"{found} with InfiniBand, which locks its buffers", grade, fix)


def _host_memory(facts: HostFacts, wanted: Wanted) -> Row:
    name = "host memory"
    if facts.memory_total is None or facts.memory_available is None:
        return Row(name, "not told by this system", "warning", "see that a node's part of a checkpoint fits")
    found = f"{size_text(facts.memory_total)}, {size_text(facts.memory_available)} available"
    if wanted.checkpoint_bytes is None or not wanted.copies_to_host:
        return Row(name, found)
    needed = wanted.checkpoint_bytes // wanted.nodes
    if facts.memory_available < needed:
        text = f"{found}; a save in the background copies a node's part of a checkpoint, {size_text(needed)}, into it"
        fix = "set checkpoint.async_save: false, ask for more (slurm.mem: 0 for all of a node), or use more nodes"
        return Row(name, text, "bad", fix)
    return Row(name, found)


def _cores(facts: HostFacts, processes: int) -> Row:
    needed = 2 if facts.is_task else processes  # a process of its own, and its loaders
    found = f"{facts.cores} for {'this task' if facts.is_task else f'{processes} process(es)'}"
    if facts.cores < needed:
        fix = "set slurm.cpus_per_task, or srun --cpus-per-task=8 --cpu-bind=cores"
        return Row("cores", f"{found}: they would wait for each other", "warning", fix)
    return Row("cores", found)


def _limit(value: int) -> int:
    return -1 if value == resource.RLIM_INFINITY else value


def _memory() -> tuple[int | None, int | None]:
    """Total and available bytes, by the kernel and by the control group, whichever is less."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines())
        total, available = (int(lines[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError):
        return None, None
    limit, used = _number("/sys/fs/cgroup/memory.max"), _number("/sys/fs/cgroup/memory.current")
    if limit is not None and limit < total:
        return limit, min(available, max(0, limit - (used or 0)))
    return total, available


def _number(path: str) -> int | None:
    try:
        return int(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # not there, or the word max
        return None
