"""Files and folders of a job: whether they are there, seen from every node, and large enough."""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lit_fsdp.config.data import GENERATED, HUB_SLICE, check_sources
from lit_fsdp.config.run import RunConfig
from lit_fsdp.errors import ConfigError
from lit_fsdp.launch.slurm_facts import GIB, Facts, Found
from lit_fsdp.launch.slurm_job import IMAGES, Job

_LOCAL_PLACES = ("/tmp", "/var/tmp", "/dev/shm", "/run", "/scratch/local", "/local")  # noqa: S108 (named to refuse them)
_LOCAL_TYPES = ("tmpfs", "ramfs", "overlay", "squashfs")
_DISK_TYPES = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs")
_FILES_PER_RANK, _MORE_FILES = 3, 16
"""Of one checkpoint: tensors and state of each rank; manifest, common state, and what the model's folder brings."""


@dataclass(frozen=True)
class _Place:
    """A path that the job reads or writes."""

    field: str
    path: Path
    what: str
    """Why it has to be seen from every node."""
    fix: str
    is_read: bool = True
    """Whether it has to be there before."""


def place_is_shared(job: Job, run: RunConfig, facts: Facts) -> Found:
    """Refuse what only this node sees, for a job of several; say what cannot be known from here."""
    if job.nodes == 1:
        why = local_place(job.run_folder)
        if why:
            yield f"{job.run_folder} ({why}): the job finds its recipe there only if it runs on this very machine"
        return
    for place in _places(job, run, facts.environment):
        why = local_place(place.path)
        if why and (os.path.lexists(place.path) or not place.is_read):
            yield ConfigError(
                place.field,
                f"{place.path} ({why}), {place.what}",
                "a path on a file system that all nodes see",
                place.fix,
            )
    kind = file_system(job.run_folder)
    if kind in _DISK_TYPES:
        yield (
            f"{job.run_folder} lies on {kind}, a file system of this machine: whether other nodes see it too, as by "
            "NFS, --probe tells"
        )


