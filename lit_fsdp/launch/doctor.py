"""Checks of ``lit-fsdp doctor`` on one machine: versions, devices and the disk of the run folder.

Nothing here imports torch, which may be broken: a separate process reports the devices.
"""

import importlib.metadata
import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lit_fsdp.host import size_words

MIB = 2**20
Grade = Literal["ok", "warn", "fail"]
_TORCH_SECONDS = 120


@dataclass(frozen=True)
class Row:
    """The result of one check, with its grade and fix."""

    name: str
    found: str
    grade: Grade = "ok"
    fix: str = ""


@dataclass
class Report:
    """All results, of one machine or of all ranks of a job."""

    rows: list[Row] = field(default_factory=list)
    rates: list[dict[str, Any]] = field(default_factory=list)
    """Results of the timed all-reduce: ``bytes``, ``ms`` of the slowest rank, ``ranks``, ``bus_gb_per_second``."""

    @property
    def exit_code(self) -> int:
        """1 if a row is ``fail``."""
        return int(any(row.grade == "fail" for row in self.rows))


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The requirements of the recipe; defaults without a recipe."""

    run_folder: Path  # may not exist yet
    accelerator: str | None = None  # the Trainer's argument
    devices: int | None = None  # per node; None: all available
    nodes: int = 1
    checkpoint_bytes: int | None = None  # per checkpoint; None: unknown
    num_checkpoints: int = 0  # on disk at the same time, including the one being written


def judged(name: str, found: str, is_ok: bool, fix: str) -> Row:
    """Build a row with grade ok, or with grade fail and its fix."""
    return Row(name, found) if is_ok else Row(name, found, "fail", fix)


def nearest(folder: Path) -> Path:
    """Return the folder or its closest existing parent, with links resolved."""
    folder = folder.expanduser().absolute()
    return next(path for path in (folder, *folder.parents) if path.is_dir()).resolve()


def ask_torch() -> dict[str, Any]:
    """Run :func:`lit_fsdp.launch.doctor_ranks.device_facts` in a separate process; ``{"error": why}`` if it fails."""
    words = [sys.executable, "-m", "lit_fsdp.launch.doctor_ranks"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_TORCH_SECONDS, check=False)  # noqa: S603
        return json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"error": f"no answer in {_TORCH_SECONDS} s"}
    except (IndexError, ValueError):
        return {"error": " ".join(done.stderr.split())[-300:] or f"ended with exit code {done.returncode}"}


def judge_machine(wanted: Wanted, facts: Mapping[str, Any], processes: int) -> list[Row]:
    """Judge this machine with the facts of :func:`ask_torch`, for ``processes`` processes."""
    return [*judge_versions(), *judge_devices(facts, wanted, processes), judge_disk(wanted)]


def judge_versions() -> list[Row]:
    """Compare each required package with the version range of our metadata."""
    from packaging.requirements import Requirement
    from packaging.version import Version

    rows = [Row("Python", platform.python_version())]
    try:
        lines = importlib.metadata.requires("lit-fsdp") or ()
    except importlib.metadata.PackageNotFoundError:
        found = "not installed, so the required versions are unknown"
        return [*rows, Row("lit-fsdp", found, "warn", "python -m pip install -e . in the checkout")]
    for need in map(Requirement, lines):
        if need.marker is None or need.marker.evaluate({"extra": ""}):
            version = next((d.version for d in importlib.metadata.distributions(name=need.name)), None)
            fix = f'python -m pip install "{need.name}{need.specifier}"'
            # NVIDIA containers ship 2.11.0a0+... as 2.11
            is_ok = version is not None and need.specifier.contains(Version(version).base_version)
            rows.append(judged(need.name, f"{version or 'not installed'} ({need.specifier})", is_ok, fix))
    return rows


def judge_devices(facts: Mapping[str, Any], wanted: Wanted, processes: int) -> list[Row]:
    """Judge torch, GPUs and NCCL."""
    if "error" in facts:
        return [Row("torch loads", facts["error"], "fail", "reinstall torch: pytorch.org/get-started")]
    gpus, build, in_dev = facts["gpus"], facts["build"], facts["device_files"]
    if wanted.accelerator == "cpu":
        return [Row("GPUs", f"{len(gpus)}, not used: the recipe is for the CPU (torch for {build})")]
    if not gpus:
        fix = "see nvidia-smi; in a job --gpus-per-node, in a container --gpus all; or a torch built for the driver"
        found = f"none (torch for {build}: {facts['why_not']}); {in_dev} in /dev"
        return [Row("GPUs", found, "fail" if wanted.accelerator in ("gpu", "cuda") or in_dev else "warn", fix)]
    kinds = sorted({f"{gpu['name']} {gpu['gib']:.0f} GiB" for gpu in gpus})
    found = f"{len(gpus)} × {', '.join(kinds)} (torch for {build}, driver {facts['driver']})"
    fix = f"set trainer.devices: {len(gpus)}, or run on {processes} GPUs"
    rows = [judged("GPUs", found, len(gpus) >= processes, fix)]
    if without := sorted({gpu["name"] for gpu in gpus if not gpu["has_bf16"]}):
        fix = "set trainer.strategy.init_args.precision: auto, which is fp32 there, or fp16_mixed"
        rows.append(Row("bf16", f"no instructions on {', '.join(without)}", "warn", fix))
    found, fix = f"{facts['nccl'] or 'not in this torch'}", "install a CUDA build of torch"
    return [*rows, judged("NCCL", found, facts["nccl"] is not None, fix)]


def judge_disk(wanted: Wanted) -> Row:
    """Judge the disk space for the checkpoints kept at the same time."""
    folder, count = nearest(wanted.run_folder / "checkpoints"), wanted.num_checkpoints
    free = shutil.disk_usage(folder).free
    found, needed = f"{size_words(free)} free at {folder}", count * (wanted.checkpoint_bytes or 0)
    if count and wanted.checkpoint_bytes is None:
        return Row("run folder", f"{found}; the checkpoint size is unknown", "warn", "check model.name")
    found += f"; {count} checkpoint(s) of {size_words(needed / count)} at a time" if count else ""
    fix = f"free {size_words(needed - free)}, lower checkpoint.keep_last, or set another trainer.default_root_dir"
    return judged("run folder", found, free >= needed, fix)
