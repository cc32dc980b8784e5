"""The slurm section: how a recipe runs on a SLURM cluster."""

import re
from dataclasses import dataclass
from typing import Literal

from lit_fsdp.errors import ConfigError, require

_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<rest>\d+(?::\d+){0,2})")
_WORDS = re.compile(r"(?P<number>[1-9]\d*) ?(?P<unit>[dhm])[a-z]*")
_SIZE = re.compile(r"\d+([KMGT]B?)?", re.IGNORECASE)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OURS = re.compile(
    r"(MASTER_ADDR|MASTER_PORT|RANK|(LOCAL|NODE|GROUP)_RANK|(LOCAL_)?WORLD_SIZE|LIT_FSDP_EXIT_DIR"
    r"|SLURM_(N?TASKS|NPROCS|NNODES|NODEID|NODELIST|PROCID|LOCALID|RESTART_COUNT|JOB_?|STEP|ARRAY).*)"
)
"""Variables that the script or srun sets; srun's input options, such as SLURM_MPI_TYPE, belong to the user."""
_ONE_LINE = ("partition", "account", "qos", "constraint", "mem", "job_name", "container", "env_file")
_KEYS = ("account", "constraint", "cpus_per_task", "job_name", "mem", "partition", "qos", "time")
_NOT_EXTRA = (
    *("--nodes", "-N", "--ntasks", "-n", "--ntasks-per-node", "--ntasks-per-gpu", "--overcommit", "-O", "--gpus", "-G"),
    *("--gres", "--gpus-per-node", "--gpus-per-task", "--gpu-bind", "--distribution", "-m", "--array", "-a"),
    *("--output", "-o", "--error", "-e", "--open-mode", "--chdir", "-D", "--clusters", "-M", "--wait", "-W"),
    *("--signal", "--requeue", "--no-requeue", "-A", "-C", "-c", "-J", "-p", "-q", "-t"),
    *(f"--{key.replace('_', '-')}" for key in _KEYS),
)
"""Options of sbatch that the script sets itself or that would break it."""


