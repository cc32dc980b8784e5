"""A recipe as a SLURM job: everything its script says, as plain values."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_fsdp.config.data import accumulation_steps
from lit_fsdp.config.mesh import mesh_shape
from lit_fsdp.config.run import STRATEGY, RunConfig
from lit_fsdp.config.slurm import SlurmConfig
from lit_fsdp.errors import ConfigError, require

IMAGES = (".sif", ".sqsh", ".img")
"""Endings of files that hold an image."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is submitted."""

    config: SlurmConfig
    run_folder: Path
    """Absolute; the same on all nodes."""
    nodes: int
    tasks_per_node: int
    """Processes per node: one per GPU."""
    gpus_per_node: int
    """0 for processes on CPUs."""
    ckpt_path: str | None = None
    """What the first start resumes from; a requeued one resumes from the last checkpoint."""
    node_counts: tuple[int, ...] = ()
    """Numbers of nodes that the recipe can run on, most first, where ``slurm.min_nodes`` leaves a choice."""

    @property
    def name(self) -> str:
        """Name in the queue; Lightning would take a job called ``bash`` or ``interactive`` for a shell."""
        name = self.config.job_name or self.run_folder.name
        return "lit_fsdp" if name in ("", "bash", "interactive") else name

    @property
    def folder(self) -> Path:
        """Where the recipe, the script and the logs of the job lie."""
        return self.run_folder / "slurm"

    @property
    def command(self) -> list[str]:
        """Words that start lit-fsdp on a node."""
        default = ["lit-fsdp"] if self.config.container else [sys.executable, "-m", "lit_fsdp"]
        return self.config.command or default

    @property
    def image(self) -> str:
        """The image that the processes run in: an absolute path where it is a file, else its name in a registry."""
        given = str(self.config.container)
        path = Path(given).expanduser()
        is_file = ("/" in given or given.endswith(IMAGES)) and path.exists()
        return str(path.absolute()) if is_file or given.startswith((".", "/", "~")) else given

    @property
    def mounts(self) -> list[str]:
        """Folders seen inside the image, the run folder first; those of the host are absolute paths."""
        found = [str(self.run_folder)]
        for given in self.config.container_mounts or []:
            host, colon, inside = given.partition(":")
            found.append(f"{Path(host).expanduser().absolute()}{colon}{inside}")
        return found


def plan_job(run: RunConfig, ckpt_path: str | None = None) -> Job:
    """The job of a checked recipe.

    Args:
        run: The recipe.
        ckpt_path: ``last``, ``best`` or the path that the first start resumes from.

    Raises:
        ConfigError: Nodes, GPUs or accelerator of the job and of the Trainer differ, or the number of processes is not
            known.
    """
    config, accelerator = run.slurm, run.trainer.get("accelerator")
    allowed = "cpu | gpu | cuda | auto: a job asks SLURM for GPUs, or for none"
    require(accelerator in (None, "auto", "cpu", "gpu", "cuda"), "trainer.accelerator", accelerator, allowed)
    fix = "set trainer.devices: 8, or give --gpus-per-node 8"
    require(run.world_size, "trainer.devices", run.trainer.get("devices"), "the number of processes per node", fix)
    tasks = (run.world_size or 1) // run.num_nodes
    gpus = 0 if accelerator == "cpu" else tasks
    nodes, wanted = config.nodes or run.num_nodes, config.gpus_per_node
    given = f"{nodes} with trainer.num_nodes {run.num_nodes}"
    require(nodes == run.num_nodes, "slurm.nodes", given, "the same number in both", f"give --nodes {nodes}")
    given = f"{wanted} with trainer.devices {tasks} and trainer.accelerator {accelerator or 'auto'}"
    fix = "give --gpus-per-node N; for processes on CPUs set trainer.accelerator: cpu and slurm.gpus_per_node: 0"
    require(wanted in (None, gpus), "slurm.gpus_per_node", given, f"{gpus}", fix)
    if ckpt_path not in (None, "last", "best"):  # in the script it is quoted, and nothing expands it
        ckpt_path = str(Path(str(ckpt_path)).expanduser().absolute())
    return Job(
        config=config,
        run_folder=_run_folder(run.trainer, is_mounted=config.container is not None),
        nodes=nodes,
        tasks_per_node=tasks,
        gpus_per_node=gpus,
        ckpt_path=ckpt_path,
        node_counts=_node_counts(run, nodes, tasks),
    )


def _run_folder(trainer: dict[str, Any], is_mounted: bool) -> Path:
    field, fix = "trainer.default_root_dir", "rename the folder"
    folder = Path(trainer.get("default_root_dir") or "runs/run").expanduser().absolute()
    allowed = "a path without : and , which part the mounts of slurm.container"
    require(not (is_mounted and set(":,") & set(str(folder))), field, folder, allowed, fix)
    is_line = all(ord(c) >= 32 and ord(c) != 127 and c != "\\" for c in str(folder))
    allowed = "one line without backslashes: SLURM puts no job number into a path that has one"
    require(is_line, field, repr(str(folder)), allowed, fix)
    return folder


def _node_counts(run: RunConfig, nodes: int, tasks: int) -> tuple[int, ...]:
    """How many nodes will do, most first: the global batch and the mesh decide; empty: all or nothing."""
    least = run.slurm.min_nodes
    if least is None:
        return ()
    require(least <= nodes, "slurm.min_nodes", f"{least} for a job of {nodes} node(s)", f"1 to {nodes}")
    return tuple(count for count in range(nodes, least - 1, -1) if count == nodes or _fits(run, count, tasks))


def _fits(run: RunConfig, nodes: int, tasks: int) -> bool:
    try:
        _, shards = mesh_shape(run.strategy, nodes, nodes * tasks, STRATEGY)
        accumulation_steps(run.data.global_batch_size, run.data.micro_batch_size, nodes * tasks)
    except ConfigError:
        return False
    return not run.strategy.is_hybrid or nodes == 1 or shards % tasks == 0
