"""``slurm render|submit``: run a recipe as a job on a SLURM cluster."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lit_fsdp.commands.parsing import RECIPE, refuse_two_values, run_one_of, verb_parser
from lit_fsdp.errors import ConfigError, require
from lit_fsdp.host import heavy_imports

if TYPE_CHECKING:
    from lit_fsdp.config.run import RunConfig
    from lit_fsdp.launch.slurm_job import Job

_EXAMPLE = "lit-fsdp slurm {} -c recipes/quickstart.yaml -c configs/debug/smoke.yaml"
_TEXTS = {
    "render": "print the sbatch file of a recipe; problems go to standard error",
    "submit": "submit the job unless a check fails, and print its ID",
}
_FLAGS = ("time", "partition", "account", "container")
_SIZES = {"nodes": ("slurm.nodes", "trainer.num_nodes"), "gpus_per_node": ("slurm.gpus_per_node", "trainer.devices")}


def run_slurm(argv: Sequence[str]) -> int:
    """Run ``lit-fsdp slurm`` and return the exit code."""
    verbs = {verb: (text, partial(_render_or_submit, verb)) for verb, text in _TEXTS.items()}
    return run_one_of("slurm", verbs, argv)


def _render_or_submit(verb: str, argv: Sequence[str]) -> int:
    text = "Run a recipe as a job on a SLURM cluster; all recipe keys are flags, too."
    parser = verb_parser(f"slurm {verb}", text, _EXAMPLE.format(verb), RECIPE)
    parser.add_argument("--nodes", type=int, help="nodes of the job: slurm.nodes and trainer.num_nodes")
    parser.add_argument("--gpus-per-node", type=int, help="GPUs per node, one process each; sets trainer.devices")
    for name in _FLAGS:
        parser.add_argument(f"--{name}", help=f"slurm.{name}")
    if verb == "submit":
        parser.add_argument("--force", action="store_true", help="submit even if checks fail")
        parser.add_argument("--dry-run", action="store_true", help="only print the sbatch file, as slurm render does")
    options, rest = parser.parse_known_args(argv)
    flags = [word.partition("=")[0].replace("_", "-") for word in rest]
    theirs = next((flag for flag in flags if flag in ("--gpus", "--gres", "--ntasks-per-node")), "")
    require(not theirs, theirs, "an option of sbatch", "--nodes and --gpus-per-node", "write --gpus-per-node N")
    verb = "render" if vars(options).pop("dry_run", False) else verb
    job, run, values = _planned(options, rest)
    from lit_fsdp.checkpoint.manifest import read_manifest
    from lit_fsdp.checkpoint.run_folder import checkpoints
    from lit_fsdp.launch.slurm_checks import check_job
    from lit_fsdp.launch.slurm_job import render, submit

    saves = [read_manifest(entry.path).extra.get("save_seconds") for entry in checkpoints(job.run_folder)]
    errors, warnings = check_job(job, run, checkpoint_bytes(run), max((s for s in saves if s), default=None))
    for text in [*(f"warning: {warning}" for warning in warnings), *(f"error: {error}" for error in errors)]:
        print(text, file=sys.stderr)
    if verb == "render":
        print(render(job), end="")
        text = f"note: the script needs the files in {job.folder} that lit-fsdp slurm submit writes before it submits"
        print(text, file=sys.stderr)
        return 0
    if errors and not options.force:
        print(f"not submitted: {len(errors)} error(s); --force submits anyway", file=sys.stderr)
        return 1
    number = submit(job, values)
    print(number, flush=True)
    lines = [
        f"submitted job {number}: {job.nodes} node(s) × {job.tasks_per_node} processes; files: {job.folder}",
        f"status       squeue -j {number}",
        f"cancel       scancel {number}",
        f"follow       tail -F {shlex.quote(f'{job.folder}/{number}.rank-0.log')}",
    ]
    print("\n".join(lines), file=sys.stderr)
    return 0


def _planned(options: argparse.Namespace, rest: list[str]) -> tuple[Job, RunConfig, dict[str, Any]]:
    """Plan the job of the command line; return it, its checked recipe and the recipe's values."""
    from lit_fsdp.config.parser import load_recipe
    from lit_fsdp.launch.slurm_job import plan_job

    short = {f"slurm.{name}": (f"--{name}", getattr(options, name)) for name in _FLAGS}
    for name, (own, trainers) in _SIZES.items():
        flag, size = f"--{name.replace('_', '-')}", getattr(options, name)
        short |= {own: (flag, size), trainers: (flag, size or None)}  # without GPUs, trainer.devices counts processes
    short = {key: one for key, one in short.items() if one[1] is not None}
    also = list(vars(options))
    refuse_two_values(short, rest, also)
    flags = [word for key, (_, value) in short.items() for word in (f"--{key}", str(value))]
    loaded = load_recipe([*rest, *flags], "fit", also)
    trainer, slurm = loaded.run.trainer, loaded.run.slurm
    for own, trainers in _SIZES.values():  # a cluster fragment may set it for recipes that do not
        size = getattr(slurm, own.partition(".")[2])
        if size and trainer.get(trainers.partition(".")[2]) in (None, "auto", -1):
            flags += [f"--{trainers}", str(size)]
    run = load_recipe([*rest, *flags], "fit", also).run
    with heavy_imports():
        from lit_fsdp.cli import resolved_recipe

    values = resolved_recipe([*rest, *flags], "fit")  # also refuses errors that only Lightning detects
    return plan_job(run, values.get("ckpt_path")), run, values


def checkpoint_bytes(run: RunConfig) -> int | None:
    """Bytes of weights and optimizer state of one checkpoint, from shapes; ``None`` if the model config is unavailable.

    Raises:
        ConfigError: Units, adapters or choices that the model does not have.
    """
    from lit_fsdp.audit import audit_recipe

    try:
        record = audit_recipe(run)
    except OSError:  # the Hub is not reachable
        return None
    except ConfigError as error:
        if run.slurm.container or run.slurm.command or error.field in ("model.name", "model.tokenizer"):
            return None
        raise
    # checkpoints of adapters are without the frozen base; gradients have the size of the trained parameters
    weights = "gradient_bytes" if run.model.lora else "parameter_bytes"
    return sum(rank[weights] + rank["optimizer_bytes"] for rank in record["state_per_rank"])
