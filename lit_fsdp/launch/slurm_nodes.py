"""On how many nodes a job may run that takes fewer than it asked for (``slurm.min_nodes``)."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from lit_fsdp.config.data import accumulation_steps
from lit_fsdp.config.run import STRATEGY, RunConfig
from lit_fsdp.config.strategy import mesh_shape
from lit_fsdp.errors import ConfigError
from lit_fsdp.launch.slurm_facts import Facts, Found
from lit_fsdp.launch.slurm_job import FOLDER, Job

_RANGE = re.compile(r"^#SBATCH --nodes=(\d+-\d+)$", re.MULTILINE)


def with_node_counts(job: Job, run: RunConfig) -> Job:
    """The same job, knowing on which of its possible numbers of nodes the recipe can run.

    Raises:
        ConfigError: ``slurm.min_nodes`` is above the nodes of the job.
    """
    least = job.config.min_nodes
    if least is None:
        return job
    if least > job.nodes:
        raise ConfigError(
            "slurm.min_nodes", f"{least} for a job of {job.nodes} node(s)", f"1 to {job.nodes}", "lower slurm.min_nodes"
        )
    counts = [n for n in range(job.nodes, least - 1, -1) if n == job.nodes or unfit(job, run, n) is None]
    return dataclasses.replace(job, node_counts=tuple(counts))


def unfit(job: Job, run: RunConfig, nodes: int) -> ConfigError | None:
    """Why the recipe cannot run on so many nodes; ``None`` if it can."""
    ranks = nodes * job.tasks_per_node
    try:
        _, shards = mesh_shape(run.strategy, nodes, ranks, STRATEGY)
        accumulation_steps(run.data.global_batch_size, run.data.micro_batch_size, ranks)
    except ConfigError as error:
        return error
    if run.strategy.is_hybrid and nodes > 1 and shards % job.tasks_per_node:
        allowed = f"whole nodes: a multiple of {job.tasks_per_node}"
        return ConfigError(f"{STRATEGY}.shard_degree", f"groups of {shards} ranks", allowed, "leave it out")
    return None


def fewer_nodes_fit(job: Job, run: RunConfig, facts: Facts) -> Found:
    """An error where the least number of nodes cannot run the recipe, and a note on those in between that cannot."""
    least = job.config.min_nodes
    if least is None:
        return
    why = unfit(job, run, least)
    if why is not None:
        counts = [n for n in job.node_counts if unfit(job, run, n) is None]
        best = min(counts, default=job.nodes)
        yield ConfigError(
            "slurm.min_nodes",
            f"{least}, on which {why.field} does not fit: {why.given}",
            f"{', '.join(map(str, sorted(counts))) or 'other'} node(s) with this recipe",
            f"set slurm.min_nodes: {best}; or {why.fix}",
        )
    left_out = [n for n in range(least + 1, job.nodes) if n not in job.node_counts]
    if left_out:
        used = {n: max(count for count in job.node_counts if count < n) for n in left_out if min(job.node_counts) < n}
        listed = ", ".join(f"{count} of {n}" for n, count in used.items())
        if listed:
            yield (
                f"slurm.min_nodes: some numbers of nodes do not fit the global batch or the mesh; the job then uses "
                f"{listed} nodes, and the others idle"
            )


def asked_nodes(run_folder: Path, number: str) -> str | None:
    """The nodes that a job of a run asked for, if fewer would do: ``2-4``; ``None`` for any other job."""
    script = run_folder / FOLDER / f"{number.partition('_')[0]}.sbatch"
    if not script.is_file():
        return None
    found = _RANGE.search(script.read_text(encoding="utf-8", errors="replace"))
    return found[1] if found else None
