"""Submitting a job: recipe, script and logs lie in ``RUN/slurm``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from lit_fsdp.errors import ConfigError
from lit_fsdp.launch.slurm_job import Job, render
from lit_fsdp.redaction import hidden_keys, redact_values

_SECONDS = 60.0
_OF_SHELL = {name.upper(): name for name in ("account", "partition", "qos", "constraint")} | {"TIMELIMIT": "time"}
"""What SBATCH_... variables of a shell may say where the recipe does not; sbatch lets them win over the script."""


class SlurmError(ConfigError):
    """A command of SLURM refused what it was given, does not answer, or is not there."""


def run_slurm(words: Sequence[str], timeout_seconds: float = _SECONDS, env: Mapping[str, str] | None = None) -> str:
    """Run one of SLURM's commands and return its standard output; its warnings go to our standard error."""
    try:
        done = subprocess.run(  # noqa: S603
            words, capture_output=True, text=True, errors="replace", timeout=timeout_seconds, env=env, check=False
        )
    except FileNotFoundError:
        raise SlurmError(words[0], "not found on this machine", "a login node of a SLURM cluster") from None
    except subprocess.TimeoutExpired:
        raise SlurmError(words[0], f"no answer in {timeout_seconds:.0f} s", "a controller that answers") from None
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())
        raise SlurmError(words[0], f"{said} (exit code {done.returncode})", "what this cluster accepts")
    if done.stderr.strip():
        print(done.stderr.strip(), file=sys.stderr)
    return done.stdout


def submit(job: Job, values: Mapping[str, Any]) -> str:
    """Write recipe and script into the run folder and submit; returns the job's number, by which the script is called.

    Raises:
        ConfigError: The recipe holds a secret, or the run folder cannot be written.
        SlurmError: sbatch refuses.
    """
    recipe, script = _recipe(job, values), job.folder / "job.sbatch"
    try:
        job.folder.mkdir(parents=True, exist_ok=True)
        (job.folder / "recipe.yaml").write_text(recipe, encoding="utf-8")
        script.write_text(render(job), encoding="utf-8")
    except OSError as error:
        given = f"{error.filename or job.folder}: {error.strerror}"
        raise ConfigError("trainer.default_root_dir", given, "a folder that can be written") from None
    said = run_slurm(["sbatch", "--parsable", str(script)], env=_environment(job))
    # NUMBER[;CLUSTER]; sites wrap sbatch in scripts that greet first
    numbers = re.findall(r"^(\d+)(?:;\S*)?$", said.strip(), re.MULTILINE)
    if not numbers:
        raise SlurmError("sbatch", repr(said[-200:]), "the number of a job", "see squeue --me whether there is one")
    script.rename(job.folder / f"{numbers[-1]}.sbatch")
    return str(numbers[-1])


def living_jobs(job: Job) -> list[str]:
    """List the numbers of earlier jobs of this run folder that wait or run."""
    mine = {path.stem for path in job.folder.glob("[0-9]*.sbatch")}
    return sorted(mine & set(run_slurm(["squeue", "--me", "--noheader", "-o", "%A"]).split())) if mine else []


def _recipe(job: Job, values: Mapping[str, Any]) -> str:
    """The recipe as the job reads it; secrets are refused, as no file of a run may hold one."""
    shown = redact_values(dict(values))
    if shown != values:
        key = next(iter(hidden_keys(shown)), "recipe")
        fix = "drop it from the recipe; set its variable in a file that only you can read, named in slurm.env_file"
        raise ConfigError(key, "a secret", "secrets in the environment only, and in no file of a run", fix)
    kept = {key: value for key, value in values.items() if key != "ckpt_path"}
    kept["trainer"] = {**(kept.get("trainer") or {}), "default_root_dir": str(job.run_folder)}
    return yaml.safe_dump(kept, sort_keys=False, allow_unicode=True)


def _environment(job: Job) -> dict[str, str]:
    """Of this shell, without what would win over the script, or is of the job that this shell is in."""
    kept = {"SLURM_CONF"}
    kept |= {f"SBATCH_{name}" for name, key in _OF_SHELL.items() if getattr(job.config, key) is None}
    others = ("SBATCH_", "SLURM_") if "SLURM_JOB_ID" in os.environ else "SBATCH_"
    return {name: value for name, value in os.environ.items() if name in kept or not name.startswith(others)}
