"""A short step on all nodes of a job, to compare what the processes would find there."""

from __future__ import annotations

import json
import os
import sys
import uuid
from pathlib import Path
from typing import Any

from lit_fsdp.errors import ConfigError
from lit_fsdp.launch.slurm_client import SlurmError, run_slurm
from lit_fsdp.launch.slurm_job import FOLDER, Job

_PACKAGES = ("lit_fsdp", "torch", "lightning", "transformers")
_SECONDS = 300
_WHICH_NODES = ("--reservation=", "--exclude=", "--nodelist=", "--exclusive")
"""Beginnings of the options in ``slurm.extra`` that decide which nodes a job gets."""
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
    """One line on the nodes of a job, which agree.

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
    return compare(nodes, job)


def _ask(job: Job, token: Path) -> list[dict[str, Any]]:
    config = job.config
    words = ["srun", f"--nodes={job.nodes}", "--ntasks-per-node=1", f"--job-name=probe-{os.getpid()}", "--time=5"]
    words.append(f"--immediate={_SECONDS}")  # nothing stays in the queue when we stop waiting
    for name in ("partition", "account", "qos", "constraint"):
        value = getattr(config, name)
        if value is not None:
            words.append(f"--{name}={value}")
    words += [option for option in config.extra or [] if option.startswith(_WHICH_NODES)]
    python = job.command[0] if job.command[1:2] == ["-m"] else sys.executable
    start = [python]
    if config.container and config.container_runtime == "pyxis":
        words += [f"--container-image={config.container}", f"--container-mounts={job.run_folder}:{job.run_folder}"]
        start = ["python3"]
    elif config.container:
        start = ["apptainer", "exec", "--bind", str(job.run_folder), config.container, "python3"]
    try:
        out = run_slurm([*words, *start, "-c", _PROGRAM % (_PACKAGES,), str(token)], timeout_seconds=_SECONDS + 60)
    except SlurmError as error:
        fix = "see sinfo for idle nodes and the path of the Python there, or submit without --probe"
        raise SlurmError("--probe", f"srun: {error.given}", f"a short step on {job.nodes} node(s)", fix) from None
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


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
