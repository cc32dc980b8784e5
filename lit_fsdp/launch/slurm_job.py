"""Run a recipe as a SLURM job: render the template ``job.sbatch`` and submit it.

One task per process, one ``srun``. The batch shell runs on the first node of the job; it only sets the rendezvous,
starts the step and requeues the job after the step has saved and stopped. No value is executed as code.
"""

import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lit_fsdp import __version__
from lit_fsdp.config.run import RunConfig
from lit_fsdp.config.slurm import SlurmConfig
from lit_fsdp.errors import ConfigError, require
from lit_fsdp.redaction import hidden_keys, redact_values

_TEMPLATE = Path(__file__).with_name("job.sbatch")
_SAID = "slurm.setup: this line failed and ends the job: $BASH_COMMAND"


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job to submit."""

    config: SlurmConfig
    run_folder: Path
    """Absolute; the same on all nodes."""
    nodes: int
    tasks_per_node: int
    """Processes per node: one per GPU."""
    gpus_per_node: int
    """0 for processes on CPUs."""
    ckpt_path: str | None = None
    """Checkpoint from which the first start resumes; a requeued job resumes from the last checkpoint."""

    @property
    def name(self) -> str:
        """Name in the queue; Lightning would treat a job called ``bash`` or ``interactive`` as a shell."""
        name = self.config.job_name or self.run_folder.name
        return "lit_fsdp" if name in ("", "bash", "interactive") else name

    @property
    def folder(self) -> Path:
        """Folder of the recipe, the script and the logs of the job."""
        return self.run_folder / "slurm"

    @property
    def command(self) -> list[str]:
        """Command that starts lit-fsdp on a node."""
        default = ["lit-fsdp"] if self.config.container else [sys.executable, "-m", "lit_fsdp"]
        return self.config.command or default

    @property
    def image(self) -> str:
        """The container image: an absolute path if it is a file, else its name in a registry."""
        path = Path(str(self.config.container)).expanduser()
        is_path = path.is_file() or str(self.config.container).startswith((".", "/", "~"))
        return str(path.absolute()) if is_path else str(self.config.container)

    @property
    def mounts(self) -> list[str]:
        """Folders mounted in the container, the run folder first; host folders are absolute paths."""
        found = [str(self.run_folder)]
        for given in self.config.container_mounts or []:
            host, colon, inside = given.partition(":")
            found.append(f"{Path(host).expanduser().absolute()}{colon}{inside}")
        return found


def plan_job(run: RunConfig, ckpt_path: str | None = None) -> Job:
    """Plan the job of a checked recipe; its first start resumes from ``ckpt_path``.

    Raises:
        ConfigError: The job and the Trainer differ in size, or the number of processes is unknown.
    """
    config, accelerator = run.slurm, run.trainer.get("accelerator")
    fix = "set trainer.devices: 8, or give --gpus-per-node 8"
    require(run.world_size, "trainer.devices", run.trainer.get("devices"), "the number of processes per node", fix)
    tasks = (run.world_size or 1) // run.num_nodes
    gpus = 0 if accelerator == "cpu" else tasks
    nodes, wanted = config.nodes or run.num_nodes, config.gpus_per_node
    given = f"{nodes} with trainer.num_nodes {run.num_nodes}"
    require(nodes == run.num_nodes, "slurm.nodes", given, "equal numbers", f"give --nodes {nodes}")
    given = f"{wanted} with trainer.devices {tasks} and trainer.accelerator {accelerator or 'auto'}"
    fix = "give --gpus-per-node N; for processes on CPUs set trainer.accelerator: cpu and slurm.gpus_per_node: 0"
    fix = "set trainer.accelerator: gpu" if accelerator == "cpu" and wanted else fix
    require(wanted in (None, gpus), "slurm.gpus_per_node", given, f"{gpus}", fix)
    folder = Path(run.trainer["default_root_dir"]).expanduser().absolute()
    allowed = "one line without backslashes: SLURM does not insert the job ID into paths with them"
    is_line = str(folder).isprintable() and "\\" not in str(folder)
    require(is_line, "trainer.default_root_dir", repr(str(folder)), allowed, "rename the folder")
    if ckpt_path not in (None, "last", "best"):  # the script quotes it, so nothing expands it
        ckpt_path = str(Path(str(ckpt_path)).expanduser().absolute())
    return Job(
        config=config,
        run_folder=folder,
        nodes=nodes,
        tasks_per_node=tasks,
        gpus_per_node=gpus,
        ckpt_path=ckpt_path,
    )


def render(job: Job) -> str:
    """Render the script for ``sbatch``."""
    config, quoted = job.config, shlex.quote
    size = f"{job.gpus_per_node} GPUs" if job.gpus_per_node else f"{job.tasks_per_node} processes on CPUs"
    processes = "one process per GPU" if job.gpus_per_node else f"{job.tasks_per_node} process(es) per node, on CPUs"
    flags, command = _how(job)
    address = config.master_addr or "{node}"
    values = {
        "version": __version__,
        "title": f"{' '.join(job.name.split())} on {job.nodes} node(s) with {size} each",
        "options": "\n".join(_options(job)),
        "environment": "".join(f"\n{line}" for line in _environment(job)),
        "run_folder": quoted(str(job.run_folder)),
        "cap": config.max_requeues if config.requeue else 0,
        "ckpt_path": f"--ckpt_path {quoted(job.ckpt_path)}" if job.ckpt_path else "",
        "nodes": job.nodes,
        "master_addr": '"$node"'.join(quoted(part) if part else "" for part in address.split("{node}")),
        "master_port": config.master_port or "$((20000 + SLURM_JOB_ID % 10000))",
        "processes": processes,
        "tasks": job.tasks_per_node,
        "all_tasks": job.nodes * job.tasks_per_node,
        "flags": "".join(f" \\\n  {flag}" for flag in flags),
        "command": command,
    }
    # in one pass, so that inserted values are not expanded
    return re.sub(r"\{\{(\w+)\}\}", lambda found: str(values[found[1]]), _TEMPLATE.read_text(encoding="utf-8"))


def sbatch_value(text: str) -> str:
    """Quote a value of an ``#SBATCH`` line: sbatch splits at blanks and handles quotes and backslashes; no shell."""
    if text and all(c.isalnum() or c in "-_./:,=@%+[]&|*()" for c in text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _options(job: Job) -> list[str]:
    config, tasks = job.config, job.tasks_per_node
    values: dict[str, str | int | None] = {"job-name": job.name, "nodes": job.nodes, "ntasks-per-node": tasks}
    values["gpus-per-node"] = job.gpus_per_node or None
    for key in ("cpus_per_task", "mem", "time", "partition", "account", "qos", "constraint"):
        values[key.replace("_", "-")] = getattr(config, key)
    values["output"] = f"{job.folder}".replace("%", "%%") + "/%j.log"
    values["open-mode"] = "append"
    values["signal"] = f"USR1@{config.signal_lead_seconds}"  # to every process, before the time limit
    found = [f"#SBATCH --{name}={sbatch_value(str(value))}" for name, value in values.items() if value is not None]
    found.append(f"#SBATCH --{'requeue' if config.requeue and config.max_requeues else 'no-requeue'}")
    for option in config.extra or []:
        name, equals, value = option.partition("=")
        found.append(f"#SBATCH {name}={sbatch_value(value)}" if equals else f"#SBATCH {option}")
    return found


def _environment(job: Job) -> list[str]:
    """The user's additions, run without our shell options: files that load modules read unset variables."""
    config, lines = job.config, []
    if config.env_file:
        path = Path(config.env_file).expanduser().absolute()  # bash would look for a bare name in PATH
        text = shlex.quote(f"slurm.env_file {path} ended with an error: make its last line succeed")
        lines.append(f". {shlex.quote(str(path))} || {{ echo {text}; exit 1; }}")
    for name, value in (config.env or {}).items():
        lines.append(f"export {name}={shlex.quote(value)}")
        if config.container and config.container_runtime == "apptainer":  # else the image's own value wins
            lines.append(f"export APPTAINERENV_{name}={shlex.quote(value)}")
    if config.setup:
        lines += ["set -e", f"trap 'echo \"{_SAID}\"' ERR", *config.setup]
    return lines


def _how(job: Job) -> tuple[list[str], str]:
    """Further flags of srun, and the shell command, inside the container if there is one."""
    config, flags = job.config, []
    if config.cpu_bind:
        flags.append(f"--cpu-bind={shlex.quote(config.cpu_bind)}")
    if config.cpus_per_task:
        flags.append(f"--cpus-per-task={config.cpus_per_task}")  # srun no longer inherits it from sbatch
    command = shlex.join(job.command)
    if config.container and config.container_runtime == "pyxis":
        # relative paths of the recipe refer to the folder from which the job was submitted
        mounts = ",".join(mount if ":" in mount else f"{mount}:{mount}" for mount in job.mounts)
        flags += [
            f"--container-image={shlex.quote(job.image)}",
            f'--container-mounts={shlex.quote(mounts)}",$PWD:$PWD" --container-workdir="$PWD"',
        ]
        if config.env:  # else the image's own values win
            flags.append(f"--container-env={','.join(config.env)}")
    elif config.container:
        binds = " ".join(f"--bind {shlex.quote(mount)}" for mount in job.mounts)
        nvidia = "--nv " if job.gpus_per_node else ""
        command = f'apptainer exec {nvidia}{binds} --bind "$PWD" --pwd "$PWD" {shlex.quote(job.image)} {command}'
    return flags, command


# -- submitting: recipe, script and logs are in RUN/slurm


def submit(job: Job, values: Mapping[str, Any]) -> str:
    """Write recipe and script to the run folder and submit; return the job ID, which also names the script.

    Raises:
        ConfigError: The recipe contains a secret, the run folder cannot be written, or sbatch refuses.
    """
    recipe, script = _recipe(job, values), job.folder / "job.sbatch"
    try:
        job.folder.mkdir(parents=True, exist_ok=True)
        (job.folder / "recipe.yaml").write_text(recipe, encoding="utf-8")
        script.write_text(render(job), encoding="utf-8")
    except OSError as error:
        given = f"{error.filename or job.folder}: {error.strerror}"
        raise ConfigError("trainer.default_root_dir", given, "a folder that can be written") from None
    words = ["sbatch", "--parsable", str(script)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)  # noqa: S603
    except FileNotFoundError:
        raise ConfigError("sbatch", "not found on this machine", "a login node of a SLURM cluster") from None
    # NUMBER[;CLUSTER]; sites may wrap sbatch in scripts that print a greeting
    numbers = re.findall(r"^(\d+)(?:;\S*)?$", done.stdout.strip(), re.MULTILINE)
    if done.returncode or not numbers:
        reason = " ".join((done.stderr or done.stdout).split())
        given, fix = f"{reason} (exit code {done.returncode})", "check the slurm section; sinfo lists the partitions"
        fix = fix if done.returncode else "squeue --me shows whether it was submitted"
        raise ConfigError("sbatch", given, "what this cluster accepts", fix)
    print(done.stderr.strip(), file=sys.stderr)
    script.rename(job.folder / f"{numbers[-1]}.sbatch")
    return str(numbers[-1])


def _recipe(job: Job, values: Mapping[str, Any]) -> str:
    """The recipe for the job; secrets are rejected, because no file of a run may contain them."""
    shown = redact_values(dict(values))
    if shown != values:
        key = next(iter(hidden_keys(shown)), "recipe")
        fix = "drop it from the recipe; set its variable in a private file and name it in slurm.env_file"
        raise ConfigError(key, "a secret", "secrets only in the environment, not in files of a run", fix)
    kept = {key: value for key, value in values.items() if key != "ckpt_path"}
    kept["trainer"] = {**(kept.get("trainer") or {}), "default_root_dir": str(job.run_folder)}
    return yaml.safe_dump(kept, sort_keys=False, allow_unicode=True)
