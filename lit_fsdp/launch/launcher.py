"""Detect the launcher of this process, and check that it started as many processes as the recipe needs.

Start a recipe directly, by ``torchrun`` or by ``srun``; Lightning also supports ``jsrun`` and, with mpi4py, MPI. A
wrong combination would wait for ranks that never start, or train several runs at once; every rank refuses it before
torch is loaded, so that none waits for another.
"""

import importlib.util
import re
from collections.abc import Mapping, MutableMapping
from typing import Any

from lit_fsdp.errors import require
from lit_fsdp.host import can_listen, is_first_process, may_restart, say_once

_SHELLS = ("bash", "interactive")
"""Job names that Lightning treats as a shell, in which it starts processes itself."""
_SIZES = {"JSM_NAMESPACE_SIZE": "jsrun", "OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpirun"}
"""Variables with the number of processes of further launchers; a job of LSF alone starts only its script."""
_BY_HAND = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK")
_OF_TASKS = ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_TORCHRUN = (
    "start torchrun --nnodes {nodes} --nproc-per-node {devices} (in a batch script: exec torchrun, and "
    "#SBATCH --signal=B:TERM@120, as USR1 kills torchrun)"
)


def adopt_step(environment: MutableMapping[str, str]) -> None:
    """Correct SLURM's variables for the job step of this process, because Lightning reads them.

    A single task, also that of a batch script, starts the ranks itself. In a step of several tasks some variables
    describe the allocation of salloc or sbatch instead: its name, because of which Lightning treats every step of an
    ``salloc`` as a shell and would start processes in each task; its nodes, whose first may differ from the step's; its
    tasks per node.
    """
    if "TORCHELASTIC_RUN_ID" in environment or "SLURM_JOB_ID" not in environment:
        return
    is_step = "SLURM_STEP_ID" in environment
    if int(environment.get("SLURM_STEP_NUM_TASKS" if is_step else "SLURM_NTASKS") or 1) == 1:
        for name in _OF_TASKS:
            environment.pop(name, None)
    elif is_step:
        if environment.get("SLURM_JOB_NAME") in _SHELLS:
            environment["SLURM_JOB_NAME"] = "lit_fsdp"
        counts = _tasks_per_node(environment)
        if len(set(counts)) == 1:
            environment["SLURM_NTASKS_PER_NODE"] = str(counts[0])
        if first := _first_node(environment.get("SLURM_STEP_NODELIST", "")):
            environment.setdefault("MASTER_ADDR", first)
        number = int(environment["SLURM_JOB_ID"]) * 7 + int(environment["SLURM_STEP_ID"]) * 13
        environment.setdefault("MASTER_PORT", str(20000 + number % 10000))


def drop_used_port(environment: MutableMapping[str, str]) -> None:
    """Forget the variables of a run in the process that started this one, after :func:`adopt_step`.

    Lightning leaves ``MASTER_ADDR`` and ``MASTER_PORT``, or these with both ranks as 0, also in a notebook's kernel
    after ``Trainer.fit``. Their port is then in use, although this process would be the rank that listens there.
    """
    ranks = [environment.get(name) for name in ("LOCAL_RANK", "NODE_RANK")]
    is_launched = is_srun(environment) or any(name in environment for name in ("RANK", "WORLD_SIZE"))
    port = environment.get("MASTER_PORT", "")
    if ranks in (["0", "0"], [None, None]) and not is_launched and port.isdecimal() and not can_listen(int(port)):
        say_once(f"MASTER_PORT {port}, inherited from an earlier run, is in use: another port is chosen")
        for name in ("LOCAL_RANK", *_BY_HAND):
            environment.pop(name, None)


