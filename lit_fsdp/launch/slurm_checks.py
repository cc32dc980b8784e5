"""Checks before a job is submitted: errors, and warnings if something is only assumed."""

import glob
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from lit_fsdp.checkpoint.run_folder import find_resume
from lit_fsdp.config.data import check_sources
from lit_fsdp.config.run import RunConfig
from lit_fsdp.config.slurm import time_seconds
from lit_fsdp.config.words import ROWS_FILES
from lit_fsdp.errors import CheckpointError, ConfigError
from lit_fsdp.host import GIB
from lit_fsdp.launch.slurm_job import Job, render

_LAUNCHER = re.compile(r"^\s*(?:exec +)?(srun|mpirun|mpiexec|torchrun|deepspeed|accelerate launch)\b", re.MULTILINE)
_STEP_SECONDS = 30
"""Allowance for the step in progress when the signal arrives and, on GPUs, the next one."""
_WRITE_GIB_PER_SECOND_PER_NODE = 0.5
"""Assumed without measurements: a shared file system under load, all ranks of a node together."""


def check_job(
    job: Job, run: RunConfig, checkpoint_bytes: int | None, save_seconds: float | None
) -> tuple[list[ConfigError | CheckpointError], list[str]]:
    """Return errors and warnings about a job; :func:`plan_job` has compared its size with the Trainer's.

    Args:
        job: The planned job.
        run: Its checked recipe.
        checkpoint_bytes: Size of one checkpoint, from shapes; ``None`` if the model's config is unavailable.
        save_seconds: The longest save measured in this run folder, if any.
    """
    found = [*_script(job), *_start(job, run), *_time(job, checkpoint_bytes, save_seconds)]
    return [e for e in found if not isinstance(e, str)], [w for w in found if isinstance(w, str)]


def _script(job: Job) -> Iterator[ConfigError | str]:
    """Check that bash can parse the script and that it contains no other launcher."""
    done = subprocess.run(["bash", "-n"], input=render(job), capture_output=True, text=True, check=False)  # noqa: S607
    if done.returncode:
        yield ConfigError("slurm.setup", done.stderr.strip(), "valid bash lines")
    if launcher := _LAUNCHER.search("\n".join([*(job.config.setup or []), *(job.config.command or [])])):
        yield f"{launcher[1]} in slurm.setup or slurm.command: the script itself calls srun once for all processes"


def _start(job: Job, run: RunConfig) -> Iterator[CheckpointError | ConfigError | str]:
    """Check that a used run folder is resumed, and that the checkpoint and the files of rows exist."""
    if "trainer.strategy" not in run.foreign:
        try:
            find_resume("fit", job.ckpt_path, job.run_folder, run.checkpoint, run.resume.fallback)
        except (CheckpointError, ConfigError) as error:
            yield error
    for split in ("train", "val") if "data" not in run.foreign else ():
        for path in (entry.source for entry in check_sources(split, getattr(run.data, split))):
            if path.endswith(ROWS_FILES) and not glob.glob(str(Path(path).expanduser())):
                yield f"data.{split}: {path} does not exist here; if it is missing where the job runs, the job fails"
    if job.gpus_per_node and job.config.cpus_per_task is None:
        yield "slurm.cpus_per_task is not set: SLURM gives each rank one core; set it to the node's cores / GPUs"


def _time(job: Job, checkpoint_bytes: int | None, save_seconds: float | None) -> Iterator[ConfigError | str]:
    lead = job.config.signal_lead_seconds
    if save_seconds is not None and lead < save_seconds + _STEP_SECONDS:
        given = f"{lead} with a measured save of {save_seconds:.0f} s in this run folder and a step before it"
        fix = f"set slurm.signal_lead_seconds: {int(1.5 * save_seconds) + _STEP_SECONDS}"
        yield ConfigError("slurm.signal_lead_seconds", given, f">= {save_seconds + _STEP_SECONDS:.0f}", fix)
    elif save_seconds is None and checkpoint_bytes is None:
        yield "the time of a save is unknown, because the model's config is unavailable"
    elif save_seconds is None and checkpoint_bytes is not None:
        rate, size = _WRITE_GIB_PER_SECOND_PER_NODE * job.nodes, checkpoint_bytes / GIB
        if lead < size / rate + _STEP_SECONDS:
            yield (
                f"slurm.signal_lead_seconds {lead}: a checkpoint of {size:.1f} GiB takes {size / rate:.0f} s at an "
                f"assumed {rate:.1f} GiB/s; anything not saved by the time limit is lost"
            )
    limit = None if job.config.time is None else time_seconds(str(job.config.time))
    if limit is not None and limit <= lead:
        yield (
            f"slurm.time {job.config.time} is not longer than slurm.signal_lead_seconds {lead}: the job is "
            "signaled to stop as soon as it starts; set slurm.signal_lead_seconds: 30 for a short test"
        )