@dataclass(frozen=True, kw_only=True)
class SlurmConfig:
    """The ``slurm`` section, used by ``lit-fsdp slurm`` only; the run ignores it."""

    nodes: int | None = None
    """Nodes of the job; default: trainer.num_nodes."""
    gpus_per_node: int | None = None
    """GPUs per node, one process each; default: trainer.devices; 0 with trainer.accelerator cpu: CPU processes."""
    time: str | int | None = None
    """Time limit in SLURM's format: minutes, H:M:S or D-H:M:S; default: the partition's."""
    partition: str | None = None
    """Partition; default: the cluster's."""
    account: str | None = None
    """Account to charge."""
    qos: str | None = None
    """Quality of service."""
    constraint: str | None = None
    """Required node features."""
    mem: str | int | None = None
    """Host memory per node, e.g. 480G, or a number in MiB; 0: all."""
    cpus_per_task: int | None = None
    """CPU cores per process."""
    job_name: str | None = None
    """Job name in the queue; default: the name of the run folder."""
    container: str | None = None
    """Container image of the processes."""
    container_runtime: Literal["pyxis", "apptainer"] = "pyxis"
    """Runtime of the image: Pyxis with Enroot (flags of srun), or Apptainer."""
    container_mounts: list[str] | None = None
    """Folders mounted in the container, HOST or HOST:INSIDE; the run folder always is."""
    env: dict[str, str] | None = None
    """Environment variables of the processes."""
    master_addr: str | None = None
    """Rendezvous address on the first node; {node} is its name, e.g. "{node}-ib0"; default: its name."""
    master_port: int | None = None
    """Rendezvous port, or the next free port; default: derived from the job ID."""
    env_file: str | None = None
    """Shell file to source before the run, e.g. to load modules."""
    setup: list[str] | None = None
    """Shell lines to run before the run, once per job on its first node, on the host; a failing line ends the job."""
    extra: list[str] | None = None
    """Further options of sbatch, one per entry, e.g. [--exclusive, --mail-type=END]."""
    command: list[str] | None = None
    """Command that starts lit-fsdp on a node; default: this Python with -m lit_fsdp, or lit-fsdp in a container."""
    cpu_bind: str | None = None
    """srun's --cpu-bind, e.g. cores; default: SLURM's own."""
    signal_lead_seconds: int = 120
    """Seconds before the time limit at which every process is signaled to save and stop."""
    requeue: bool = True
    """Requeue the job, which then resumes automatically, if it saved and stopped, if a node failed, or if a rank was
    killed or lost after a checkpoint was saved since the job's last start."""
    max_requeues: int = 10
    """Maximum number of restarts, including those by SLURM itself after preemption or a lost node."""

    def __post_init__(self) -> None:
        if isinstance(self.mem, int):
            object.__setattr__(self, "mem", str(self.mem))
        is_size = self.mem is None or _SIZE.fullmatch(str(self.mem))
        require(is_size, "mem", self.mem, "a number with K, M, G or T, or of MiB; 0: all", "write mem: 480G")
        for field, least in (
            *(("nodes", 1), ("gpus_per_node", 0), ("cpus_per_task", 1)),
            *(("max_requeues", 0), ("signal_lead_seconds", 1), ("master_port", 1)),
        ):
            value = getattr(self, field)
            is_right = value is None or least <= value <= 65535
            require(is_right, field, value, f"{least} to 65535", f"write {field}: {max(least, 1)}")
        allowed = "text in quotes: without them YAML reads 12:00:00 as the number 43200"
        require(not isinstance(self.time, int), "time", self.time, allowed, 'write time: "12:00:00"')
        if isinstance(self.time, str):
            time_seconds(self.time)
        for name, value in (self.env or {}).items():
            require(_NAME.fullmatch(name), "env", repr(name), "names of letters, digits and _", "fix its name")
            fix = "drop it; set slurm.master_addr and slurm.master_port for the rendezvous"
            require(not _OURS.fullmatch(name), f"env.{name}", repr(value), "not a variable of the launcher", fix)
        is_text = not (self.container or "").startswith("{")
        require(is_text, "container", self.container, "the path or name of an image", "write container: image.sqsh")
        require(self.command != [], "command", "[]", "at least one word, or null", "drop command")
        self._check_lines()

    def _check_lines(self) -> None:
        """Refuse values that would span two lines of the script."""
        values = {name: getattr(self, name) for name in _ONE_LINE}
        for name in ("extra", "container_mounts"):
            values |= {f"{name}[{i}]": value for i, value in enumerate(getattr(self, name) or [])}
        for field, value in values.items():
            is_line = value is None or (value.strip() and value.isprintable())
            require(is_line, field, repr(value), "one line of text without control characters", f"fix {field}")
        for i, text in enumerate(self.extra or []):
            require(text.startswith("-"), f"extra[{i}]", text, "an option of sbatch", "begin it with --")
            for word in text.partition("=")[0].split():  # the script quotes everything after the first =
                name = word if word.startswith("--") else word[:2]
                allowed = f"no {name}: set it in the trainer or slurm section"
                require(name not in _NOT_EXTRA, f"extra[{i}]", text, allowed, f"drop {name} from slurm.extra")


def time_seconds(text: str) -> int | None:
    """Seconds of a time limit as sbatch reads it; ``None`` for no limit.

    Allowed are minutes, M:S, H:M:S, D-H, D-H:M and D-H:M:S, and UNLIMITED or INFINITE.

    Raises:
        ConfigError: It is none of these, or zero.

    Source: ``man sbatch``, ``--time``.
    """
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return None
    match, total = _TIME.fullmatch(text.strip()), 0
    if match:
        numbers = [int(part) for part in match["rest"].split(":")]
        if match["days"] is None and len(numbers) < 3:
            numbers = [0, *numbers]  # starts with minutes
        hours, minutes, seconds = [*numbers, 0, 0][:3]
        total = int(match["days"] or 0) * 86400 + hours * 3600 + minutes * 60 + seconds
    if total <= 0:
        allowed = "minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S above zero"
        words = _WORDS.fullmatch(text.strip().lower())
        minutes = int(words["number"]) * {"d": 1440, "h": 60, "m": 1}[words["unit"]] if words else 720
        raise ConfigError("time", repr(text), allowed, f'write time: "{minutes // 60}:{minutes % 60:02}:00"')
    return total