def check_launch(trainer: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    """Compare ``trainer.devices`` and ``num_nodes`` with what torchrun or srun started, after :func:`adopt_step`.

    Raises:
        ConfigError: The numbers differ, or some ranks were not started.
    """
    devices, nodes = devices_of(trainer), int(trainer.get("num_nodes") or 1)
    launcher, _ = other_launcher(environment)
    if "TORCHELASTIC_RUN_ID" in environment:
        _check_torchrun(devices, nodes, environment)
        if may_restart() and environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and is_first_process():
            # delete when the minimum torch restarts ranks: findings/restarted-ranks-connect-to-ended-ones.sh
            say_once(
                "torchrun --max-restarts: restarted ranks may connect to ended ones (pytorch#135712); start torchrun "
                "with the environment variable TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
            )
    elif is_srun(environment):
        _check_srun(devices, nodes, environment)
    elif launcher and not trainer.get("plugins"):
        _check_other(devices, nodes, environment)
    elif _is_pod(environment) and not trainer.get("plugins") and (nodes == 1 or _missing(environment)):
        pods = environment["WORLD_SIZE"]
        given = f"{environment['RANK']} of WORLD_SIZE {pods}, without LOCAL_RANK"
        allowed = "also LOCAL_RANK, as torchrun sets it; otherwise each process trains a run of its own"
        starts = "torchrun --node-rank $RANK --master-addr $MASTER_ADDR --master-port $MASTER_PORT"
        fix = f"start {starts} --nnodes {pods} --nproc-per-node {devices or 'GPUS'} in each pod"
        require(False, "RANK", given, allowed, f"{fix}, with trainer.num_nodes: {pods}; or unset RANK and WORLD_SIZE")
    elif nodes > 1 and not launcher and not trainer.get("plugins"):  # such as Lightning's KubeflowEnvironment
        missing = _missing(environment)
        given = f"{nodes}, but no launcher started the processes of the other nodes, and {missing} not set here"
        starts = f"srun --nodes={nodes} ..., torchrun --nnodes {nodes} ..."
        fix = f"lit-fsdp slurm submit, {starts}, or set these on each node"
        require(not missing, "trainer.num_nodes", given, f"1, or a launcher, or {', '.join(_BY_HAND)}", fix)


def _check_torchrun(devices: int | None, nodes: int, environment: Mapping[str, str]) -> None:
    local, world = int(environment["LOCAL_WORLD_SIZE"]), int(environment["WORLD_SIZE"])
    agents = int(environment.get("GROUP_WORLD_SIZE") or max(1, world // local))
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS") or 1)
    given = f"srun, which started torchrun {tasks} times, each for a run of {agents} node(s)"
    allowed = f"one torchrun per node of one run: torchrun --nnodes {tasks}; or srun alone"
    require(tasks in (1, agents), "command line", given, allowed, "srun lit-fsdp fit ... without torchrun")
    fix = _TORCHRUN.format(nodes=nodes, devices=devices or local)
    given = f"{devices} under torchrun, which started {local} processes on this node"
    both = f"set trainer.devices: {local}" + (f" and trainer.num_nodes: {agents}" if nodes != agents else "")
    require(devices in (None, local), "trainer.devices", given, f"{local}", f"{both}, or {fix}")
    given = f"{nodes} under torchrun with {world} processes, {local} on each node"
    require(nodes == agents, "trainer.num_nodes", given, f"{agents}", f"set trainer.num_nodes: {agents}, or {fix}")


def _check_srun(devices: int | None, nodes: int, environment: Mapping[str, str]) -> None:
    tasks = int(environment["SLURM_NTASKS"])
    job_nodes = int(environment.get("SLURM_STEP_NUM_NODES") or environment.get("SLURM_NNODES") or 1)
    per_node = max(1, tasks // nodes)
    again = f"start srun --nodes={nodes} --ntasks-per-node={devices or per_node}"
    given = f"started once, by the shell of a job with {tasks} tasks: the other tasks would never start"
    fix = (
        "write srun lit-fsdp fit ..., and #SBATCH --signal=USR1@120; or --ntasks=1, exec lit-fsdp fit ... and "
        "#SBATCH --signal=B:USR1@120; or let lit-fsdp slurm submit write the script"
    )
    require("SLURM_STEP_ID" in environment, "command line", given, "srun before the command, to start all tasks", fix)
    fix = f"set trainer.num_nodes: {job_nodes}, or request --nodes={nodes}"
    require(nodes == job_nodes, "trainer.num_nodes", f"{nodes} in a step of {job_nodes} node(s)", f"{job_nodes}", fix)
    given = f"{devices} on {nodes} node(s), but srun started {tasks} task(s)"
    allowed = "one task per device, or --ntasks=1 on one node, which starts all of them"
    fix = f"{again}, or set trainer.devices: {per_node}"
    require(devices is None or devices * nodes == tasks, "trainer.devices", given, allowed, fix)
    counts, field = _tasks_per_node(environment), "SLURM_STEP_TASKS_PER_NODE"
    given = f"{environment.get(field)}: the {tasks} tasks are not spread evenly"
    require(len(set(counts)) < 2, field, given, f"{per_node} on each of {nodes} nodes", again)
    how = re.split("[:,]", environment.get("SLURM_DISTRIBUTION", "block"))[0]
    given = f"{how}: neighboring ranks are on different nodes, and so are ranks that share one copy"
    is_in_order = nodes == 1 or per_node == 1 or how in ("block", "pack")
    require(is_in_order, "SLURM_DISTRIBUTION", given, "block", f"{again} --distribution=block")


def _check_other(devices: int | None, nodes: int, environment: Mapping[str, str]) -> None:
    launcher, started = other_launcher(environment)
    per_node = devices or max(1, started // nodes)
    if launcher == "jsrun" or importlib.util.find_spec("mpi4py"):
        given = f"{devices or 'auto'} on {nodes} node(s), but {launcher} started {started} process(es)"
        fix = f"start {per_node * nodes} processes with {launcher}"
        require(started == per_node * nodes, "trainer.devices", given, "one process per device", fix)
    elif "LOCAL_RANK" not in environment and _missing(environment):
        given = f"{started} processes of {launcher}, which become ranks of one run only with the package mpi4py"
        allowed = "srun, torchrun, or one process, which starts all ranks of its node"
        fix = f"start torchrun --nnodes {nodes} --nproc-per-node {per_node} on each node, or pip install mpi4py"
        require(devices == nodes == 1, "command line", given, allowed, fix)


def _is_pod(environment: Mapping[str, str]) -> bool:
    """Whether the variables are those of one of several pods, such as of a PyTorchJob, without torchrun."""
    return "RANK" in environment and "LOCAL_RANK" not in environment and environment.get("WORLD_SIZE", "1") != "1"


def _missing(environment: Mapping[str, str]) -> str:
    return ", ".join(name for name in _BY_HAND if not environment.get(name))


def other_launcher(environment: Mapping[str, str]) -> tuple[str, int]:
    """The launcher besides torchrun and srun, and its number of processes; "" without one, or for one MPI process."""
    for name, launcher in _SIZES.items():
        started = int(environment.get(name) or 0)
        if started > 1 or (started and launcher == "jsrun"):
            return launcher, started
    return "", 1


def is_srun(environment: Mapping[str, str]) -> bool:
    """Whether Lightning treats this process as started by srun, after :func:`adopt_step`."""
    return "SLURM_NTASKS" in environment and environment.get("SLURM_JOB_NAME") not in _SHELLS


def _tasks_per_node(environment: Mapping[str, str]) -> list[int]:
    """``2(x2),1`` → 2, 2, 1; empty outside of a step."""
    found = _TASKS.findall(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return [int(tasks) for tasks, times in found for _ in range(int(times or 1))]


def _first_node(nodes: str) -> str:
    """The first name in SLURM's short notation: ``a[03-05,7],b1`` → ``a03``."""
    match = re.match(r"([^\[,]*)(?:\[([^\],-]*))?", nodes)
    return "".join(match.groups(default="")) if match else ""


def devices_of(trainer: Mapping[str, Any]) -> int | None:
    """Devices per node, or ``None`` for all available."""
    given = trainer.get("devices")
    if isinstance(given, list):
        return len(given)
    return int(given) if given is not None and str(given).isdigit() else None
