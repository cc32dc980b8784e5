"""What would fail an hour later, said before a job is submitted."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lit_fsdp.config.mesh import mesh_shape
from lit_fsdp.config.run import STRATEGY, RunConfig
from lit_fsdp.config.slurm import time_seconds
from lit_fsdp.errors import ConfigError
from lit_fsdp.launch.slurm_job import Job

GIB = 2**30
START_SECONDS = 300
"""Allowed for starting, loading and the first step."""
STEP_SECONDS = 30
"""Allowed for the step that is under way when the signal comes."""
_WRITE_BYTES_PER_SECOND_PER_NODE = GIB / 2
"""Assumed where nothing was measured: a shared file system under load, all ranks of a node together."""
_LOCAL_PLACES = ("/tmp", "/var/tmp", "/dev/shm", "/run", "/scratch/local", "/local")  # noqa: S108 (named to refuse them)
_LOCAL_TYPES = ("tmpfs", "ramfs", "overlay", "squashfs")
# Options that our script sets itself or that make one task per GPU impossible: what to use instead
_NOT_EXTRA = {
    "--ntasks": "slurm.gpus_per_node (tasks per node follow)",
    "-n": "slurm.gpus_per_node (tasks per node follow)",
    "--ntasks-per-node": "slurm.gpus_per_node",
    "--ntasks-per-gpu": "slurm.gpus_per_node",
    "--gpus-per-task": "slurm.gpus_per_node: with --gpus-per-task each process sees one GPU alone, and NCCL no peers",
    "--gpus": "slurm.gpus_per_node",
    "-G": "slurm.gpus_per_node",
    "--gpus-per-node": "slurm.gpus_per_node",
    "--gres": "slurm.gpus_per_node",
    "--nodes": "slurm.nodes",
    "-N": "slurm.nodes",
    "--signal": "slurm.signal_lead_seconds",
    "--requeue": "slurm.requeue",
    "--no-requeue": "slurm.requeue",
    "--output": "the run folder, where all output goes",
    "-o": "the run folder, where all output goes",
    "--array": "slurm.seeds",
    "-a": "slurm.seeds",
    "--time": "slurm.time",
    "-t": "slurm.time",
    "--wrap": "lit-fsdp slurm submit, whose script this is",
    "--parsable": "nothing: it is given already",
}
_LAUNCHERS = re.compile(r"(^|[\s;&|(])(srun|salloc|sbatch|mpirun|mpiexec|torchrun|accelerate launch)(\s|$)")
_INTERACTIVE = re.compile(r"(^|\s)(--pty|read|(?:ba|z|da)?sh\s+-i)(\s|$)")


@dataclass(frozen=True)
class Facts:
    """What lint knows beside the recipe."""

    checkpoint_bytes: int | None
    """Of one checkpoint, from shapes; ``None`` where the model's config is not at hand."""
    save_seconds: float | None
    """Measured in this run folder; ``None``: estimated from the bytes."""
    environment: Mapping[str, str]
    """Of the shell that submits."""


def lint(job: Job, run: RunConfig, facts: Facts) -> tuple[list[ConfigError], list[str]]:
    """Everything that is wrong with a job, and remarks on what could not be checked.

    Args:
        job: What would be submitted.
        run: Its checked recipe.
        facts: From outside of the recipe.

    Returns:
        Errors in the order in which they are best mended, and notes.
    """
    errors: list[ConfigError] = []
    notes: list[str] = []
    for check in CHECKS:
        for found in check(job, run, facts):
            (errors if isinstance(found, ConfigError) else notes).append(found)  # type: ignore[arg-type]
    return errors, notes


Found = Iterator[ConfigError | str]


def _groups_are_whole_nodes(job: Job, run: RunConfig, facts: Facts) -> Found:
    if not run.strategy.is_hybrid or job.nodes == 1:
        return
    _, shards = mesh_shape(run.strategy, job.nodes, job.world_size, STRATEGY)
    if shards % job.tasks_per_node:
        yield ConfigError(
            f"{STRATEGY}.shard_degree",
            f"groups of {shards} ranks on nodes of {job.tasks_per_node}, so that copies would be gathered across nodes",
            f"whole nodes: a multiple of {job.tasks_per_node}",
            f"set shard_degree: {job.tasks_per_node}, or leave both degrees out (one copy per node)",
        )


def _options_are_ours(job: Job, run: RunConfig, facts: Facts) -> Found:
    for index, option in enumerate(job.config.extra or []):
        name = re.split(r"[=\s]", option, maxsplit=1)[0]
        short = name[:2] if len(name) > 2 and not name.startswith("--") else name
        if name in _NOT_EXTRA or short in _NOT_EXTRA:
            allowed = _NOT_EXTRA.get(name) or _NOT_EXTRA[short]
            yield ConfigError(f"slurm.extra[{index}]", option, allowed, f"drop {name} from slurm.extra")


def _no_launcher_inside(job: Job, run: RunConfig, facts: Facts) -> Found:
    places = {f"slurm.setup[{i}]": line for i, line in enumerate(job.config.setup or [])}
    if job.config.command:
        places["slurm.command"] = " ".join(job.config.command)
    for field, line in places.items():
        found = _LAUNCHERS.search(line)
        if found:
            yield ConfigError(
                field,
                line,
                "no launcher: the script calls srun once, with one task per GPU",
                f"drop {found[2]} from {field}",
            )
        elif _INTERACTIVE.search(line):
            yield ConfigError(
                field, line, "nothing that waits for a terminal: a batch job has none", f"drop it from {field}"
            )


