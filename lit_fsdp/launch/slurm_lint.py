"""What would fail an hour later, said before a job is submitted."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from lit_fsdp.config.run import STRATEGY, RunConfig
from lit_fsdp.config.slurm import time_seconds
from lit_fsdp.config.strategy import mesh_shape
from lit_fsdp.errors import ConfigError
from lit_fsdp.launch.slurm_facts import GIB, Facts, Found
from lit_fsdp.launch.slurm_job import Job
from lit_fsdp.launch.slurm_lint_cluster import partition_has_it, time_limit
from lit_fsdp.launch.slurm_lint_places import disk_is_enough, files_exist, place_is_shared
from lit_fsdp.launch.slurm_lint_shell import no_launcher_inside, shell_is_whole
from lit_fsdp.launch.slurm_lint_words import no_variable_wins, not_interactive, options_are_ours
from lit_fsdp.launch.slurm_nodes import fewer_nodes_fit

START_SECONDS = 300
"""Allowed for starting, loading and the first step."""
STEP_SECONDS = 30
"""Allowed for the step that is under way when the signal comes and, on GPUs, the one after it."""
_WRITE_BYTES_PER_SECOND_PER_NODE = GIB / 2
"""Assumed where nothing was measured: a shared file system under load, all ranks of a node together."""


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


def _devices_are_counted(job: Job, run: RunConfig, facts: Facts) -> Found:
    """A list of devices counts those of the machine, and a job sees its own alone, from 0 on."""
    devices = run.trainer.get("devices")
    if isinstance(devices, list) and sorted(devices) != list(range(len(devices))):
        yield ConfigError(
            "trainer.devices",
            devices,
            f"{len(devices)}, or 0 to {len(devices) - 1}: a job sees only the GPUs that it was given, counted from 0",
            f"set trainer.devices: {len(devices)}",
        )


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
    if run.data.val or run.data.val_split:
        yield (
            f"a validation is finished before a signal is heard: let it take less than {lead - needed} s, or raise "
            "slurm.signal_lead_seconds"
        )
    field, given, first = time_limit(job, facts)
    limit = None if given is None else time_seconds(given)
    if given is None:
        yield "slurm.time is not set, so that the partition's default holds and is not compared with a save"
    least = START_SECONDS + max(lead, needed)
    if limit is not None and limit < least:
        yield ConfigError(
            field,
            f"{given} ({limit} s); the start takes {START_SECONDS} s, the last save {max(lead, needed)} s",
            f"{least} s or more ({how})",
            f'{first}set slurm.time: "{-(-2 * least // 3600):02d}:00:00"',
        )


def _ranks_have_cores(job: Job, run: RunConfig, facts: Facts) -> Found:
    config = job.config
    if job.gpus_per_node and config.cpus_per_task is None and config.cpu_bind != "none":
        yield (
            "slurm.cpus_per_task is not set: SLURM gives each rank one core, loaders and NCCL's threads included; "
            "set it to the node's cores / GPUs"
        )


def save_seconds(job: Job, facts: Facts) -> tuple[float | None, str]:
    """Seconds of one save, and whether that is measured or estimated."""
    if facts.save_seconds is not None:
        return facts.save_seconds, "measured in this run folder"
    if facts.checkpoint_bytes is None:
        return None, ""
    rate = _WRITE_BYTES_PER_SECOND_PER_NODE * job.nodes
    return facts.checkpoint_bytes / rate, f"estimated: {facts.checkpoint_bytes / GIB:.1f} GiB at {rate / GIB:.1f} GiB/s"


def _start_is_clear(job: Job, run: RunConfig, facts: Facts) -> Found:
    """A used run folder is resumed or refused; what is resumed has to be there."""
    word = job.ckpt_path
    if word is None and facts.num_kept:
        yield ConfigError(
            "trainer.default_root_dir",
            f"{job.run_folder}, which holds {facts.num_kept} checkpoint(s) of a run already",
            "a new run folder, or a run that goes on",
            "give --ckpt_path last, or name another --trainer.default_root_dir",
        )
    elif word in ("last", "best") and not facts.num_kept:
        yield ConfigError(
            "ckpt_path",
            word,
            f"a checkpoint in {job.run_folder}, where there is none",
            "drop ckpt_path, or give a path",
        )
    elif word in ("last", "best") and facts.empty_seeds:
        empty = ", ".join(map(str, facts.empty_seeds))
        others = [seed for seed in job.config.seeds or () if seed not in facts.empty_seeds]
        yield ConfigError(
            "ckpt_path",
            f"{word}, and no checkpoint of seed {empty} below {job.run_folder}",
            "a checkpoint of every seed: without one its task would fail as it starts",
            f"set slurm.seeds: {others}, and submit the rest without ckpt_path under another run folder",
        )
    elif word not in (None, "last", "best") and not os.path.isdir(Path(str(word)).expanduser()):
        yield ConfigError("ckpt_path", word, "last, best, or a checkpoint's folder", "lit-fsdp ckpt ls RUN shows them")


CHECKS: list[Callable[[Job, RunConfig, Facts], Found]] = [
    not_interactive,
    no_variable_wins,
    options_are_ours,
    no_launcher_inside,
    shell_is_whole,
    _devices_are_counted,
    _groups_are_whole_nodes,
    fewer_nodes_fit,
    partition_has_it,
    _ranks_have_cores,
    _time_is_enough,
    _start_is_clear,
    place_is_shared,
    files_exist,
    disk_is_enough,
]
"""Each yields errors, and notes on what it could not check."""
