"""Words in a job that would undo what its script sets up: options, names, inherited variables."""

from __future__ import annotations

import shlex

from lit_fsdp.config.run import RunConfig
from lit_fsdp.config.slurm import time_seconds
from lit_fsdp.errors import ConfigError
from lit_fsdp.launch.slurm_facts import Facts, Found
from lit_fsdp.launch.slurm_job import Job

_TASKS = "slurm.gpus_per_node (tasks per node follow)"
_GPUS = "slurm.gpus_per_node"
_ONE_GPU = f"{_GPUS}: with this each process sees one GPU alone, and NCCL no peers"
_FOLDER = "nothing: all output goes into the run folder"
# Options that our script sets itself or that make one task per GPU impossible: what to use instead
_NOT_EXTRA = {
    "--ntasks": _TASKS,
    "--ntasks-per-node": _TASKS,
    "--ntasks-per-gpu": _TASKS,
    "--ntasks-per-core": _TASKS,
    "--ntasks-per-socket": _TASKS,
    "--gpus-per-task": _ONE_GPU,
    "--tres-per-task": _ONE_GPU,
    "--gpu-bind": _ONE_GPU,
    "--gpus": _GPUS,
    "--gpus-per-node": _GPUS,
    "--gpus-per-socket": _GPUS,
    "--gres": _GPUS,
    "--nodes": "slurm.nodes",
    "--distribution": "nothing: ranks fill one node after the other, as sharding groups need it",
    "--signal": "slurm.signal_lead_seconds",
    "--requeue": "slurm.requeue",
    "--no-requeue": "slurm.requeue",
    "--output": _FOLDER,
    "--error": _FOLDER,
    "--open-mode": _FOLDER,
    "--chdir": "nothing: the job starts where it is submitted, which relative paths of the recipe mean",
    "--array": "slurm.seeds",
    "--time": "slurm.time",
    "--wrap": "nothing: the job runs the script of lit-fsdp slurm",
    "--wait": "lit-fsdp slurm submit --wait",
    "--parsable": "nothing: it is given already",
    **{
        f"--{key.replace('_', '-')}": f"slurm.{key}"
        for key in ("account", "constraint", "cpus_per_task", "dependency", "job_name", "mem", "partition", "qos")
    },
}
_SHORT = {
    **{"-n": "--ntasks", "-G": "--gpus", "-N": "--nodes", "-m": "--distribution", "-o": "--output", "-e": "--error"},
    **{"-D": "--chdir", "-a": "--array", "-t": "--time", "-W": "--wait", "-A": "--account", "-C": "--constraint"},
    **{"-c": "--cpus-per-task", "-d": "--dependency", "-J": "--job-name", "-p": "--partition", "-q": "--qos"},
}
_SHORTEST = 5
"""Letters by which sbatch may know an option, dashes included; a shorter beginning is not one of these alone."""


def options_are_ours(job: Job, run: RunConfig, facts: Facts) -> Found:
    """Refuse options of sbatch in ``slurm.extra`` that the script sets, however they are written."""
    for index, text in enumerate(job.config.extra or []):
        for word in sbatch_options(text):
            name = _full_name(word)
            if name is not None and not (name == "--gpu-bind" and text.partition("=")[2] == "none"):
                yield ConfigError(
                    f"slurm.extra[{index}]", text, _NOT_EXTRA[name], f"drop {word.partition('=')[0]} from slurm.extra"
                )
                break


def sbatch_options(text: str) -> list[str]:
    """The options in one entry of ``slurm.extra``, which becomes the rest of one ``#SBATCH`` line.

    The script quotes what stands after the first ``=``, so that there is no option behind it.
    """
    head, equals, _ = text.partition("=")
    try:
        words = shlex.split(head)
    except ValueError:
        words = head.split()
    return [word + ("=" if equals and i == len(words) - 1 else "") for i, word in enumerate(words) if word[:1] == "-"]


def _full_name(word: str) -> str | None:
    """The refused option that sbatch takes a word for; like every program it knows one by its beginning."""
    name = word.partition("=")[0]
    if not name.startswith("--"):
        return _SHORT.get(name[:2])
    if name in _NOT_EXTRA:
        return name
    return next((known for known in _NOT_EXTRA if len(name) >= _SHORTEST and known.startswith(name)), None)


def not_interactive(job: Job, run: RunConfig, facts: Facts) -> Found:
    """Refuse names that Lightning takes for a shell, and shells inside of a job."""
    if job.name in ("bash", "interactive"):
        yield ConfigError(
            "slurm.job_name",
            job.name,
            "another name: Lightning takes a job of this name for an interactive shell and starts processes of its own",
            "set slurm.job_name: finetune",
        )
    inside = facts.environment.get("SLURM_JOB_ID") or facts.environment.get("SLURM_JOBID")
    if inside:
        yield ConfigError(
            "SLURM_JOB_ID",
            f"{inside}: this shell is inside a job, whose variables the new one would inherit",
            "a shell of a login node",
            "leave the allocation (exit) and submit again",
        )


def no_variable_wins(job: Job, run: RunConfig, facts: Facts) -> Found:
    """Refuse variables of this shell that sbatch lets win over the script.

    Source: ``man sbatch``, INPUT ENVIRONMENT VARIABLES.
    """
    config = job.config
    ours = {
        "SBATCH_ACCOUNT": config.account,
        "SBATCH_PARTITION": config.partition,
        "SBATCH_QOS": config.qos,
        "SBATCH_CONSTRAINT": config.constraint,
        "SBATCH_JOB_NAME": job.name,
        "SBATCH_TIMELIMIT": config.time,
        "SBATCH_SIGNAL": "",
        "SBATCH_ARRAY_INX": "",
        "SBATCH_GPUS": "",
        "SBATCH_GPUS_PER_TASK": "",
        "SBATCH_GPUS_PER_NODE": str(job.gpus_per_node),
        "SBATCH_GRES": "",
        "SBATCH_GPUS_PER_SOCKET": "",
        "SBATCH_GPU_BIND": "none",
        "SBATCH_DISTRIBUTION": "block",
        "SBATCH_OUTPUT": "",
        "SBATCH_ERROR": "",
        "SBATCH_OPEN_MODE": "append",
        "SBATCH_CLUSTERS": "",
        "SBATCH_MEM_PER_NODE": config.mem,
        "SBATCH_OVERCOMMIT": "",
        "SBATCH_WAIT": "",
        "SBATCH_NO_REQUEUE": None if not config.requeue else "",
        "SBATCH_REQUEUE": None if config.requeue else "",
    }
    for name, wanted in ours.items():
        given = facts.environment.get(name)
        if given is None or wanted is None or given == wanted or _same_time(name, given, str(wanted)):
            continue
        allowed = f"{wanted}, or none" if wanted else "none"
        yield ConfigError(
            name, f"{given!r} in this shell, which sbatch follows and not the script", allowed, f"unset {name}"
        )


def _same_time(name: str, given: str, wanted: str) -> bool:
    try:
        return name == "SBATCH_TIMELIMIT" and time_seconds(given) == time_seconds(wanted)
    except ConfigError:
        return False
