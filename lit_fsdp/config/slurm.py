"""Where and how a recipe runs on a SLURM cluster."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from lit_fsdp.config.slurm_extra import check_extra
from lit_fsdp.errors import ConfigError

LARGEST_SEED = 2**32 - 1
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<rest>\d+(?::\d+){0,2})")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SET_BY_SLURM = re.compile(
    r"SLURM_(N?TASKS|NTASKS|NPROCS|NNODES|NODEID|NODELIST|PROCID|LOCALID|RESTART_COUNT|DISTRIBUTION|CPU_BIND|JOB_?|STEP|ARRAY)"
)
"""Of a job and its ranks; srun's own options, such as SLURM_MPI_TYPE, are nobody's but the user's."""
_CPU_BIND = re.compile(
    r"((quiet|verbose|q|v),)*"
    r"(none|rank|cores|threads|sockets|ldoms|rank_ldom|rank_ldoms|boards|(map|mask)_(cpu|ldom):[0-9a-z*,-]+)",
    re.IGNORECASE,
)
"""As ``man srun`` has it."""
_ADDRESS = re.compile(r"([A-Za-z0-9._:-]|\{node\})+")
_OURS = {
    "MASTER_ADDR": "set slurm.master_addr",
    "MASTER_PORT": "set slurm.master_port",
    **dict.fromkeys(
        ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
        "drop it, and set slurm.nodes and slurm.gpus_per_node",
    ),
}
"""Variables that the script or srun sets, and what to do instead."""
_ONE_LINE = ("partition", "account", "qos", "constraint", "mem", "job_name", "dependency", "container", "env_file")


