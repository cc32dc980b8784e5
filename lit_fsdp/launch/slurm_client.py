"""SLURM's own commands, with errors that say which one failed and what it said."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from lit_fsdp.errors import ConfigError

_PAIR = re.compile(r"(\w+(?:/\w+)?)=(\S*)")
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY")
_SECONDS = 60


class SlurmError(ConfigError):
    """A command of SLURM refused what it was given, or is not there."""


@dataclass(frozen=True)
class JobState:
    """What SLURM says of one job (or of one task of an array)."""

    job_id: str
    state: str
    """PENDING, RUNNING, COMPLETED, …"""
    exit_code: int
    """Of the batch script; 128 + signal if one ended it."""
    restarts: int
    """How often it was put back into the queue."""
    nodes: str
    """Nodes it has or had."""
    reason: str
    """Why it waits or ended."""
    time: str
    """How long it has run since its last start."""

    @property
    def is_ended(self) -> bool:
        """Whether it will not run any more."""
        return self.state in _ENDED


def run_slurm(words: Sequence[str], timeout_seconds: float = _SECONDS) -> str:
    """Standard output of one of SLURM's commands.

    Raises:
        SlurmError: It is not installed, does not answer, or refuses.
    """
    if shutil.which(words[0]) is None:
        raise SlurmError(
            words[0], "not found on this machine", "a login node of a SLURM cluster", "log in to the cluster first"
        )
    try:
        done = subprocess.run(list(words), capture_output=True, text=True, timeout=timeout_seconds, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        raise SlurmError(
            words[0], f"no answer in {timeout_seconds:.0f} s", "a controller that answers", "see sinfo, and try again"
        ) from None
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
        raise SlurmError(
            words[0], said, "what this cluster accepts", "mend the slurm section, or see sinfo and sacctmgr"
        )
    return done.stdout


def job_states(job_id: str) -> list[JobState]:
    """The job, or every task of an array, that the controller remembers.

    Raises:
        SlurmError: It remembers none of that number.
    """
    text = run_slurm(["scontrol", "show", "job", "--oneliner", job_id])
    return [_state(line) for line in text.splitlines() if line.strip()]


def _state(line: str) -> JobState:
    found = dict(_PAIR.findall(line))
    code, _, number = found.get("ExitCode", "0:0").partition(":")
    array = found.get("ArrayTaskId", "")
    name = f"{found['ArrayJobId']}_{array}" if array and "ArrayJobId" in found else found["JobId"]
    return JobState(
        job_id=name,
        state=found.get("JobState", "UNKNOWN"),
        exit_code=int(code) or (128 + int(number) if int(number or 0) else 0),
        restarts=int(found.get("Restarts", "0")),
        nodes=found.get("NodeList", ""),
        reason=found.get("Reason", ""),
        time=found.get("RunTime", ""),
    )
