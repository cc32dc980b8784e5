"""A short step on all nodes of a job, to compare what the processes would find there."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lit_fsdp.errors import ConfigError
from lit_fsdp.launch.slurm_client import SlurmError, run_slurm
from lit_fsdp.launch.slurm_job import FOLDER, Job

_PACKAGES = ("lit_fsdp", "torch", "lightning", "transformers")
_SECONDS = 300
_WHICH_NODES = ("--reservation", "--exclude", "--nodelist", "--nodefile", "--exclusive")
"""Options in ``slurm.extra`` that decide which nodes a job gets."""
_SHORT = {"-w": "--nodelist", "-x": "--exclude", "-F": "--nodefile"}
_SHORTEST = 5
"""Letters by which sbatch may know an option, dashes included."""
_LONG_SHEBANG = re.compile(r"""'{3}exec' (?:"([^"]+)"|(\S+))""")
"""What pip writes into the second line of a script whose Python has too long a path for the first."""
# Run by the job's own Python on every node: only the standard library, so that it says what is missing.
_PROGRAM = """
import importlib.metadata as m, json, os, platform, socket, sys
def version(name):
    try:
        return m.version(name.replace("_", "-"))
    except m.PackageNotFoundError:
        return None
print(json.dumps({"node": socket.gethostname(), "python": platform.python_version(),
    "packages": {name: version(name) for name in %r}, "sees": os.path.exists(sys.argv[1])}))
"""


def probe(job: Job) -> str:
    """A line on the nodes of a job, which agree, and a note where another Python than the job's was asked.

    Raises:
        ConfigError: A node has another interpreter or package version, or does not see the run folder.
        SlurmError: The step could not run.
    """
    folder = job.run_folder / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    token = folder / f".probe-{uuid.uuid4().hex}"
    token.touch()
    try:
        nodes = _ask(job, token)
    finally:
        token.unlink(missing_ok=True)
    said = compare(nodes, job)
    if not job.config.container and python_of(job.command) is None:
        said += f"\nnote: which Python {job.command[0]} starts is not known; {sys.executable} was compared"
    return said


def _ask(job: Job, token: Path) -> list[dict[str, Any]]:
    config = job.config
    words = ["srun", f"--nodes={job.nodes}", "--ntasks-per-node=1", f"--job-name=probe-{os.getpid()}", "--time=5"]
    words.append(f"--immediate={_SECONDS}")  # nothing stays in the queue when we stop waiting
    for name in ("partition", "account", "qos", "constraint"):
        value = getattr(config, name)
        if value is not None:
            words.append(f"--{name}={value}")
    words += which_nodes(config.extra or [])
    start = python_of(job.command) or [sys.executable]
    if config.container and config.container_runtime == "pyxis":
        words += [f"--container-image={job.image}", f"--container-mounts={job.run_folder}:{job.run_folder}"]
        start = ["env", *(f"{name}={value}" for name, value in (config.env or {}).items()), "python3"]
    elif config.container:
        start = ["apptainer", "exec", "--bind", str(job.run_folder), job.image, "python3"]
    if not config.container or config.container_runtime == "apptainer":
        start = [*_surroundings(job), *start]
    try:
        out = run_slurm([*words, *start, "-c", _PROGRAM % (_PACKAGES,), str(token)], timeout_seconds=_SECONDS + 60)
    except SlurmError as error:
        fix = "see sinfo for idle nodes and the path of the Python there, or submit without --probe"
        raise SlurmError("--probe", f"srun: {error.given}", f"a short step on {job.nodes} node(s)", fix) from None
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


def which_nodes(extra: Sequence[str]) -> list[str]:
    """The options among ``slurm.extra`` that decide which nodes a job gets, as srun takes them."""
    found = []
    for text in extra:
        head, equals, value = text.partition("=")
        words = head.split()
        if equals and words:
            words[-1] += f"={value}"
        for word, following in zip(words, [*words[1:], ""], strict=True):
            name, equals, value = word.partition("=")
            if not name.startswith("--"):
                name, value = _SHORT.get(word[:2], ""), word[2:].removeprefix("=") or following
            name = next((n for n in _WHICH_NODES if len(name) >= _SHORTEST and n.startswith(name)), "")
            if name == "--exclusive":
                found.append(word)
            elif name == "--nodefile":  # srun knows a file by the slash in its name
                found.append(f"--nodelist={Path(value or following).absolute()}")
            elif name:
                found.append(f"{name}={value or following}")
    return found


def python_of(command: Sequence[str]) -> list[str] | None:
    """The words that start the Python of a command; ``None`` where that cannot be seen from it."""
    if "-m" in command:
        return list(command[: command.index("-m")])
    if "python" in Path(command[0]).name:  # with a script
        return [command[0]]
    path = shutil.which(command[0])
    if path is None or len(command) > 1:
        return None
    with open(path, "rb") as file:
        first, second = (file.readline(4096).decode("utf-8", "replace") for _ in range(2))
    long = _LONG_SHEBANG.match(second)
    words = [long[1] or long[2]] if long else first.removeprefix("#!").split() if first.startswith("#!") else []
    return words if words and "python" in words[-1].rpartition("/")[2] else None


def _surroundings(job: Job) -> list[str]:
    """The words before a command that give it what the job's script sets up; none where that is nothing."""
    config = job.config
    lines = []
    if config.env_file:
        lines.append(f". {shlex.quote(str(Path(config.env_file).expanduser().absolute()))} >&2 || exit 1")
    for name, value in (config.env or {}).items():
        lines.append(f"export {name}={shlex.quote(value)}")
        if config.container:
            lines.append(f"export APPTAINERENV_{name}={shlex.quote(value)}")
    if config.setup:
        lines += ["{", *config.setup, "} >&2"]
    return ["bash", "-c", "\n".join([*lines, 'exec "$@"']), "bash"] if lines else []


def compare(nodes: list[dict[str, Any]], job: Job) -> str:
    """One line on nodes that agree.

    Args:
        nodes: ``node``, ``python``, ``packages`` (version or None by name) and ``sees`` of each.
        job: How many there have to be.

    Raises:
        ConfigError: They do not agree.
    """
    if len(nodes) != job.nodes:
        raise ConfigError("--probe", f"answers of {len(nodes)} nodes", f"{job.nodes}", "see sinfo, and try again")
    blind = [node["node"] for node in nodes if not node["sees"]]
    if blind:
        raise ConfigError(
            "trainer.default_root_dir",
            f"{job.run_folder}, which {', '.join(blind)} does not see",
            "a folder on a file system that all nodes see",
            "set trainer.default_root_dir to a folder on the shared file system",
        )
    for what in ("python", *_PACKAGES):
        found = {node["node"]: node["python"] if what == "python" else node["packages"][what] for node in nodes}
        if len(set(found.values())) > 1 or None in found.values():
            listed = ", ".join(f"{version or 'none'} on {node}" for node, version in sorted(found.items()))
            raise ConfigError(
                "--probe",
                f"{what}: {listed}",
                "the same version on every node",
                "install into a folder that all nodes see, and name its Python in slurm.command",
            )
    first = nodes[0]
    versions = ", ".join(f"{name} {first['packages'][name]}" for name in _PACKAGES)
    return f"{len(nodes)} nodes agree: Python {first['python']}, {versions}; all see {job.run_folder}"
