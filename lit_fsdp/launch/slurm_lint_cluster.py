"""A job against the partitions of the cluster: sbatch takes some jobs that can never start."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence

from lit_fsdp.config.run import RunConfig
from lit_fsdp.config.slurm import time_seconds
from lit_fsdp.errors import ConfigError
from lit_fsdp.launch.slurm_client import run_slurm
from lit_fsdp.launch.slurm_facts import Facts, Found, Partition
from lit_fsdp.launch.slurm_job import Job

_GPU = re.compile(r"(?:^|,)gpu(?::[^:,()]+)?:(\d+)")
_SECONDS = 10.0


def ask_partitions() -> tuple[Partition, ...]:
    """The partitions of this cluster, by sinfo.

    Raises:
        SlurmError: It is not installed, or the controller does not answer.
    """
    return parse_partitions(run_slurm(["sinfo", "--noheader", "--exact", "-o", "%P|%l|%s|%D|%c|%G"], _SECONDS))


def parse_partitions(text: str) -> tuple[Partition, ...]:
    """Partitions from sinfo's ``%P|%l|%s|%D|%c|%G``: name, time limit, nodes per job, nodes, cores, other resources.

    Source: ``man sinfo``, ``--format``.
    """
    found = []
    for line in text.splitlines():
        words = line.strip().split("|")
        if len(words) != 6 or not words[3].isdigit():
            continue
        name, limit, size, nodes, cpus, gres = words
        most = size.rpartition("-")[2]
        found.append(
            Partition(
                name=name.rstrip("*"),
                is_default=name.endswith("*"),
                time_limit=_limit_seconds(limit),
                max_nodes=int(most) if most.isdigit() else None,
                nodes=int(nodes),
                cpus=int(cpus.rstrip("+") or 0),
                gpus=sum(map(int, _GPU.findall(gres))),
            )
        )
    return tuple(found)


def _limit_seconds(text: str) -> int | None:
    """``None`` also for what is no time that a job can have."""
    try:
        return None if text.lower() in ("infinite", "n/a", "unlimited") else time_seconds(text)
    except ConfigError:
        return None


def time_limit(job: Job, facts: Facts) -> tuple[str, str | None, str]:
    """The key that sets the job's time limit, its value (``None``: the partition's holds), and how to begin a fix.

    Raises:
        ConfigError: The variable of this shell that sets it is no time.
    """
    given = facts.environment.get("SBATCH_TIMELIMIT")
    if job.config.time is not None or given is None:
        return "slurm.time", None if job.config.time is None else str(job.config.time), ""
    try:
        time_seconds(given)
    except ConfigError as error:
        raise ConfigError("SBATCH_TIMELIMIT", error.given, error.allowed, "unset SBATCH_TIMELIMIT") from None
    return "SBATCH_TIMELIMIT", given, "unset SBATCH_TIMELIMIT, and "


def partition_has_it(job: Job, run: RunConfig, facts: Facts) -> Found:
    """Refuse what no node of the partition, or too few, can give, and more time than it allows."""
    if facts.partitions is None:
        yield f"the cluster's limits: not compared ({facts.no_partitions})"
        return
    given = job.config.partition or facts.environment.get("SBATCH_PARTITION")
    names = given.split(",") if given else [p.name for p in facts.partitions if p.is_default]
    known = list(dict.fromkeys(p.name for p in facts.partitions))
    problems: list[list[ConfigError]] = []
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1) or known[:1]
            fix = f"set slurm.partition: {near[0]}" if near else "see sinfo"
            yield ConfigError("slurm.partition", name, f"a partition of this cluster: {', '.join(known)}", fix)
            return
        alike = [p for p in facts.partitions if p.name == name]
        problems.append([*_too_long(job, facts, alike[0]), *_problems(job, name, alike)])
    if problems and all(problems):  # of several partitions one that can is enough
        yield from problems[0]


def _too_long(job: Job, facts: Facts, partition: Partition) -> Iterator[ConfigError]:
    field, given, first = time_limit(job, facts)
    wanted = None if given is None else time_seconds(given)
    if given is not None and partition.time_limit is not None and (wanted is None or wanted > partition.time_limit):
        text = _as_time(partition.time_limit)
        fix = f'{first}set slurm.time: "{text}"'
        yield ConfigError(field, f"{given} in partition {partition.name}", f"at most {text}", fix)


def _problems(job: Job, name: str, alike: Sequence[Partition]) -> Iterator[ConfigError]:
    cpus = job.tasks_per_node * (job.config.cpus_per_task or 1)
    most_gpus, most_cpus = max(p.gpus for p in alike), max(p.cpus for p in alike)
    if job.gpus_per_node > most_gpus:
        fix = (
            f"set slurm.gpus_per_node: {most_gpus}" if most_gpus else "name another slurm.partition (sinfo -o '%P %G')"
        )
        given = f"{job.gpus_per_node} in partition {name}"
        yield ConfigError("slurm.gpus_per_node", given, f"at most {most_gpus}, as its nodes have", fix)
    elif cpus > most_cpus:
        given = f"{job.tasks_per_node} tasks of {job.config.cpus_per_task or 1} cores per node in partition {name}"
        fix = f"set slurm.cpus_per_task: {most_cpus // job.tasks_per_node}"
        if most_cpus < job.tasks_per_node:
            fix = "start fewer processes per node, or name another slurm.partition"
        yield ConfigError("slurm.cpus_per_task", given, f"{most_cpus} cores, as its nodes have", fix)
    else:
        able = sum(p.nodes for p in alike if p.gpus >= job.gpus_per_node and p.cpus >= cpus)
        most = min(able, alike[0].max_nodes or able)
        if job.nodes > most:
            yield ConfigError(
                "slurm.nodes",
                f"{job.nodes} in partition {name}",
                f"at most {most}",
                f"give --nodes {most}, or name another slurm.partition",
            )


def _as_time(seconds: int) -> str:
    days, rest = divmod(seconds, 86400)
    text = f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days}-{text}" if days else text
