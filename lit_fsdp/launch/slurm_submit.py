"""Submitting a job, and finding it again: everything about it lies in ``RUN/slurm``."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import yaml

from lit_fsdp.errors import ConfigError
from lit_fsdp.launch.slurm_client import JobState, SlurmError, job_states, run_slurm
from lit_fsdp.launch.slurm_job import FOLDER, Job
from lit_fsdp.launch.slurm_script import render
from lit_fsdp.redaction import hidden_keys, redact_values

_JOBS = "jobs.jsonl"
_POLL_SECONDS = 1.0


def submit(job: Job, values: Mapping[str, Any]) -> str:
    """Write script and resolved recipe into the run folder, submit, and note the job's number.

    Args:
        job: What runs.
        values: The resolved recipe.

    Returns:
        The job's number.

    Raises:
        ConfigError: The recipe holds a secret, or an earlier job of this run has not ended.
        SlurmError: sbatch refuses.
    """
    recipe = _recipe(job, values)
    _refuse_second(job.run_folder)
    folder = job.run_folder / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    job.recipe.write_text(recipe, encoding="utf-8")
    script = folder / "job.sbatch"
    script.write_text(render(job), encoding="utf-8")
    number = run_slurm(["sbatch", "--parsable", str(script)]).strip().partition(";")[0]
    script.rename(folder / f"{number}.sbatch")
    entry = {
        "job_id": number,
        "submitted": datetime.now(UTC).isoformat(timespec="seconds"),
        "nodes": job.nodes,
        "tasks_per_node": job.tasks_per_node,
        "script": f"{number}.sbatch",
    }
    with (folder / _JOBS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")
    return number


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
        except SlurmError:
            continue  # ended so long ago that the controller has forgotten it
        if any(not state.is_ended for state in states):
            raise ConfigError(
                "trainer.default_root_dir",
                f"{run_folder}, whose job {number} is {states[0].state}",
                "one job per run folder",
                f"lit-fsdp slurm cancel {number}, or name another --trainer.default_root_dir",
            )


def recorded_jobs(run_folder: Path) -> list[str]:
    """Numbers of the jobs of a run, oldest first."""
    path = run_folder / FOLDER / _JOBS
    if not path.is_file():
        return []
    return [json.loads(line)["job_id"] for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def find_jobs(run_or_number: str) -> tuple[str, Path | None]:
    """The newest job of a run folder, or the job of that number and its run folder where it is known.

    Raises:
        ConfigError: The run folder has no job.
    """
    if run_or_number.replace("_", "").isdigit() and not Path(run_or_number).is_dir():
        return run_or_number, _run_folder_of(run_or_number)
    folder = Path(run_or_number)
    numbers = recorded_jobs(folder)
    if not numbers:
        raise ConfigError(
            "run",
            f"{run_or_number}, in which no job was submitted",
            "a run folder with slurm/jobs.jsonl, or a job's number",
            "lit-fsdp slurm submit --config R.yaml --nodes N",
        )
    return numbers[-1], folder.absolute()


def _run_folder_of(number: str) -> Path | None:
    try:
        text = run_slurm(["scontrol", "show", "job", number])
    except SlurmError:
        return None
    logs = [line.strip().removeprefix("StdOut=") for line in text.splitlines() if line.strip().startswith("StdOut=")]
    folder = Path(logs[0]).parent if logs else Path()
    return folder.parent if folder.name == FOLDER else None


def cancel(number: str, run_folder: Path | None) -> None:
    """End a job for good: it is not put back into the queue.

    Raises:
        SlurmError: scancel refuses.
    """
    for state in job_states(number):
        if run_folder is not None and not state.is_ended:
            for name in {number, *_raw_numbers(number)}:
                (run_folder / FOLDER / f"cancelled-{name}").touch()
    run_slurm(["scancel", number])


def _raw_numbers(number: str) -> list[str]:
    """What ``SLURM_JOB_ID`` is in each task of an array."""
    text = run_slurm(["scontrol", "show", "job", "--oneliner", number])
    return [word.removeprefix("JobId=") for word in text.split() if word.startswith("JobId=")]


def follow(number: str, run_folder: Path, out: TextIO | None = None) -> JobState:
    """Copy the output of rank 0 to ``out`` until the job has ended, requeues included.

    Returns:
        Its last state; of an array the one with the highest exit code.
    """
    out = out or sys.stderr
    tails: dict[str, _Tail] = {}
    shown = ""
    while True:
        states = job_states(number)
        said = ", ".join(f"{state.job_id} {state.state}" for state in states)
        if said != shown:
            print(f"job {said}", file=out, flush=True)
            shown = said
        for raw in _raw_numbers(number):
            for name in (f"{raw}.log", f"{raw}.rank-0.log"):
                tails.setdefault(name, _Tail(run_folder / FOLDER / name)).copy(out)
        if all(state.is_ended for state in states):
            return max(states, key=lambda state: state.exit_code)
        time.sleep(_POLL_SECONDS)


class _Tail:
    """Copies what has been added to a file."""

    def __init__(self, path: Path) -> None:
        self._path, self._seen = path, 0

    def copy(self, out: TextIO) -> None:
        try:
            with self._path.open("rb") as file:
                file.seek(self._seen)
                new = file.read()
        except FileNotFoundError:
            return
        self._seen += len(new)
        out.write(new.decode("utf-8", "replace"))
        out.flush()
