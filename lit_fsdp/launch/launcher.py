"""Who started this process, and whether it started as many as the recipe says.

Plain, ``torchrun`` and ``srun`` start the same recipe. A wrong mixture would wait for ranks that never come, or train
several runs side by side; it is refused before torch is loaded, on every rank alike, so that none waits for another.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping
from typing import Any

from lit_fsdp.errors import ConfigError

_INTERACTIVE = ("bash", "interactive")
"""Names of jobs that Lightning takes for a shell, in which it starts processes by itself."""
_OTHER_LAUNCHERS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "LSB_JOBID")
_BY_HAND = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK")
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_PORTS = 20000, 10000, 2411
"""First port, how many follow, and where among them those of steps begin."""


def adopt_step(environment: MutableMapping[str, str]) -> None:
    """Make SLURM's variables say what is true of the job step that this process is in, for Lightning, which reads them.

    Several of them are the allocation's, as salloc and sbatch were asked for it: its name, by which Lightning takes
    every step of an ``salloc`` for a shell and would start processes in each task; its nodes, of which a step may have
    others first; its tasks per node. A shell that is itself a step of one task is a place to start processes from, and
    none of several ranks.

    Args:
        environment: Of this process; changed in place.
    """
    if "TORCHELASTIC_RUN_ID" in environment or "SLURM_STEP_ID" not in environment:
        return
    is_interactive = environment.get("SLURM_JOB_NAME") in _INTERACTIVE
    if int(environment.get("SLURM_STEP_NUM_TASKS") or 1) == 1:
        if is_interactive:
            environment.pop("SLURM_PROCID", None)
        return
    if is_interactive:
        environment["SLURM_JOB_NAME"] = "lit_fsdp"
    counts = _tasks_per_node(environment)
    if len(set(counts)) == 1:
        environment["SLURM_NTASKS_PER_NODE"] = str(counts[0])
    first = first_node(environment.get("SLURM_STEP_NODELIST", ""))
    if first:
        environment.setdefault("MASTER_ADDR", first)
    start, count, shift = _PORTS
    number = int(environment.get("SLURM_JOB_ID") or 0) * 7 + int(environment["SLURM_STEP_ID"]) * 13 + shift
    environment.setdefault("MASTER_PORT", str(start + number % count))


def check_launch(trainer: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    """Compare ``trainer.devices`` and ``num_nodes`` with what torchrun or srun started.

    Args:
        trainer: The section of the recipe; ``devices`` may be a list or ``auto``.
        environment: Of this process, after :func:`adopt_step`.

    Raises:
        ConfigError: The numbers differ, or some ranks were not started at all.
    """
    if "TORCHELASTIC_RUN_ID" in environment:
        _check_torchrun(trainer, environment)
    elif "SLURM_NTASKS" in environment and environment.get("SLURM_JOB_NAME") not in _INTERACTIVE:
        _check_srun(trainer, environment)
    elif not any(name in environment for name in _OTHER_LAUNCHERS):
        _check_plain(trainer, environment)


def _check_plain(trainer: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    nodes = _nodes(trainer)
    missing = [name for name in _BY_HAND if not environment.get(name)]
    if nodes > 1 and missing:
        raise ConfigError(
            "trainer.num_nodes",
            f"{nodes}, but neither srun nor torchrun started this process, and {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set: the other nodes would never come",
            "1, or a launcher that starts the processes of every node",
            f"lit-fsdp slurm submit, srun --nodes={nodes} ..., torchrun --nnodes {nodes} ..., or set "
            f"{', '.join(_BY_HAND)} on each node",
        )
    if nodes > 1 and not (environment["NODE_RANK"].isdigit() and int(environment["NODE_RANK"]) < nodes):
        raise ConfigError(
            "NODE_RANK",
            f"{environment['NODE_RANK']} with trainer.num_nodes {nodes}",
            f"0 to {nodes - 1}",
            "number the nodes from 0 on, or set trainer.num_nodes",
        )


def _check_torchrun(trainer: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    local, world = int(environment["LOCAL_WORLD_SIZE"]), int(environment["WORLD_SIZE"])
    agents = int(environment.get("GROUP_WORLD_SIZE") or max(1, world // local))
    devices, nodes = _devices(trainer), _nodes(trainer)
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS") or 1)
    if tasks not in (1, agents):
        raise ConfigError(
            "command line",
            f"srun, which started torchrun {tasks} times, each for a run of {agents} node(s)",
            f"one torchrun per node of one run: torchrun --nnodes {tasks}; or srun alone",
            "srun lit-fsdp fit ... without torchrun",
        )
    if local * agents != world:
        raise ConfigError(
            "command line",
            f"torchrun with {world} processes on {agents} nodes, {local} of them on this one",
            "as many on every node",
            "start torchrun with the same --nproc-per-node on every node",
        )
    if devices is not None and devices != local:
        raise ConfigError(
            "trainer.devices",
            f"{devices} under torchrun, which started {local} processes on this node",
            f"{local}",
            f"set trainer.devices: {local}, or start torchrun --nproc-per-node {devices}",
        )
    if nodes != agents:
        raise ConfigError(
            "trainer.num_nodes",
            f"{nodes} under torchrun with {world} processes, {local} on each node",
            f"{agents}",
            f"set trainer.num_nodes: {agents}, or start torchrun --nnodes {nodes}",
        )


def _check_srun(trainer: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    tasks = int(environment["SLURM_NTASKS"])
    devices, nodes = _devices(trainer), _nodes(trainer)
    job_nodes = int(environment.get("SLURM_STEP_NUM_NODES") or environment.get("SLURM_NNODES") or 1)
    is_step = "SLURM_STEP_ID" in environment
    if not is_step and tasks > 1:
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
        fits = f"{tasks // nodes}" if tasks % nodes == 0 else "tasks that divide by the nodes"
        raise ConfigError(
            "trainer.devices",
            f"{devices} on {nodes} node(s), but {'srun started' if is_step else 'the job has'} {tasks} task(s)",
            f"one task per device: {fits}",
            f"start srun --ntasks-per-node={devices}, or set trainer.devices: {max(1, tasks // nodes)}",
        )
    _check_placement(tasks, nodes, environment)


def _check_placement(tasks: int, nodes: int, environment: Mapping[str, str]) -> None:
    """As many tasks on every node, neighbouring ranks together."""
    per_node = max(1, tasks // nodes)
    again = f"start srun --nodes={nodes} --ntasks-per-node={per_node}"
    counts = _tasks_per_node(environment)
    if len(set(counts)) > 1 or (counts and counts[0] * nodes != tasks):
        raise ConfigError(
            "SLURM_STEP_TASKS_PER_NODE",
            f"{environment['SLURM_STEP_TASKS_PER_NODE']}: the {tasks} tasks are not spread evenly",
            f"{per_node} on each of {nodes} nodes",
            again,
        )
    if tasks > 1 and not counts and "SLURM_NTASKS_PER_NODE" not in environment:
        raise ConfigError(
            "SLURM_NTASKS_PER_NODE",
            f"not set: {tasks} tasks were asked for by --ntasks, which may come to lie on any node",
            "--ntasks-per-node",
            f"{again} instead of --ntasks",
        )
    how = environment.get("SLURM_DISTRIBUTION", "block").partition(":")[0].partition(",")[0]
    if nodes > 1 and per_node > 1 and how not in ("block", "pack"):
        raise ConfigError(
            "SLURM_DISTRIBUTION",
            f"{how}: neighbouring ranks lie on different nodes, and groups of ranks that share one copy with them",
            "block",
            f"{again} --distribution=block",
        )


def _tasks_per_node(environment: Mapping[str, str]) -> list[int]:
    """``2(x2),1`` → 2, 2, 1; empty outside of a step."""
    found = _TASKS.findall(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return [int(tasks) for tasks, times in found for _ in range(int(times or 1))]


def first_node(nodes: str) -> str:
    """The first name in SLURM's short form: ``a[03-05,7],b1`` → ``a03``."""
    head, bracket, rest = nodes.partition("[")
    if not bracket or "," in head:
        return nodes.split(",")[0]
    number = rest.replace("-", ",").replace("]", ",").split(",")[0]
    return f"{head}{number}"


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
    return given if isinstance(given, int) and given > 0 else 1  # what is no number has an error of its own
