"""``slurm render|submit|status|cancel``: a recipe as a job of a SLURM cluster."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_fsdp.commands.parsing import parse, run_one_of, verb_parser
from lit_fsdp.errors import ConfigError

if TYPE_CHECKING:
    from lit_fsdp.config.run import RunConfig
    from lit_fsdp.launch.slurm_job import Job
    from lit_fsdp.launch.slurm_lint import Facts

_USAGE = """usage: lit-fsdp slurm VERB [options]

  render   print the sbatch file of a recipe, and what is wrong with it
  submit   check it, submit it and say how to follow it
  status   RUN|JOBID: where a job is
  cancel   RUN|JOBID: end a job for good

lit-fsdp slurm submit --config R.yaml --nodes 16 [--config configs/slurm/CLUSTER.yaml] [--gpus-per-node G] [--time T]
  [--partition P] [--account A] [--slurm.KEY VALUE] [--KEY VALUE] [--probe] [--wait]
lit-fsdp fit --help explains the keys of the slurm section
"""


def run_slurm_verb(argv: Sequence[str]) -> int:
    """Run ``lit-fsdp slurm`` and return the exit code."""
    verbs: dict[str, Callable[[Sequence[str]], int]] = {
        "render": lambda rest: _render_or_submit("render", list(rest)),
        "submit": lambda rest: _render_or_submit("submit", list(rest)),
        "status": lambda rest: _status(list(rest)),
        "cancel": lambda rest: _cancel(list(rest)),
    }
    return run_one_of("slurm", verbs, _USAGE, argv)


def _render_or_submit(verb: str, argv: list[str]) -> int:
    options, rest = _options(verb, argv)
    if options is None:
        return 0
    from lit_fsdp.launch.slurm_lint import lint

    job, run, values = _job(options, rest)
    errors, notes = lint(job, run, _facts(run, job))
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    for error in errors:
        print(f"error: {error}", file=sys.stderr)
    if verb == "render":
        from lit_fsdp.launch.slurm_script import render

        print(render(job), end="")
        return 1 if errors else 0
    if errors:
        print(f"not submitted: {len(errors)} of the checks found something", file=sys.stderr)
        return 2
    return _submit(job, values, options)


def _submit(job: Job, values: dict[str, Any], options: argparse.Namespace) -> int:
    from lit_fsdp.launch.slurm_submit import follow, submit

    if options.probe:
        from lit_fsdp.launch.slurm_probe import probe

        print(probe(job), file=sys.stderr)
    number = submit(job, values)
    folder = shlex.quote(str(job.run_folder))
    print(number)
    lines = [
        f"submitted job {number}: {job.nodes} node(s) × {job.tasks_per_node} processes; all about it: {folder}/slurm/",
        f"follow it   tail -F {folder}/slurm/{number}.rank-0.log",
        f"where it is lit-fsdp slurm status {number}",
        f"end it      lit-fsdp slurm cancel {number}",
    ]
    print("\n".join(lines), file=sys.stderr)
    if not options.wait:
        return 0
    state = follow(number, job.run_folder)
    print(f"job {state.job_id} {state.state}, exit code {state.exit_code}", file=sys.stderr)
    return state.exit_code if state.state == "COMPLETED" or state.exit_code else 1


def _options(verb: str, argv: list[str]) -> tuple[argparse.Namespace | None, list[str]]:
    parser = verb_parser(
        f"slurm {verb}", "A recipe as a job of a SLURM cluster; every key of the recipe is a flag too."
    )
    parser.usage = (
        f"lit-fsdp slurm {verb} --config RECIPE.yaml [--config FRAGMENT.yaml ...] [--key value ...] [options]"
    )
    parser.add_argument("--nodes", type=int, help="nodes of the job; trainer.num_nodes follows")
    parser.add_argument("--gpus-per-node", type=int, help="GPUs per node, one process each; trainer.devices follows")
    for name in ("time", "partition", "account", "container"):
        parser.add_argument(f"--{name}", help=f"slurm.{name}")
    if verb == "submit":
        parser.add_argument("--probe", action="store_true", help="first compare all nodes by a short srun")
        parser.add_argument("--wait", action="store_true", help="follow rank 0 to the end; the job's exit code is ours")
    if "-h" in argv or "--help" in argv:
        parser.print_help()
        return None, []
    try:
        return parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ConfigError(parser.prog, str(error), "--nodes N, --time T, ...", f"see {parser.prog} --help") from None


def _job(options: argparse.Namespace, rest: list[str]) -> tuple[Job, RunConfig, dict[str, Any]]:
    """The job of the command line, its checked recipe, and the same as values."""
    from lit_fsdp.config.miniature import adapt_to_miniature
    from lit_fsdp.config.recipe import read_recipe
    from lit_fsdp.config.run import check_recipe
    from lit_fsdp.launch.slurm_job import plan_job, put_job_size

    recipe = read_recipe(
        rest, also=("nodes", "gpus-per-node", "time", "partition", "account", "container", "probe", "wait")
    )
    if recipe.flags:
        word = recipe.flags[0]
        raise ConfigError("lit-fsdp slurm", word, "keys of the recipe", "write it into a --config file")
    values = recipe.values
    flags = {name: getattr(options, name) for name in ("time", "partition", "account", "container")}
    given = {name: value for name, value in flags.items() if value is not None}
    if given:
        values["slurm"] = {**(values.get("slurm") or {}), **given}
    replaced = adapt_to_miniature(values, recipe.replaced) + put_job_size(values, options.nodes, options.gpus_per_node)
    for line in replaced:
        print(f"replaced: {line}", file=sys.stderr)
    trainer = values.get("trainer") or {}
    if isinstance(trainer, dict) and trainer.get("default_root_dir") is None:
        values["trainer"] = {**trainer, "default_root_dir": f"runs/{recipe.files[0].stem if recipe.files else 'run'}"}
    run = check_recipe(values, "fit")
    return plan_job(values, run.slurm), run, values


def _facts(run: RunConfig, job: Job) -> Facts:
    from lit_fsdp.launch.slurm_lint import Facts

    return Facts(checkpoint_bytes=checkpoint_bytes(run), save_seconds=None, environment=dict(os.environ))


def checkpoint_bytes(run: RunConfig) -> int | None:
    """Weights and optimizer state of one checkpoint, from shapes; ``None`` where the model's config is not at hand."""
    from lit_fsdp.audit import audit_recipe

    try:
        record = audit_recipe(run)
    except (ConfigError, OSError):  # a hub that cannot be asked from here; lint says that it did not compare
        return None
    return sum(rank["parameter_bytes"] + rank["optimizer_bytes"] for rank in record["state_per_rank"])


