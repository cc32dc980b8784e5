"""What would fail an hour later, said before a job is submitted: errors; warnings where something is only assumed."""

from __future__ import annotations

import difflib
import glob
import math
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lit_fsdp.config.data import check_sources
from lit_fsdp.config.run import RunConfig
from lit_fsdp.config.slurm import time_seconds
from lit_fsdp.errors import ConfigError
from lit_fsdp.host import GIB, cache_root
from lit_fsdp.launch.slurm_job import Job, render

Found = Iterator[ConfigError | str]
"""Errors, and warnings as text."""
_STEP_SECONDS = 30
"""Allowed for the step that is under way when the signal comes and, on GPUs, the one after it."""
_WRITE_GIB_PER_SECOND_PER_NODE = 0.5
"""Assumed where nothing was measured: a shared file system under load, all ranks of a node together."""
_LOCAL_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm", "/run", "/scratch/local", "/local")  # noqa: S108 (named to refuse them)
_FILES = (".jsonl", ".json", ".parquet", ".csv", ".tsv", ".arrow", ".gz", ".gguf")
_LAUNCHERS = "srun|salloc|sbatch|mpirun|mpiexec|torchrun|deepspeed|accelerate launch"
_LAUNCHER = re.compile(rf"(?:^|[;&|({{]|\bexec|\btime)[ \t]*({_LAUNCHERS})(?=[ \t]+[^\s(]|[ \t]*$)", re.MULTILINE)
SINFO = "%P|%l|%D|%c|%m|%G"
"""Partition, time limit, nodes, cores, MiB and other resources (``man sinfo``, ``--format``)."""
_GPU = re.compile(r"(?:^|,)gpu(?::[^:,()]+)?:(\d+)")
_MIB = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known beside the recipe."""

    sinfo: str | None = None
    """What ``sinfo`` prints in the format :data:`SINFO`; ``None``: it does not answer."""
    checkpoint_bytes: int | None = None
    """Of one checkpoint, from shapes; ``None`` where the model's config is not at hand."""
    save_seconds: float | None = None
    """Measured in this run folder."""
    num_kept: int = 0
    """Checkpoints that lie in the run folder already."""
    living_jobs: Sequence[str] = ()
    """Numbers of earlier jobs of this run folder that wait or run."""


def check_job(job: Job, run: RunConfig, facts: Facts) -> tuple[list[ConfigError], list[str]]:
    """Return errors and warnings about a job, in the order in which they are best fixed."""
    checks = (
        _shell_is_whole,
        _cluster_has_it,
        _ranks_have_cores,
        _time_is_enough,
        _start_is_clear,
        _files_are_there,
    )
    found = [entry for check in checks for entry in check(job, run, facts)]
    return [e for e in found if isinstance(e, ConfigError)], [w for w in found if isinstance(w, str)]


def _start_is_clear(job: Job, run: RunConfig, facts: Facts) -> Found:
    """A used run folder is resumed or refused; what is resumed has to be there."""
    word, field = job.ckpt_path, "trainer.default_root_dir"
    if facts.living_jobs and not job.config.dependency:
        given = f"{job.run_folder}, whose job {', '.join(facts.living_jobs)} waits or runs"
        fix = f"scancel {facts.living_jobs[-1]}, or name another --{field}"
        yield ConfigError(field, given, "one job per run folder", fix)
    elif word is None and facts.num_kept:
        given = f"{job.run_folder}, which holds {facts.num_kept} checkpoint(s) of a run already"
        fix = f"give --ckpt_path last, or name another --{field}"
        yield ConfigError(field, given, "a new run folder, or a run to resume", fix)
    elif word in ("last", "best") and not facts.num_kept:
        yield ConfigError("ckpt_path", word, f"a checkpoint in {job.run_folder}, where there is none", "drop ckpt_path")
    elif word not in (None, "last", "best") and not Path(str(word)).is_dir():
        yield ConfigError("ckpt_path", word, "last, best, or a checkpoint's folder", "lit-fsdp ckpt ls RUN shows them")