def _not_interactive(job: Job, run: RunConfig, facts: Facts) -> Found:
    if job.name in ("bash", "interactive"):
        yield ConfigError(
            "slurm.job_name",
            job.name,
            "another name: Lightning takes a job of this name for an interactive shell and starts processes of its own",
            "set slurm.job_name: finetune",
        )
    inside = facts.environment.get("SLURM_JOB_ID")
    if inside:
        yield ConfigError(
            "SLURM_JOB_ID",
            f"{inside}: this shell is inside a job, whose variables the new one would inherit",
            "a shell of a login node",
            "leave the allocation (exit) and submit again",
        )


def _time_is_enough(job: Job, run: RunConfig, facts: Facts) -> Found:
    seconds, how = save_seconds(job, facts)
    lead = job.config.signal_lead_seconds
    if seconds is None:
        yield "time of a save: not known without the model's config, so that slurm.time is not compared with it"
        return
    needed = int(seconds) + STEP_SECONDS
    if lead < needed:
        yield ConfigError(
            "slurm.signal_lead_seconds",
            f"{lead} with a save of about {seconds:.0f} s ({how}) and {STEP_SECONDS} s for the step before it",
            f">= {needed}",
            f"set slurm.signal_lead_seconds: {max(60, -(-needed * 3 // 2 // 10) * 10)}",
        )
    limit = None if job.config.time is None else time_seconds(str(job.config.time))
    least = START_SECONDS + max(lead, needed)
    if limit is not None and limit < least:
        yield ConfigError(
            "slurm.time",
            f"{job.config.time} ({limit} s); the start takes {START_SECONDS} s, the last save {max(lead, needed)} s",
            f"more than {least} s ({how})",
            f'set slurm.time: "{-(-2 * least // 3600):02d}:00:00"',
        )


def save_seconds(job: Job, facts: Facts) -> tuple[float | None, str]:
    """Seconds of one save, and whether that is measured or estimated."""
    if facts.save_seconds is not None:
        return facts.save_seconds, "measured in this run folder"
    if facts.checkpoint_bytes is None:
        return None, ""
    rate = _WRITE_BYTES_PER_SECOND_PER_NODE * job.nodes
    return facts.checkpoint_bytes / rate, f"estimated: {facts.checkpoint_bytes / GIB:.1f} GiB at {rate / GIB:.1f} GiB/s"


def _place_is_shared(job: Job, run: RunConfig, facts: Facts) -> Found:
    if job.nodes == 1:
        return
    why = local_place(job.run_folder)
    if why:
        yield ConfigError(
            "trainer.default_root_dir",
            f"{job.run_folder} ({why}), which every node has for itself",
            "a folder on a file system that all nodes see",
            "set trainer.default_root_dir to a folder on the shared file system",
        )
    cache = Path(run.data.cache_dir or facts.environment.get("LIT_FSDP_CACHE") or "~/.cache/lit_fsdp").expanduser()
    why = local_place(cache.absolute())
    if why:
        yield ConfigError(
            "data.cache_dir",
            f"{cache} ({why}), where every node would tokenise and convert for itself",
            "a folder on a file system that all nodes see",
            "set data.cache_dir, or LIT_FSDP_CACHE, to a folder on the shared file system",
        )


def local_place(path: Path) -> str | None:
    """Why a folder cannot be seen from other nodes, as far as its path and file system tell."""
    for place in _LOCAL_PLACES:
        if path.is_relative_to(place):
            return f"{place} is a node's own"
    kind = _file_system(path)
    return f"a {kind} of this node" if kind in _LOCAL_TYPES else None


def _file_system(path: Path) -> str:
    """Type of the file system of the nearest folder that exists, by the mount table."""
    there = _nearest(path)
    best, kind = "", ""
    with open("/proc/mounts", encoding="utf-8", errors="replace") as mounts:
        for line in mounts:
            _, point, found, *_ = line.split(" ")
            point = point.replace("\\040", " ")
            if there.is_relative_to(point) and len(point) >= len(best):
                best, kind = point, found
    return kind


def _nearest(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if os.path.isdir(folder)).resolve()


def _disk_is_enough(job: Job, run: RunConfig, facts: Facts) -> Found:
    if facts.checkpoint_bytes is None:
        yield "free disk: not compared, as the model's config is not at hand"
        return
    kept = run.checkpoint
    runs = len(job.config.seeds or [0])
    count = (2 if kept.keep_last == -1 else kept.keep_last) + kept.keep_best + 1  # and the one being written
    needed = facts.checkpoint_bytes * count * runs
    place = _nearest(job.run_folder)
    free, each = shutil.disk_usage(place).free, facts.checkpoint_bytes / GIB
    if free < needed:
        yield ConfigError(
            "checkpoint",
            f"{count * runs} checkpoints of {each:.1f} GiB with {free / GIB:.1f} GiB free at {place}",
            f"{needed / GIB:.1f} GiB free",
            "free space, name another trainer.default_root_dir, or keep fewer (checkpoint.keep_last, keep_best)",
        )


def _files_exist(job: Job, run: RunConfig, facts: Facts) -> Found:
    config = job.config
    if config.env_file and not Path(config.env_file).expanduser().is_file():
        yield ConfigError("slurm.env_file", config.env_file, "an existing shell file", "check the path")
    if not config.container:
        program = job.command[0]
        if shutil.which(program) is None:
            yield ConfigError("slurm.command", program, "a program that exists on the nodes", "give its whole path")


CHECKS: list[Callable[[Job, RunConfig, Facts], Found]] = [
    _not_interactive,
    _options_are_ours,
    _no_launcher_inside,
    _groups_are_whole_nodes,
    _time_is_enough,
    _place_is_shared,
    _disk_is_enough,
    _files_exist,
]
"""Each yields errors, and notes on what it could not check."""