@dataclass(frozen=True, kw_only=True)
class SlurmConfig:
    """The ``slurm`` section, read by ``lit-fsdp slurm``; a run itself takes no notice of it."""

    nodes: int | None = None
    """Nodes of the job; default: trainer.num_nodes."""
    min_nodes: int | None = None
    """Nodes with which it starts, too, if there are no more, as after one has failed; default: only with all."""
    gpus_per_node: int | None = None
    """GPUs per node, one process each; default: trainer.devices. 0, with trainer.accelerator cpu: processes on CPUs."""
    time: str | int | None = None
    """Time limit as SLURM writes it: minutes, H:M:S or D-H:M:S; default: the partition's."""
    partition: str | None = None
    """Partition; default: the cluster's."""
    account: str | None = None
    """Account that is charged."""
    qos: str | None = None
    """Quality of service."""
    constraint: str | None = None
    """Features that the nodes must have."""
    mem: str | int | None = None
    """Host memory per node, e.g. 480G, or a number of MiB; 0: all of it."""
    cpus_per_task: int | None = None
    """CPU cores per process."""
    job_name: str | None = None
    """Name in the queue; default: the name of the run folder."""
    seeds: list[int] | None = None
    """A job array with one run per seed, each in its own folder seed-N below the run folder."""
    container: str | None = None
    """Image that the processes run in."""
    container_runtime: Literal["pyxis", "apptainer"] = "pyxis"
    """Who starts the image: Pyxis with Enroot (flags of srun), or Apptainer."""
    container_mounts: list[str] | None = None
    """Folders seen inside the image, HOST or HOST:INSIDE; the run folder always is."""
    env: dict[str, str] | None = None
    """Environment variables of the processes."""
    master_addr: str | None = None
    """Address of the first node, where the ranks meet; {node} is its name, e.g. "{node}-ib0"; default: its name."""
    master_port: int | None = None
    """Port where the ranks meet; one in use ends the job; default: one by the job's number that nobody listens on."""
    env_file: str | None = None
    """Shell file read before the run, e.g. one that loads modules."""
    setup: list[str] | None = None
    """Shell lines before the run, once per job on its first node; one that fails does not end the job."""
    dependency: str | None = None
    """What must end first, e.g. afterok:1234."""
    extra: list[str] | None = None
    """Further options of sbatch, e.g. [--exclusive, --mail-type=END]."""
    command: list[str] | None = None
    """Words that start lit-fsdp on a node; default: this Python -m lit_fsdp, or plain lit-fsdp in a container."""
    cpu_bind: str = "cores"
    """srun's --cpu-bind; none leaves it out."""
    signal_lead_seconds: int = 120
    """How long before the time limit every process is told to save and stop."""
    requeue: bool = True
    """Put a job back into the queue, where it resumes by itself, if it saved and stopped, if a node failed, or if a
    rank was killed, stopped, hung or was cut off after a checkpoint was made since the job's last start."""
    max_requeues: int = 10
    """Starts after the first at most, those that SLURM itself causes by preempting or losing a node included."""

    def __post_init__(self) -> None:
        if isinstance(self.mem, int):
            if self.mem < 0:
                raise ConfigError("mem", self.mem, ">= 0", "write mem: 480G, or mem: 0 for all of a node")
            object.__setattr__(self, "mem", str(self.mem))
        counts = (("nodes", 1), ("min_nodes", 1), ("gpus_per_node", 0), ("cpus_per_task", 1), ("max_requeues", 0))
        for field, least in counts:
            value = getattr(self, field)
            if value is not None and value < least:
                raise ConfigError(field, value, f">= {least}", f"write {field}: {least} or more")
        if self.signal_lead_seconds < 1 or self.signal_lead_seconds > 65535:
            raise ConfigError("signal_lead_seconds", self.signal_lead_seconds, "1 to 65535", "write 120")
        if isinstance(self.time, int):
            allowed = "text in quotes: without them YAML reads 12:00:00 as the number 43200"
            raise ConfigError("time", self.time, allowed, 'write time: "12:00:00"')
        if self.time is not None:
            time_seconds(self.time)
        if self.seeds is not None and (not self.seeds or len(set(self.seeds)) < len(self.seeds) or min(self.seeds) < 0):
            raise ConfigError("seeds", self.seeds, "different numbers >= 0, at least one", "write seeds: [1, 2]")
        if self.seeds is not None and max(self.seeds) > LARGEST_SEED:
            raise ConfigError("seeds", self.seeds, f"0 to {LARGEST_SEED}", "write seeds: [1, 2]")
        for name in self.env or {}:
            if not _NAME.fullmatch(name):
                raise ConfigError("env", repr(name), "names of letters, digits and _", "mend the variable's name")
            way_out = "drop it; SLURM sets it" if _SET_BY_SLURM.match(name) else _OURS.get(name)
            if way_out:
                raise ConfigError(f"env.{name}", repr((self.env or {})[name]), "no variable of the launch", way_out)
        for field, text in self._shell_texts():
            if "\0" in text:
                raise ConfigError(field, repr(text), "text without \\0, at which a shell ends it", f"mend {field}")
        if self.master_addr is not None and not _ADDRESS.fullmatch(self.master_addr):
            allowed = "an address of the first node, in which {node} stands for its name"
            raise ConfigError("master_addr", repr(self.master_addr), allowed, 'write master_addr: "{node}-ib0"')
        if self.master_port is not None and not 1 <= self.master_port <= 65535:
            raise ConfigError("master_port", self.master_port, "1 to 65535", "write master_port: 29500, or drop it")
        if not _CPU_BIND.fullmatch(self.cpu_bind):
            allowed = "cores | threads | sockets | ldoms | rank | rank_ldoms | map_cpu:LIST | mask_cpu:LIST | none"
            raise ConfigError("cpu_bind", repr(self.cpu_bind), allowed, "write cpu_bind: cores")
        if self.cpu_bind.lower() == "none":
            object.__setattr__(self, "cpu_bind", "none")
        if self.command == []:
            raise ConfigError("command", "[]", "at least one word, or null", "drop command")
        self._check_lines()

    def _shell_texts(self) -> Iterator[tuple[str, str]]:
        """What the shell of the job reads, of as many lines as it may have."""
        yield from ((f"env.{name}", text) for name, text in (self.env or {}).items())
        for field in ("setup", "command"):
            yield from ((f"{field}[{i}]", text) for i, text in enumerate(getattr(self, field) or []))

    def _check_lines(self) -> None:
        """Nothing that becomes one line of the script may hold two."""
        values = {name: getattr(self, name) for name in _ONE_LINE}
        values |= {
            f"{name}[{i}]": v for name in ("extra", "container_mounts") for i, v in enumerate(getattr(self, name) or [])
        }
        for field, value in values.items():
            if value is not None and (not value.strip() or any(ord(c) < 32 or ord(c) == 127 for c in value)):
                raise ConfigError(field, repr(value), "one line of text without control characters", f"mend {field}")
        check_extra(self.extra or [])


def time_seconds(text: str) -> int | None:
    """Seconds of a time limit as sbatch reads it; ``None`` for no limit.

    Allowed are minutes, M:S, H:M:S, D-H, D-H:M and D-H:M:S, and UNLIMITED or INFINITE.

    Raises:
        ConfigError: It is none of these, or zero.

    Source: ``man sbatch``, ``--time``.
    """
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return None
    match = _TIME.fullmatch(text.strip())
    numbers = [int(part) for part in match["rest"].split(":")] if match else []
    if match and match["days"] is not None:
        hours, minutes, seconds = [*numbers, 0, 0][:3]
        total = int(match["days"]) * 86400 + hours * 3600 + minutes * 60 + seconds
    elif len(numbers) == 3:
        total = numbers[0] * 3600 + numbers[1] * 60 + numbers[2]
    elif numbers:
        total = numbers[0] * 60 + (numbers[1] if len(numbers) == 2 else 0)
    else:
        total = 0
    if total <= 0:
        allowed = "minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S above zero"
        raise ConfigError("time", repr(text), allowed, 'write time: "12:00:00"')
    return total