def _shell_is_whole(job: Job, run: RunConfig, facts: Facts) -> Found:
    config, texts = job.config, {"slurm.setup": render(job)}
    if config.env_file and (path := Path(config.env_file).expanduser()).is_file():
        texts["slurm.env_file"] = path.read_text(encoding="utf-8", errors="replace")
    for field, text in texts.items():
        done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)  # noqa: S607
        if done.returncode:
            yield ConfigError(field, done.stderr.strip(), "lines that bash can read", f"fix {field}")
    added = "\n".join([*(config.setup or []), texts.get("slurm.env_file", ""), *(config.command or [])])
    if launcher := _LAUNCHER.search(added):
        yield f"{launcher[1]} in setup, env_file or command: the script calls srun itself, once, with all processes"


def _files_are_there(job: Job, run: RunConfig, facts: Facts) -> Found:
    """What is named must exist, and be seen from every node as far as its path tells."""
    local = []
    for field, path in _paths(job, run):
        is_output = field in ("trainer.default_root_dir", "data.cache_dir")
        if not is_output and not glob.glob(str(path)):
            yield ConfigError(field, f"{path}, which does not exist", "an existing file or folder", f"check {field}")
        elif why := node_local(path):
            local.append(f"{field} {path} ({why})")
    program = job.command[0]
    if not job.config.container and shutil.which(program) is None:
        yield f"slurm.command {program}: not on this machine; the nodes must have it"
    elif not job.config.container and (why := node_local(Path(program))):
        local.append(f"slurm.command {program} ({why})")
    if local:
        yield f"other nodes, and another one that the job may get, do not see: {'; '.join(local)}"


def _paths(job: Job, run: RunConfig) -> Iterator[tuple[str, Path]]:
    """What the job reads or writes that is surely a path, by its key; inside of an image, only what it cannot bring."""
    config = job.config
    yield "trainer.default_root_dir", job.run_folder
    yield "data.cache_dir", Path(run.data.cache_dir or cache_root()).expanduser().absolute()
    if config.env_file:
        yield "slurm.env_file", Path(config.env_file).expanduser().absolute()
    if config.container:
        if job.image.startswith("/"):
            yield "slurm.container", Path(job.image)
        return
    model = run.model
    named = [] if model.miniature else [("model.name", model.name), ("model.tokenizer", model.tokenizer)]
    for split in ("train", "val"):
        named += [(f"data.{split}", entry.source) for entry in check_sources(split, getattr(run.data, split))]
    for field, name in named:
        text = os.path.expanduser(name) if isinstance(name, str) else ""
        base = text.rpartition(":")[0]  # FOLDER:SPLIT
        path = Path(base if os.path.isdir(base) else text)
        if text and (text.startswith((".", "/")) or path.suffix in _FILES or path.exists()):
            yield field, path.absolute()


def node_local(path: Path) -> str | None:
    """Why a path cannot be seen from other nodes, as far as its name tells; links are followed."""
    paths = (path, path.resolve())
    return next((f"{f} is a node's own" for f in _LOCAL_FOLDERS for path in paths if path.is_relative_to(f)), None)