def _places(job: Job, run: RunConfig, environment: Mapping[str, str]) -> Iterator[_Place]:
    to = "to a path on the shared file system"
    yield _Place(
        "trainer.default_root_dir",
        job.run_folder,
        "which every node has for itself",
        f"set trainer.default_root_dir {to}",
        False,
    )
    cache = Path(run.data.cache_dir or environment.get("LIT_FSDP_CACHE") or "~/.cache/lit_fsdp").expanduser().absolute()
    text = "where every node would tokenise and convert for itself"
    yield _Place("data.cache_dir", cache, text, f"set data.cache_dir, or LIT_FSDP_CACHE, {to}", False)
    for field, path in _read_paths(job, run):
        yield _Place(field, path, "which the other nodes do not have", f"move it, and set {field} {to}")
    if not job.config.container and job.command[0].startswith("/"):
        text = "the Python that no other node has"
        yield _Place("slurm.command", Path(job.command[0]), text, "install into a folder that all nodes see")
    if _asks_hub(run):
        default = Path(environment.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface"
        home = Path(environment.get("HF_HUB_CACHE") or environment.get("HF_HOME") or default).expanduser().absolute()
        yield _Place("HF_HOME", home, "where every node would fetch the model for itself", f"set HF_HOME {to}", False)


def _read_paths(job: Job, run: RunConfig) -> Iterator[tuple[str, Path]]:
    """What the job reads that is surely a path, by its key."""
    named: dict[str, str | None] = {"slurm.env_file": job.config.env_file}
    image = job.config.container
    if image and (_is_path(image) or image.endswith(IMAGES)):
        named["slurm.container"] = job.image
    if not run.model.miniature and isinstance(run.model.name, str):
        named["model.name"] = run.model.name if _is_path(run.model.name) or os.path.exists(run.model.name) else None
        tokenizer = run.model.tokenizer
        named["model.tokenizer"] = (
            tokenizer if tokenizer and (_is_path(tokenizer) or os.path.exists(tokenizer)) else None
        )
    named |= {field: _source_path(name) for field, name in _sources(run)}
    yield from ((field, Path(os.path.expanduser(text)).absolute()) for field, text in named.items() if text)


def _sources(run: RunConfig) -> Iterator[tuple[str, str]]:
    """The names of rows, by their keys."""
    for split in ("train", "val"):
        for i, entry in enumerate(check_sources(split, getattr(run.data, split))):
            yield f"data.{split}" + (f"[{i}]" if i else ""), entry.source


def _is_path(text: str) -> bool:
    return text.startswith((".", "/", "~"))


def _source_path(name: str) -> str | None:
    """The file or folder of a source of rows, of a pattern the part before it; ``None``: generated, or of the hub."""
    if name.startswith(GENERATED):
        return None
    path = os.path.expanduser(name)
    if glob.has_magic(name) and not os.path.exists(path):
        return str(Path(path[: next(i for i, c in enumerate(path) if c in "*?[")] + "x").parent)
    base = path.rpartition(":")[0]
    if base and not os.path.exists(path) and os.path.isdir(base):
        return base
    suffixes = (".jsonl", ".json", ".parquet", ".csv", ".tsv", ".arrow", ".gz")
    return path if os.path.exists(path) or _is_path(name) or name.endswith(suffixes) else None


def _matches_nothing(name: str) -> bool:
    """Whether a source is a pattern, and its folder, which is there, has no such file."""
    path = os.path.expanduser(name)
    is_pattern = glob.has_magic(name) and not (name.startswith(GENERATED) or HUB_SLICE.fullmatch(name))
    if not is_pattern or os.path.exists(path) or os.path.isdir(path.rpartition(":")[0]):
        return False
    if not os.path.isdir(_source_path(name) or "."):
        return False
    return not any(os.path.isfile(found) for found in glob.iglob(path, recursive=True))


def _asks_hub(run: RunConfig) -> bool:
    name = run.model.name
    return not run.model.miniature and isinstance(name, str) and not _is_path(name) and not os.path.exists(name)


def local_place(path: Path) -> str | None:
    """Why a path cannot be seen from other nodes, as far as it and its file system tell; links are followed."""
    for place in _LOCAL_PLACES:
        if path.is_relative_to(place) or path.resolve().is_relative_to(place):
            return f"{place} is a node's own"
    kind = file_system(path)
    return f"a {kind} of this node" if kind in _LOCAL_TYPES else None


def file_system(path: Path) -> str:
    """Type of the file system of the nearest folder that exists, by the mount table."""
    there = _nearest(path.resolve())
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


def files_exist(job: Job, run: RunConfig, facts: Facts) -> Found:
    """Refuse files that are missing; inside an image only what it cannot bring is looked for."""
    config = job.config
    for field, path in _read_paths(job, run):
        of_host = field in ("slurm.env_file", "slurm.container")
        if (of_host or not config.container) and not path.exists():
            yield ConfigError(field, f"{path}, which does not exist", "an existing file or folder", f"check {field}")
    for field, name in () if config.container else _sources(run):
        if _matches_nothing(name):
            given = f"{name}, a pattern that no file matches"
            yield ConfigError(field, given, "files that exist", f"check the path, from {Path.cwd()} on")
    if config.env_file and Path(config.env_file).expanduser().is_dir():
        yield ConfigError("slurm.env_file", config.env_file, "an existing shell file", "check the path")
    if not config.container and shutil.which(job.command[0]) is None:
        given = job.command[0]
        yield ConfigError("slurm.command", given, "a program that exists on the nodes", "give its whole path")
    if config.container:
        inside = [Path(mount.split(":")[1 if ":" in mount else 0]) for mount in job.mounts]
        unseen = [
            f"{field} {path}"
            for field, path in _read_paths(job, run)
            if not field.startswith("slurm.") and not any(path.is_relative_to(place) for place in inside)
        ]
        if unseen:
            yield f"below none of slurm.container_mounts, so the image has to bring it: {', '.join(unseen)}"


def disk_is_enough(job: Job, run: RunConfig, facts: Facts) -> Found:
    """Refuse a file system without room, or without files, for the checkpoints that lie there at the same time."""
    if facts.checkpoint_bytes is None:
        yield "free disk: not compared, as the model's config is not at hand"
        return
    kept = run.checkpoint
    count = facts.num_checkpoints
    if count is None:
        count = (2 if kept.keep_last == -1 else kept.keep_last) + kept.keep_best + 1  # and the one being written
        if kept.keep_last == -1 or kept.keep_every:
            yield "free disk: compared for the first few checkpoints only, as the run keeps more and more of them"
    runs = len(job.config.seeds or [0])
    place, each = _nearest(job.run_folder), facts.checkpoint_bytes / GIB
    needed, free = facts.checkpoint_bytes * count * runs, shutil.disk_usage(place).free + facts.kept_bytes
    fix = (
        "free space, name another trainer.default_root_dir, or keep fewer (checkpoint.keep_last, keep_best, keep_every)"
    )
    if free < needed:
        given = f"{count * runs} checkpoints of {each:.1f} GiB with {free / GIB:.1f} GiB free at {place}"
        yield ConfigError("checkpoint", given, f"{needed / GIB:.1f} GiB free", fix)
    files = count * runs * (_FILES_PER_RANK * job.world_size + _MORE_FILES)
    system = os.statvfs(place)
    if system.f_files and system.f_favail < files:  # 0: a file system that does not count them
        given = f"{count * runs} checkpoints of {job.world_size} ranks with {system.f_favail} files free at {place}"
        yield ConfigError("checkpoint", given, f"about {files} files (df -i)", fix)
    most = kept.max_total_gib
    if most is not None and most < each:
        given = f"{most} with checkpoints of {each:.1f} GiB"
        yield ConfigError(
            "checkpoint.max_total_gib", given, "room for one at least", f"write {count * each:.0f}, or null"
        )
