"""Submitting a job, and finding it again: everything about it lies in ``RUN/slurm``."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from lit_fsdp.errors import ConfigError
from lit_fsdp.launch.slurm_client import JobForgotten, JobState, SlurmError, job_states, run_slurm
from lit_fsdp.launch.slurm_job import FOLDER, Job
from lit_fsdp.launch.slurm_script import render
from lit_fsdp.redaction import hidden_keys, redact_values

_JOBS = "jobs.jsonl"
_NUMBER = re.compile(r"\d+(?:_\d+|_\[[^]]*\])?")
_ENDED_WITH = re.compile(r" ended with exit code (\d+)")
_START = re.compile(r" start (\d+) on (\S+),")
_SLURM_SAYS = re.compile(r"\*\*\* (.+) \*\*\*")


def submit(job: Job, values: Mapping[str, Any]) -> str:
    """Write script and resolved recipe into the run folder, submit, and note the job's number.

    Ctrl-C while sbatch is at work waits for its answer, so that no job is in the queue whose number nobody knows.

    Args:
        job: What runs.
        values: The resolved recipe.

    Returns:
        The job's number.

    Raises:
        ConfigError: The recipe holds a secret, an earlier job of this run has not ended, or nothing can be written.
        SlurmError: sbatch refuses.
        KeyboardInterrupt: After the job was submitted and noted.
    """
    recipe = _recipe(job, values)
    _refuse_second(job.run_folder)
    folder = job.run_folder / FOLDER
    script = folder / "job.sbatch"
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        job.recipe.write_text(recipe, encoding="utf-8")
        script.write_text(render(job), encoding="utf-8")
    with _interrupts_later() as interrupts:
        number = _number(run_slurm(["sbatch", "--parsable", str(script)], is_apart=True))
        entry = {
            "job_id": number,
            "submitted": datetime.now(UTC).isoformat(timespec="seconds"),
            "nodes": job.nodes,
            "tasks_per_node": job.tasks_per_node,
            "script": f"{number}.sbatch",
        }
        with _writing(folder), (folder / _JOBS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
            script.rename(folder / f"{number}.sbatch")
    if interrupts:
        print(f"job {number} was submitted before Ctrl-C; end it: lit-fsdp slurm cancel {number}", file=sys.stderr)
        raise KeyboardInterrupt
    return number


def _number(text: str) -> str:
    """The number that sbatch prints, ``NUMBER[;CLUSTER]``; sites wrap sbatch in scripts that greet first."""
    numbers = re.findall(r"^(\d+)(?:;\S*)?$", text.strip(), re.MULTILINE)
    if not numbers:
        raise SlurmError("sbatch", repr(text[-200:]), "the number of a job", "see squeue --me whether there is one")
    return str(numbers[-1])


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        given = f"{error.filename or folder}: {error.strerror}"
        fix = "name another trainer.default_root_dir, or mend its permissions"
        raise ConfigError("trainer.default_root_dir", given, "a folder that can be written", fix) from None


@contextlib.contextmanager
def _interrupts_later() -> Iterator[list[int]]:
    """The first Ctrl-C is only noted; a second one is heard."""
    noted: list[int] = []

    def note(number: int, frame: Any) -> None:
        if noted:
            raise KeyboardInterrupt
        noted.append(number)
        print("Ctrl-C: waiting for the answer of sbatch", file=sys.stderr, flush=True)

    if threading.current_thread() is not threading.main_thread():
        yield noted
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)


def _recipe(job: Job, values: Mapping[str, Any]) -> str:
    """The recipe as the job reads it; secrets have no place in files."""
    shown = redact_values(dict(values))
    if shown != values:
        key = next(iter(hidden_keys(shown)), "recipe")
        raise ConfigError(
            key,
            "a secret, which would be written into the run folder",
            "secrets in the environment only",
            "drop it from the recipe; set its variable in a file that only you can read, and name it in slurm.env_file",
        )
    kept = {key: value for key, value in values.items() if key != "ckpt_path"}
    kept["trainer"] = {**(kept.get("trainer") or {}), "default_root_dir": str(job.run_folder)}
    return yaml.safe_dump(kept, sort_keys=False, allow_unicode=True)


def _refuse_second(run_folder: Path) -> None:
    for number in recorded_jobs(run_folder):
        try:
            states = job_states(number)
        except JobForgotten:
            continue  # ended long ago
        if any(not state.is_ended for state in states):
            raise ConfigError(
                "trainer.default_root_dir",
                f"{run_folder}, whose job {number} is {next(s.state for s in states if not s.is_ended)}",
                "one job per run folder",
                f"lit-fsdp slurm cancel {number}, or name another --trainer.default_root_dir",
            )


def recorded_jobs(run_folder: Path) -> list[str]:
    """Numbers of the jobs of a run, oldest first.

    Raises:
        ConfigError: The list is damaged.
    """
    path = run_folder / FOLDER / _JOBS
    if not path.is_file():
        return []
    found = []
    for i, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        if line.strip():
            try:
                found.append(str(json.loads(line)["job_id"]))
            except (ValueError, KeyError, TypeError):
                allowed = "one job per line, as submit writes it"
                raise ConfigError(f"{path}, line {i}", repr(line[:80]), allowed, "remove that line") from None
    return found


def find_jobs(run_or_number: str) -> tuple[str, Path | None]:
    """The newest job of a run folder, or the job of that number and its run folder where it is known.

    Raises:
        ConfigError: It is neither, or the run folder has no job.
    """
    folder = Path(run_or_number).expanduser()
    if _NUMBER.fullmatch(run_or_number) and not folder.is_dir():
        return run_or_number, _run_folder_of(run_or_number)
    numbers = recorded_jobs(folder)
    if not numbers:
        what = "in which no job was submitted" if folder.is_dir() else "which is no folder and no number"
        raise ConfigError(
            "run",
            f"{run_or_number}, {what}",
            "a run folder with slurm/jobs.jsonl, or a job's number",
            "lit-fsdp slurm submit --config R.yaml --nodes N",
        )
    return numbers[-1], folder.absolute()


def _run_folder_of(number: str) -> Path | None:
    try:
        text = run_slurm(["scontrol", "show", "job", number])
    except JobForgotten:
        return None
    logs = [line.strip().removeprefix("StdOut=") for line in text.splitlines() if line.strip().startswith("StdOut=")]
    folder = Path(logs[0]).parent if logs else Path()
    return folder.parent if folder.name == FOLDER else None


def states_of(number: str, run_folder: Path | None, raw_ids: Sequence[str] = ()) -> list[JobState]:
    """Where a job is, or how it ended: by the controller, by the accounting, or by its own log.

    Args:
        number: Of the job.
        run_folder: Where its logs are; ``None``: not known.
        raw_ids: Of the tasks of an array, as far as they were seen.

    Raises:
        JobForgotten: Nothing is known of it.
        SlurmError: The controller does not answer.
    """
    try:
        return job_states(number)
    except JobForgotten:
        logs = {raw: run_folder / FOLDER / f"{raw}.log" for raw in raw_ids or [number]} if run_folder else {}
        found = [state for raw, log in logs.items() if (state := _state_by_log(raw, log)) is not None]
        if not found and run_folder:
            raise _forgotten_without_log(number, run_folder) from None
        if not found:
            raise
        return found


def _forgotten_without_log(number: str, run_folder: Path) -> JobForgotten:
    given = f"{number}, which SLURM has forgotten, without a log in {run_folder / FOLDER}: it ended before it began"
    fix = "see sacct where there is accounting; lit-fsdp slurm submit starts a new job in that run folder"
    return JobForgotten("job", given, "a job that SLURM remembers, or one that wrote a log", fix)


def _state_by_log(number: str, log: Path) -> JobState | None:
    """What the log says of the job's last start: an earlier one that ended was put back into the queue."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    starts = list(_START.finditer(text))
    last = text[starts[-1].end() :] if starts else text
    codes, said = _ENDED_WITH.findall(last), _SLURM_SAYS.findall(last)
    if not codes and not starts:
        return None
    restarts, nodes = (int(starts[-1][1]), starts[-1][2]) if starts else (0, "")
    if not codes:
        why = f"its log ends in the middle of a start{': ' + said[-1] if said else ''}; SLURM has forgotten it"
        return JobState(number, number, "UNKNOWN", 0, restarts, nodes, why, "")
    code = int(codes[-1])
    state = "FAILED" if code else "COMPLETED"
    return JobState(number, number, state, code, restarts, nodes, "by its log: SLURM has forgotten it", "")


def cancel(number: str, run_folder: Path | None) -> list[JobState]:
    """End a job for good: it is not put back into the queue.

    Returns:
        Its states from before; nothing was done if all of them are ended.

    Raises:
        SlurmError: scancel refuses.
    """
    states = states_of(number, run_folder)
    living = [state for state in states if not state.is_ended]
    if living and run_folder is not None:
        with _writing(run_folder):
            for name in {number, *(state.raw_id for state in living)}:
                (run_folder / FOLDER / f"cancelled-{name}").touch()
    if living:
        run_slurm(["scancel", number])
    return states
