"""Whether this is a SLURM cluster, and whether this command was started as its jobs have to be."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping

from lit_fsdp.launch.checks.row import Row, Wanted
from lit_fsdp.launch.slurm_checks import local_place

_COMMANDS = ("sbatch", "srun", "scontrol")


def judge_slurm(
    environment: Mapping[str, str], wanted: Wanted, which: Callable[[str], str | None] = shutil.which
) -> Row:
    """One row on SLURM.

    Args:
        environment: Of this process.
        wanted: By the recipe.
        which: Finds a program.
    """
    there = [command for command in _COMMANDS if which(command)]
    missing = [command for command in _COMMANDS if command not in there]
    job = environment.get("SLURM_JOB_ID")
    if not there and job is None:
        return Row("SLURM", "not on this machine")
    found = f"{', '.join(there) or 'no commands'}; {f'inside job {job}' if job else 'not inside a job'}"
    tasks = int(environment.get("SLURM_NTASKS") or 1)
    if job is not None and "SLURM_STEP_ID" not in environment and (tasks > 1 or wanted.nodes > 1):
        nodes = max(wanted.nodes, int(environment.get("SLURM_NNODES") or 1))
        fix = f"srun lit-fsdp doctor{wanted.words} --nodes {nodes}"
        return Row("SLURM", f"{found}, started once by its shell: only this node is looked at", "warning", fix)
    if missing:
        return Row("SLURM", f"{found}; without {', '.join(missing)}", "warning", "see PATH: a login node has them all")
    return Row("SLURM", found)


def judge_nodes(wanted: Wanted, started: int) -> list[Row]:
    """Rows where the recipe wants several nodes.

    Args:
        wanted: By the recipe or ``--nodes``.
        started: Nodes that were started, 1 for a plain start.
    """
    rows = []
    if wanted.nodes != started:
        tasks = f"--nodes={wanted.nodes} --ntasks-per-node={wanted.devices or 8}"
        fix = f"srun {tasks} lit-fsdp doctor{wanted.words} --nodes {wanted.nodes} looks at all"
        grade = "bad" if started > 1 else "warning"
        text = f"{wanted.nodes} wanted, {started} looked at"
        rows.append(Row("nodes", text, grade, fix))  # type: ignore[arg-type]
    if wanted.nodes > 1:
        for name, place, key in (
            ("run folder", wanted.run_folder, "trainer.default_root_dir"),
            ("cache", wanted.cache, "LIT_FSDP_CACHE or data.cache_dir"),
        ):
            why = local_place(place)
            if why:
                fix = f"set {key} to a folder on a file system that all nodes see"
                rows.append(Row(f"{name} for {wanted.nodes} nodes", f"{place} ({why})", "bad", fix))
    return rows
