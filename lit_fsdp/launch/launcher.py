"""Who started this process, and whether it started as many as the recipe says.

Plain, ``torchrun`` and ``srun`` start the same recipe. A wrong mixture would wait for ranks that never come, or train
several runs side by side; it is refused before torch is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lit_fsdp.errors import ConfigError

_INTERACTIVE = ("bash", "interactive")


def check_launch(trainer: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    """Compare ``trainer.devices`` and ``num_nodes`` with what torchrun or srun started.

    Args:
        trainer: The section of the recipe; ``devices`` may be a list or ``auto``.
        environment: Of this process.

    Raises:
        ConfigError: The numbers differ, or a job of several tasks was started without srun.
    """
    if "TORCHELASTIC_RUN_ID" in environment:
        _check_torchrun(trainer, environment)
    elif "SLURM_NTASKS" in environment and environment.get("SLURM_JOB_NAME") not in _INTERACTIVE:
        _check_srun(trainer, environment)


def _check_torchrun(trainer: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    local, world = int(environment["LOCAL_WORLD_SIZE"]), int(environment["WORLD_SIZE"])
    devices, nodes = _devices(trainer), _nodes(trainer)
    if devices is not None and devices != local:
        raise ConfigError(
            "trainer.devices",
            f"{devices} under torchrun, which started {local} processes on this node",
            f"{local}",
            f"set trainer.devices: {local}, or start torchrun --nproc-per-node {devices}",
        )
    if nodes * local != world:
        raise ConfigError(
            "trainer.num_nodes",
            f"{nodes} under torchrun with {world} processes, {local} on each node",
            f"{world // local}",
            f"set trainer.num_nodes: {world // local}, or start torchrun --nnodes {nodes}",
        )


def _check_srun(trainer: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    tasks = int(environment["SLURM_NTASKS"])
    devices, nodes = _devices(trainer), _nodes(trainer)
    job_nodes = int(environment.get("SLURM_STEP_NUM_NODES") or environment.get("SLURM_NNODES") or 1)
    if "SLURM_STEP_ID" not in environment and tasks > 1:
        raise ConfigError(
            "command line",
            f"started once, by the shell of a job with {tasks} tasks: the others would never come",
            "srun in front, which starts every task",
            "write srun lit-fsdp fit ..., or let lit-fsdp slurm submit write the script",
        )
    if nodes != job_nodes:
        raise ConfigError(
            "trainer.num_nodes",
            f"{nodes} in a job step of {job_nodes} node(s)",
            f"{job_nodes}",
            f"set trainer.num_nodes: {job_nodes}, or ask for --nodes={nodes}",
        )
    if devices is not None and devices * nodes != tasks:
        raise ConfigError(
            "trainer.devices",
            f"{devices} on {nodes} node(s), but srun started {tasks} task(s)",
            f"one task per device: {tasks // nodes if tasks % nodes == 0 else 'tasks that divide by the nodes'}",
            f"ask for --ntasks-per-node={devices}, or set trainer.devices: {max(1, tasks // nodes)}",
        )
    if tasks > 1 and "SLURM_NTASKS_PER_NODE" not in environment:
        raise ConfigError(
            "SLURM_NTASKS_PER_NODE",
            f"not set: {tasks} tasks were asked for by --ntasks, which may come to lie on any node",
            "--ntasks-per-node",
            f"ask for --ntasks-per-node={tasks // nodes} instead of --ntasks",
        )


def _devices(trainer: Mapping[str, Any]) -> int | None:
    """Devices per node, or ``None`` where they are whatever is there."""
    given = trainer.get("devices")
    if isinstance(given, list):
        return len(given)
    if isinstance(given, str) and given.isdigit():
        return int(given)
    return given if isinstance(given, int) and not isinstance(given, bool) and given > 0 else None


def _nodes(trainer: Mapping[str, Any]) -> int:
    given = trainer.get("num_nodes")
    return 1 if given is None else int(given)
