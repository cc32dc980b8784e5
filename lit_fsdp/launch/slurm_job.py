"""A recipe as a SLURM job: everything its script says, as plain values."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_fsdp.config.slurm import SlurmConfig
from lit_fsdp.errors import ConfigError

FOLDER = "slurm"
RECIPE_NAME = "recipe.yaml"
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
        """Name in the queue."""
        return self.config.job_name or self.run_folder.name or "lit_fsdp"

    @property
    def node_range(self) -> str:
        """Nodes as ``sbatch --nodes`` takes them: ``4``, or ``2-4`` where fewer will do."""
        return f"{self.config.min_nodes}-{self.nodes}" if self.node_counts else str(self.nodes)

    @property
    def recipe(self) -> Path:
        """The resolved recipe that the job reads."""
        return self.run_folder / FOLDER / RECIPE_NAME

    @property
    def command(self) -> list[str]:
        """Words that start lit-fsdp on a node."""
        if self.config.command is not None:
            return list(self.config.command)
        return ["lit-fsdp"] if self.config.container else [sys.executable, "-m", "lit_fsdp"]

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

    @property
    def world_size(self) -> int:
        """All processes."""
        return self.nodes * self.tasks_per_node


def section_of(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A copy of one section of a merged recipe; empty where it has none.

    Raises:
        ConfigError: It is no mapping, and what flags add to it would replace it in silence.
    """
    given = values.get(name)
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(name, repr(given), "a mapping of keys to values", f"write {name} as key: value lines")
    return dict(given or {})


def put_job_size(values: dict[str, Any], nodes: int | None, gpus_per_node: int | None) -> list[str]:
    """Write the size of the job into a recipe, in place, where the Trainer reads it: flags, and the slurm section's.

    Args:
        values: The merged recipe; its ``slurm`` and ``trainer`` sections may be missing.
        nodes: Flag, or ``None``; wins over ``slurm.nodes`` and ``trainer.num_nodes``.
        gpus_per_node: Flag, or ``None``; wins over ``slurm.gpus_per_node`` and ``trainer.devices``.

    Returns:
        One line per value that was replaced.

    Raises:
        ConfigError: One of the sections is no mapping.
    """
    replaced = []
    for flag, own, key in ((nodes, "nodes", "num_nodes"), (gpus_per_node, "gpus_per_node", "devices")):
        if flag is None:
            continue
        for section, name in (("slurm", own), ("trainer", key)):
            if section == "trainer" and own == "gpus_per_node" and flag == 0:
                continue  # no GPUs: trainer.devices is the number of processes
            given = section_of(values, section)
            if given.get(name) not in (None, flag):
                replaced.append(f"{section}.{name}: {given[name]!r} → {flag} (--{own.replace('_', '-')})")
            values[section] = {**given, name: flag}
    for own, key in (("nodes", "num_nodes"), ("gpus_per_node", "devices")):
        size, trainer = section_of(values, "slurm").get(own), section_of(values, "trainer")
        if trainer.get(key) in (None, "auto", -1, "-1") and isinstance(size, int) and size > 0:
            replaced.append(f"trainer.{key}: {trainer.get(key)!r} → {size} (slurm.{own})")
            values["trainer"] = {**trainer, key: size}
    return replaced


def plan_job(values: Mapping[str, Any], config: SlurmConfig) -> Job:
    """The job of a checked recipe.

    Raises:
        ConfigError: Nodes, GPUs or accelerator of the job and of the Trainer differ, or the number of processes is not
            known.
    """
    trainer = values.get("trainer") or {}
    nodes = _agreed("nodes", config.nodes, "trainer.num_nodes", trainer.get("num_nodes"), 1)
    devices = trainer.get("devices")
    devices = len(devices) if isinstance(devices, list) else devices
    on_cpu = _is_on_cpu(trainer.get("accelerator"), config, devices)
    tasks = devices if on_cpu else _agreed("gpus_per_node", config.gpus_per_node, "trainer.devices", devices, None)
    if not isinstance(tasks, int) or isinstance(tasks, bool) or tasks < 1:
        raise ConfigError(
            "trainer.devices",
            repr(devices),
            "the number of processes per node",
            "set trainer.devices: 8, or give --gpus-per-node 8",
        )
    folder = _run_folder(trainer.get("default_root_dir") or "runs/run", is_mounted=config.container is not None)
    ckpt_path = values.get("ckpt_path")
    if ckpt_path not in (None, "last", "best"):  # in the script it is quoted, and nothing expands it
        ckpt_path = Path(str(ckpt_path)).expanduser().absolute()
    return Job(
        config=config,
        run_folder=folder,
        nodes=nodes,
        tasks_per_node=tasks,
        gpus_per_node=0 if on_cpu else tasks,
        ckpt_path=None if ckpt_path is None else str(ckpt_path),
    )


def _is_on_cpu(accelerator: Any, config: SlurmConfig, devices: Any) -> bool:
    """Whether the processes run on CPUs, which job and Trainer have to say alike.

    ``auto`` takes GPUs wherever it sees any, also such as the job has not asked for.
    """
    if accelerator not in (None, "auto", "cpu", "gpu", "cuda"):
        allowed = "cpu | gpu | cuda | auto: a job asks SLURM for GPUs, or for none"
        raise ConfigError("trainer.accelerator", repr(accelerator), allowed, "set trainer.accelerator: gpu")
    if accelerator == "cpu" and config.gpus_per_node:
        raise ConfigError(
            "slurm.gpus_per_node",
            f"{config.gpus_per_node} with trainer.accelerator cpu, which would leave them idle",
            "0 for processes on CPUs",
            "set slurm.gpus_per_node: 0, or trainer.accelerator: gpu",
        )
    if accelerator != "cpu" and config.gpus_per_node == 0:
        wanted = devices if isinstance(devices, int) and devices > 0 else 8
        raise ConfigError(
            "slurm.gpus_per_node",
            f"0 with trainer.accelerator {accelerator or 'auto'}, which would look for GPUs",
            "as many as trainer.devices, or 0 with trainer.accelerator cpu",
            f"set trainer.accelerator: cpu, or slurm.gpus_per_node: {wanted}",
        )
    return bool(accelerator == "cpu")


def _run_folder(given: str, is_mounted: bool) -> Path:
    folder = Path(given).expanduser().absolute()
    if is_mounted and set(":,") & set(str(folder)):
        raise ConfigError(
            "trainer.default_root_dir",
            f"{folder} with slurm.container",
            "a path without : and , which part the mounts of an image",
            "rename the folder",
        )
    if any(ord(c) < 32 or ord(c) == 127 or c == "\\" for c in str(folder)):
        raise ConfigError(
            "trainer.default_root_dir",
            repr(str(folder)),
            "one line without backslashes: SLURM puts no job number into a path that has one",
            "rename the folder",
        )
    return folder


def _agreed(name: str, own: int | None, other_name: str, other: Any, default: int | None) -> Any:
    if own is None:
        return default if other in (None, "auto", -1, "-1") else other
    if other not in (None, "auto", -1, "-1", own):
        raise ConfigError(
            f"slurm.{name}",
            f"{own} with {other_name} {other}",
            f"the same number in both: the job would {'leave some idle' if own > other else 'lack some'}",
            f"set {other_name}: {own}, or drop slurm.{name}",
        )
    return own