def _status(argv: list[str]) -> int:
    parser = verb_parser("slurm status", "Where a job is, and what its last lines say.")
    parser.add_argument("run", help="run folder, or the number of a job")
    parser.add_argument("--json", action="store_true", help="JSON on standard output")
    options = parse(parser, argv)
    from lit_fsdp.launch.slurm_client import job_states
    from lit_fsdp.launch.slurm_submit import find_jobs

    number, folder = find_jobs(options.run)
    states = job_states(number)
    if options.json:
        print(json.dumps([vars(state) for state in states], indent=1))
        return 0
    for state in states:
        print(
            f"job {state.job_id}  {state.state}  {state.time}  nodes {state.nodes}  restarts {state.restarts}  "
            f"exit code {state.exit_code}  {state.reason}"
        )
    log = None if folder is None else folder / "slurm" / f"{number}.rank-0.log"
    if log is not None and log.is_file():
        print(_last_line(log))
    return 0


def _last_line(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        lines = file.read().decode("utf-8", "replace").splitlines()
    return f"{log}: {lines[-1] if lines else '(empty)'}"


def _cancel(argv: list[str]) -> int:
    parser = verb_parser("slurm cancel", "End a job for good; it is not put back into the queue.")
    parser.add_argument("run", help="run folder, or the number of a job")
    options = parse(parser, argv)
    from lit_fsdp.launch.slurm_submit import cancel, find_jobs

    number, folder = find_jobs(options.run)
    cancel(number, folder)
    print(f"cancelled job {number}", file=sys.stderr)
    return 0
