"""What ``lit-fsdp doctor`` finds on one machine, judged: versions, devices, limits, disks and the hub.

Nothing here imports torch, which may be what is broken: a process of its own is asked for the devices.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

MIB, GIB = 2**20, 2**30
Grade = Literal["ok", "warn", "fail"]
_SHM = "/dev/shm"  # noqa: S108 (its size is looked at)
_SHM_BYTES_PER_PROCESS = 256 * MIB  # for NCCL, and for batches that loader workers hand over
_CACHE_BYTES = 2 * GIB


@dataclass(frozen=True)
class Row:
    """What was looked at, what was found, and what to do about it."""

    name: str
    found: str
    grade: Grade = "ok"
    fix: str = ""


@dataclass
class Report:
    """Everything that was found, on one machine or on all ranks of a job."""

    rows: list[Row] = field(default_factory=list)
    rates: list[dict[str, Any]] = field(default_factory=list)
    """Of the timed all-reduce: ``bytes``, ``ms`` of the slowest rank, ``ranks``, ``bus_gb_per_second``."""

    @property
    def exit_code(self) -> int:
        """1 if a row is ``fail``."""
        return int(any(row.grade == "fail" for row in self.rows))


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What the recipe asks of the machine; without one, the defaults."""

    run_folder: Path  # as the cache, it may not be there yet
    cache: Path
    accelerator: str | None = None  # as the Trainer takes it
    devices: int | None = None  # per node; None: all that are there
    nodes: int = 1
    precision: str | None = None  # mode of the strategy
    model: str | None = None  # hub name, folder or file; None: random init
    checkpoint_bytes: int | None = None  # of one; None: not known
    num_checkpoints: int = 0  # on the disk at the same time, the one being written included
    copies_to_host: bool = False  # before a save in the background


def judged(name: str, found: str, is_ok: bool, fix: str, otherwise: Grade = "fail") -> Row:
    """Build a row that is ok, or has another grade and its fix."""
    return Row(name, found) if is_ok else Row(name, found, otherwise, fix)


def gib(num_bytes: float) -> str:
    """Format bytes as GiB."""
    return f"{num_bytes / GIB:.4g} GiB"


def nearest(folder: Path) -> Path:
    """Return the folder itself or the closest one above it that exists, links followed."""
    folder = folder.expanduser().absolute()
    return next(path for path in (folder, *folder.parents) if path.is_dir()).resolve()


def ask_torch(seconds: float = 120) -> dict[str, Any]:
    """Run :func:`lit_fsdp.launch.doctor_ranks.device_facts` in a process of its own; ``{"error": why}`` if it fails."""
    words = [sys.executable, "-m", "lit_fsdp.launch.doctor_ranks"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=seconds, check=False)  # noqa: S603
        return json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"error": f"no answer in {seconds:.0f} s"}
    except (IndexError, ValueError):
        return {"error": " ".join(done.stderr.split())[-300:] or f"ended with exit code {done.returncode}"}


def judge_machine(wanted: Wanted, facts: Mapping[str, Any], processes: int) -> list[Row]:
    """Judge this machine by the facts of :func:`ask_torch`, for ``processes`` on the devices and cores seen."""
    rows = [*judge_versions(), *judge_devices(facts, wanted, processes)]
    return [*rows, *judge_host(wanted, processes), *judge_disks(wanted), *judge_hub(wanted.model)]


def judge_versions() -> list[Row]:
    """Compare each package that a run imports with the floors of our own metadata."""
    from packaging.requirements import Requirement
    from packaging.version import Version

    rows = [Row("Python", platform.python_version())]
    try:
        lines = importlib.metadata.requires("lit-fsdp") or ()
    except importlib.metadata.PackageNotFoundError:
        found = "not installed, so the versions it needs are not known"
        return [*rows, Row("lit-fsdp", found, "warn", "python -m pip install -e . in the checkout")]
    for need in map(Requirement, lines):
        if need.marker is None or need.marker.evaluate({"extra": ""}):
            version = next((d.version for d in importlib.metadata.distributions(name=need.name)), None)
            fix = f'python -m pip install "{need.name}{need.specifier}"'
            # containers ship 2.11.0a0+... as their 2.11
            is_ok = version is not None and need.specifier.contains(Version(version).base_version)
            rows.append(judged(need.name, f"{version or 'not installed'} ({need.specifier})", is_ok, fix))
    return rows


