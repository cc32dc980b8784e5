"""SLURM's own commands, with errors that say which one failed and what it said."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from lit_fsdp.errors import ConfigError

_PAIR = re.compile(r"(\w+(?:/\w+)?)=(\S*)")
_ENDED = (
    *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY"),
    *("PREEMPTED", "REVOKED"),
    "UNKNOWN",  # of a job that SLURM has forgotten: how it ended nobody knows
)
_SECONDS = 60
_SILENT = (
    "Unable to contact slurm controller",
    "Socket timed out",
    "Connection refused",
    "Zero Bytes were transmitted",
)
_FORGOTTEN = "Invalid job id"


class SlurmError(ConfigError):
    """A command of SLURM refused what it was given, or is not there."""


class SlurmSilent(SlurmError):
    """The controller did not answer; it may do so later."""


class JobForgotten(SlurmError):
    """The controller knows no job of that number: there was none, or it ended long ago."""


@dataclass(frozen=True)
class JobState:
    """What SLURM says of one job (or of one task of an array)."""

    job_id: str
    raw_id: str
    """``SLURM_JOB_ID`` inside of it, by which its logs are named; another one for each task of an array."""
    state: str
    """PENDING, RUNNING, COMPLETED, …; UNKNOWN: it has ended, and nobody knows how."""
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
    num_nodes: str = ""
    """Nodes it has, had or, as ``2-4`` where fewer will do, wants."""

    @property
    def is_ended(self) -> bool:
        """Whether it will not run any more."""
        return self.state in _ENDED


def run_slurm(words: Sequence[str], timeout_seconds: float = _SECONDS, is_apart: bool = False) -> str:
    """Standard output of one of SLURM's commands; what it warns of goes to our standard error.

    Args:
        words: The command.
        timeout_seconds: After which it is killed.
        is_apart: Whether Ctrl-C in this terminal leaves it alone.

    Raises:
        SlurmError: It is not installed, does not answer, or refuses.
    """
    if shutil.which(words[0]) is None:
        raise SlurmError(
            words[0], "not found on this machine", "a login node of a SLURM cluster", "log in to the cluster first"
        )
    try:
        done = subprocess.run(  # noqa: S603
            list(words), capture_output=True, text=True, errors="replace", timeout=timeout_seconds, check=False,
            start_new_session=is_apart,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise SlurmSilent(
            words[0], f"no answer in {timeout_seconds:.0f} s", "a controller that answers", "see sinfo, and try again"
        ) from None
    if done.returncode:
        raise _refused(words, done)
    if done.stderr.strip():
        print(done.stderr.strip(), file=sys.stderr, flush=True)
    return done.stdout


def _refused(words: Sequence[str], done: subprocess.CompletedProcess[str]) -> SlurmError:
    said = " ".join((done.stderr or done.stdout).split())
    given = f"{said} (exit code {done.returncode})" if said else f"exit code {done.returncode}"
    if _FORGOTTEN in said:
        allowed = "the number of a job that the controller remembers"
        return JobForgotten("job", f"{words[-1]}: {said}", allowed, "give the run folder, or see squeue --me and sacct")
    if any(sign in said for sign in _SILENT):
        return SlurmSilent(words[0], given, "a controller that answers", "see sinfo, and try again later")
    return SlurmError(words[0], given, "what this cluster accepts", "mend the slurm section, or see sinfo and sacctmgr")


def job_states(job_id: str) -> list[JobState]:
    """The job, or every task of an array, that the controller or the accounting remembers.

    Raises:
        JobForgotten: They remember none of that number.
        SlurmSilent: The controller does not answer.
        SlurmError: Anything else.
    """
    try:
        text = run_slurm(["scontrol", "show", "job", "--oneliner", job_id])
    except JobForgotten as error:
        found = _accounted(job_id)
        if not found:
            raise error
        return found
    return [_state(line) for line in text.splitlines() if "JobId=" in line]


def _accounted(job_id: str) -> list[JobState]:
    """The same by sacct, where the cluster keeps accounts; else nothing."""
    columns = "JobID,JobIDRaw,State,ExitCode,NodeList,Reason,Elapsed"
    try:
        text = run_slurm(["sacct", "--noheader", "--parsable2", "--allocations", "-o", columns, "-j", job_id])
    except SlurmError:  # most small clusters keep none; the caller says that the job is not known
        return []
    rows = [line.split("|") for line in text.splitlines() if line.count("|") == 6]
    return [
        JobState(name, raw, state.split(" ")[0], exit_code(code), 0, nodes, reason, time)
        for name, raw, state, code, nodes, reason, time in rows
    ]


def exit_code(text: str) -> int:
    """SLURM's ``code:signal`` as a shell has it."""
    code, _, number = text.partition(":")
    return int(code) or (128 + int(number) if int(number or 0) else 0)


def _state(line: str) -> JobState:
    found = dict(_PAIR.findall(line))
    array = found.get("ArrayTaskId", "")
    name = f"{found['ArrayJobId']}_{array}" if array and "ArrayJobId" in found else found["JobId"]
    return JobState(
        job_id=name,
        raw_id=found["JobId"],
        state=found.get("JobState", ""),
        exit_code=exit_code(found.get("ExitCode", "0:0")),
        restarts=int(found.get("Restarts", "0")),
        nodes=found.get("NodeList", ""),
        reason=found.get("Reason", ""),
        time=found.get("RunTime", ""),
        num_nodes=found.get("NumNodes", ""),
    )