def _time_is_enough(job: Job, run: RunConfig, facts: Facts) -> Found:
    lead, seconds = job.config.signal_lead_seconds, facts.save_seconds
    if seconds is not None and lead < seconds + _STEP_SECONDS:
        given = f"{lead} with a save of {seconds:.0f} s, measured in this run folder, and a step before it"
        fix = f"set slurm.signal_lead_seconds: {int(1.5 * seconds) + _STEP_SECONDS}"
        yield ConfigError("slurm.signal_lead_seconds", given, f">= {seconds + _STEP_SECONDS:.0f}", fix)
    elif seconds is None and facts.checkpoint_bytes is None:
        yield "the time of a save is not known, as the model's config is not at hand"
    elif seconds is None and facts.checkpoint_bytes is not None:
        rate, size = _WRITE_GIB_PER_SECOND_PER_NODE * job.nodes, facts.checkpoint_bytes / GIB
        if lead < size / rate + _STEP_SECONDS:
            yield (
                f"slurm.signal_lead_seconds {lead}: a checkpoint of {size:.1f} GiB takes {size / rate:.0f} s if the "
                f"disk takes {rate:.1f} GiB/s, which nobody has measured; what is not saved by the time limit is lost"
            )
    limit = None if job.config.time is None else time_seconds(str(job.config.time))
    if limit is not None and limit <= lead:
        yield (
            f"slurm.time {job.config.time} is not longer than slurm.signal_lead_seconds {lead}: the job is told to "
            "stop as it starts; set slurm.signal_lead_seconds: 30 to rehearse"
        )


def _cluster_has_it(job: Job, run: RunConfig, facts: Facts) -> Found:
    """Whether a partition that the job may use has such nodes and allows the time: sbatch takes jobs that wait on."""
    rows = [line.strip().split("|") for line in (facts.sinfo or "").splitlines() if line.count("|") == 5]  # sites greet
    if not rows:
        yield "the cluster's limits are not compared: sinfo does not answer"
        return
    given = job.config.partition or os.environ.get("SBATCH_PARTITION")
    names = given.split(",") if given else {row[0].rstrip("*") for row in rows if row[0].endswith("*")}
    problems = [_lacking(job, name, rows) for name in names]
    yield from [problem for problem in problems if problem][:1] if all(problems) else []  # one that can is enough


def _lacking(job: Job, name: str, rows: list[list[str]]) -> ConfigError | None:
    """What the nodes of one partition, of which those that are alike share a row, cannot give."""
    config, own = job.config, [row for row in rows if row[0].rstrip("*") == name]
    if not own:
        known = sorted({row[0].rstrip("*") for row in rows})
        near = difflib.get_close_matches(name, known, n=1) or known
        return ConfigError("slurm.partition", name, ", ".join(known), f"set slurm.partition: {near[0]}")
    limit = own[0][1]
    has_limit = config.time is not None and limit[0].isdigit()
    if has_limit and (time_seconds(str(config.time)) or math.inf) > (time_seconds(limit) or math.inf):
        given = f"{config.time} in partition {name}"
        return ConfigError("slurm.time", given, f"at most {limit}", f'set slurm.time: "{limit}"')
    number, unit = re.findall(r"(\d*)(\w?)", str(config.mem or 0))[0]
    wanted = {
        "slurm.gpus_per_node": job.gpus_per_node,
        "slurm.cpus_per_task": job.tasks_per_node * (config.cpus_per_task or 1),
        "slurm.mem": int(number or 0) * _MIB.get(unit.upper(), 1),
    }
    able = [
        (int(row[2]), (sum(map(int, _GPU.findall(row[5]))), int(row[3].rstrip("+")), int(row[4].rstrip("+"))))
        for row in own
    ]
    here = " or ".join(f"{count} with {has[0]} GPUs, {has[1]} cores and {has[2]} MiB" for count, has in able)
    for i, (field, needed) in enumerate(wanted.items()):
        able = [(count, has) for count, has in able if has[i] >= needed]
        if not able:
            given = f"{needed:g} per node in partition {name}"
            return ConfigError(field, given, f"what its nodes have: {here}", "ask for less, or name another partition")
    least, most = min(job.node_counts or [job.nodes]), sum(count for count, _ in able)
    given, allowed = f"{job.nodes} in partition {name}", f"at most {most} that can take it, of {here}"
    return ConfigError("slurm.nodes", given, allowed) if least > most else None


def _ranks_have_cores(job: Job, run: RunConfig, facts: Facts) -> Found:
    if job.gpus_per_node and job.config.cpus_per_task is None:
        yield "slurm.cpus_per_task is not set: SLURM gives each rank one core; set it to the node's cores / GPUs"