def judge_devices(facts: Mapping[str, Any], wanted: Wanted, processes: int) -> list[Row]:
    """Judge torch, GPUs, precision and NCCL."""
    if "error" in facts:
        return [Row("torch loads", facts["error"], "fail", "install torch again: pytorch.org/get-started")]
    gpus, build, in_dev = facts["gpus"], facts["build"], facts["device_files"]
    if wanted.accelerator == "cpu":
        return [Row("GPUs", f"{len(gpus)}, not used: the recipe is for the CPU (torch for {build})")]
    if not gpus:
        fix = "see nvidia-smi; in a job --gpus-per-node, in a container --gpus all; or a torch built for the driver"
        found = f"none (torch for {build}: {facts['why_not']}); {in_dev} in /dev"
        return [Row("GPUs", found, "fail" if wanted.accelerator in ("gpu", "cuda") or in_dev else "warn", fix)]
    kinds = sorted({f"{gpu['name']} {gpu['gib']:.0f} GiB" for gpu in gpus})
    found = f"{len(gpus)} × {', '.join(kinds)} (torch for {build}, driver {facts['driver']})"
    fix = f"set trainer.devices: {len(gpus)}, or run where there are {processes}"
    rows = [judged("GPUs", found, len(gpus) >= processes, fix)]
    needs = {"mixed": "bf16", "low_precision": "bf16", "fp8": "fp8"}.get(wanted.precision or "", "")
    found = f"{'' if facts['bf16'] else 'no '}bf16, {'' if facts['fp8'] else 'no '}fp8 in hardware"
    fix = f"set precision: {'mixed' if facts['bf16'] else 'fp16_mixed'}, or use a newer GPU"
    rows.append(judged("precision", found, not needs or facts[needs], fix))
    found, fix = f"{facts['nccl'] or 'not in this torch'}", "install a CUDA build of torch"
    return [*rows, judged("NCCL", found, facts["nccl"] is not None, fix)]


def judge_host(wanted: Wanted, processes: int) -> list[Row]:
    """Judge shared memory, host memory and cores."""
    free = shutil.disk_usage(_SHM).free if os.path.isdir(_SHM) else 0
    fix = f"in a container --shm-size=16g or --ipc=host; else mount -o remount,size=16G {_SHM}"
    is_ok = free >= _SHM_BYTES_PER_PROCESS * processes
    otherwise: Grade = "warn" if free > 64 * MIB else "fail"  # which a container gets where nobody asked
    rows = [judged(_SHM, f"{gib(free)} free for {processes} process(es)", is_ok, fix, otherwise)]

    memory = dict(line.split(":") for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines())
    available = int(memory["MemAvailable"].split()[0]) * 1024
    needed = (wanted.checkpoint_bytes or 0) // wanted.nodes if wanted.copies_to_host else 0
    found = f"{gib(available)} available" + (f"; a background save copies {gib(needed)} of it" if needed else "")
    rows.append(judged("host memory", found, available >= needed, "set checkpoint.async_save: false, or add nodes"))

    cores = len(os.sched_getaffinity(0))
    fix = "set slurm.cpus_per_task, or srun --cpus-per-task=8: a rank has loader workers"
    return [*rows, judged("cores", f"{cores} for {processes} process(es)", cores >= max(2, processes), fix, "warn")]


def judge_disks(wanted: Wanted) -> list[Row]:
    """Judge the room for checkpoints and for the cache."""
    folder, count = nearest(wanted.run_folder / "checkpoints"), wanted.num_checkpoints
    free = shutil.disk_usage(folder).free
    found, needed = f"{gib(free)} free at {folder}", count * (wanted.checkpoint_bytes or 0)
    if count and wanted.checkpoint_bytes is None:
        row = Row("run folder", f"{found}; the size of a checkpoint is not known", "warn", "see the row on the model")
    else:
        found += f"; {count} checkpoint(s) of {gib(needed / count)} at a time" if count else ""
        fix = f"free {gib(needed - free)}, lower checkpoint.keep_last, or set another trainer.default_root_dir"
        row = judged("run folder", found, free >= needed, fix)
    cache = nearest(wanted.cache)
    free = shutil.disk_usage(cache).free
    is_ok, fix = os.access(cache, os.W_OK) and free >= _CACHE_BYTES, "set LIT_FSDP_CACHE (or data.cache_dir) elsewhere"
    return [row, judged("cache", f"{gib(free)} free at {cache}, to be written", is_ok, fix, "warn")]


def judge_hub(model: str | None) -> list[Row]:
    """Judge access to the Hugging Face hub and to the recipe's model; a token is never shown."""
    import huggingface_hub
    from huggingface_hub import constants

    found = f"cache {constants.HF_HUB_CACHE}, {'a token' if huggingface_hub.get_token() else 'no token'}"
    rows = [Row("hub", f"offline (HF_HUB_OFFLINE); {found}")]
    if not constants.HF_HUB_OFFLINE:
        try:
            huggingface_hub.utils.get_session().head(constants.ENDPOINT, timeout=5)
            rows = [Row("hub", f"{constants.ENDPOINT} answers; {found}")]
        except Exception as error:  # of whichever HTTP library the hub's client is built on
            fix = "fetch models where there is a network (lit-fsdp model prepare), then set HF_HUB_OFFLINE=1"
            rows = [Row("hub", f"{constants.ENDPOINT} cannot be reached ({error}); {found}", "warn", fix)]
    if model is None:
        return rows
    folder = Path(model).expanduser()
    if folder.exists() or model.startswith((".", "/", "~")) or model.endswith((".json", ".gguf")):
        is_there = folder.is_file() or (folder / "config.json").is_file()
        return [*rows, judged("model", model, is_there, "check model.name, and that this machine sees it")]
    is_there = False
    with contextlib.suppress(huggingface_hub.errors.LocalEntryNotFoundError):
        folder = Path(huggingface_hub.snapshot_download(model, local_files_only=True))
        is_there = any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))
    found = f"{model}: weights {'' if is_there else 'not '}in the hub's cache"
    fix = f"lit-fsdp model prepare --name {model} where there is a network, with the same HF_HOME"
    return [*rows, judged("model", found, is_there, fix, "fail" if constants.HF_HUB_OFFLINE else "warn")]
