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
    from lit_fsdp.launch.slurm_facts import Facts
    from lit_fsdp.launch.slurm_job import Job

_USAGE = """usage: lit-fsdp slurm VERB [options]

  render   print the sbatch file of a recipe on standard output, and what is wrong with it on standard error
  submit   check it, submit it and say how to follow it; the job's number on standard output
  status   RUN|JOBID: where a job is
  cancel   RUN|JOBID: end a job for good

lit-fsdp slurm submit --config R.yaml --nodes 16 [--config configs/slurm/CLUSTER.yaml] [--gpus-per-node G] [--time T]
  [--partition P] [--account A] [--slurm.KEY VALUE] [--KEY VALUE] [--probe] [--wait]
lit-fsdp fit --help explains the keys of the slurm section
Exit codes: 0; 1 with --wait, of a job that ended badly without a code of its own; 2 the job cannot work as it is, or
SLURM refuses; 130 on Ctrl-C, which leaves a submitted job alone; with --wait those of the job
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
    from lit_fsdp.commands.slurm_start import tokenizer_is_there
    from lit_fsdp.launch.slurm_lint import lint

    job, run, values = _job(options, rest)
    errors, notes = lint(job, run, _facts(run, job))
    errors = [*tokenizer_is_there(run), *errors]
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    for error in errors:
        print(f"error: {error}", file=sys.stderr)
    if verb == "render":
        from lit_fsdp.launch.slurm_script import render

        print(render(job), end="")
    if errors:
        done = "not to be submitted" if verb == "render" else "not submitted"
        print(f"{done}: {len(errors)} of the checks found something", file=sys.stderr)
        return 2
    return 0 if verb == "render" else _submit(job, values, options)


def _submit(job: Job, values: dict[str, Any], options: argparse.Namespace) -> int:
    from lit_fsdp.launch.slurm_follow import follow
    from lit_fsdp.launch.slurm_submit import submit

    if options.probe:
        from lit_fsdp.launch.slurm_probe import probe

        print(probe(job), file=sys.stderr)
    number = submit(job, values)
    folder = shlex.quote(str(job.run_folder))
    print(number, flush=True)
    logs = f"{folder}/slurm/{number}.rank-0.log" if job.config.seeds is None else f"{folder}/slurm/*.rank-0.log"
    array = "" if job.config.seeds is None else f", once for each of {len(job.config.seeds)} seeds"
    size = f"{job.node_range} node(s) × {job.tasks_per_node} processes{array}"
    lines = [
        f"submitted job {number}: {size}; all about it: {folder}/slurm/",
        f"follow it    tail -F {logs}",
        f"where it is  lit-fsdp slurm status {number}",
        f"end it       lit-fsdp slurm cancel {number}",
    ]
    print("\n".join(lines), file=sys.stderr, flush=True)
    if not options.wait:
        return 0
    try:
        state = follow(number, job.run_folder)
    except KeyboardInterrupt:
        print(f"no longer followed; job {number} goes on. End it: lit-fsdp slurm cancel {number}", file=sys.stderr)
        return 130
    print(f"job {state.job_id} {state.state}, exit code {state.exit_code}", file=sys.stderr)
    return 0 if state.state == "COMPLETED" else state.exit_code or 1


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
        flags = "--nodes N and --gpus-per-node G (whole numbers), --time T, --partition P, --account A, --container I"
        raise ConfigError(parser.prog, str(error), flags, f"see {parser.prog} --help") from None


def _job(options: argparse.Namespace, rest: list[str]) -> tuple[Job, RunConfig, dict[str, Any]]:
    """The job of the command line, its checked recipe, and the same as values."""
    from lit_fsdp.commands.slurm_start import check_keys
    from lit_fsdp.config.miniature import adapt_to_miniature
    from lit_fsdp.config.recipe import read_recipe
    from lit_fsdp.config.run import check_recipe
    from lit_fsdp.launch.slurm_job import plan_job, put_job_size, section_of
    from lit_fsdp.launch.slurm_nodes import with_node_counts

    own = [name.replace("_", "-") for name in vars(options)]
    recipe = read_recipe(rest, also=own)
    if recipe.flags:
        word = recipe.flags[0]
        raise ConfigError("lit-fsdp slurm", word, "keys of the recipe", "write it into a --config file")
    values = recipe.values
    slurm = section_of(values, "slurm")
    flags = {name: getattr(options, name) for name in ("time", "partition", "account", "container")}
    given = {name: value for name, value in flags.items() if value is not None}
    if given:
        values["slurm"] = {**slurm, **given}
    replaced = adapt_to_miniature(values, recipe.replaced) + put_job_size(values, options.nodes, options.gpus_per_node)
    for line in replaced:
        print(f"replaced: {line}", file=sys.stderr)
    trainer = section_of(values, "trainer")
    if trainer.get("default_root_dir") is None:
        values["trainer"] = {**trainer, "default_root_dir": f"runs/{recipe.files[0].stem if recipe.files else 'run'}"}
    run = check_recipe(values, "fit")
    check_keys(values)
    return with_node_counts(plan_job(values, run.slurm), run), run, values


def _facts(run: RunConfig, job: Job) -> Facts:
    from lit_fsdp.checkpoint.find import checkpoints
    from lit_fsdp.checkpoint.manifest import read_manifest
    from lit_fsdp.launch.slurm_client import SlurmError
    from lit_fsdp.launch.slurm_facts import Facts
    from lit_fsdp.launch.slurm_lint_cluster import ask_partitions

    seeds = job.config.seeds
    by_seed = {seed: checkpoints(job.run_folder / f"seed-{seed}") for seed in seeds or ()}
    there = checkpoints(job.run_folder) if seeds is None else [entry for kept in by_seed.values() for entry in kept]
    measured = [read_manifest(entry.path).extra.get("save_seconds") for entry in there]
    partitions, why = None, ""
    try:
        partitions = ask_partitions()
    except SlurmError as error:
        why = f"sinfo: {str(error.given)[-120:]}"
    return Facts(
        checkpoint_bytes=checkpoint_bytes(run),
        save_seconds=max((seconds for seconds in measured if isinstance(seconds, (int, float))), default=None),
        environment=dict(os.environ),
        num_checkpoints=num_checkpoints(run),
        num_kept=len(there),
        kept_bytes=sum(entry.num_bytes for entry in there),
        empty_seeds=tuple(seed for seed, kept in by_seed.items() if not kept),
        partitions=partitions,
        no_partitions=why,
    )


def num_checkpoints(run: RunConfig) -> int | None:
    """Checkpoints of a run that lie on the disk at the same time; ``None`` where its length is not known."""
    from lit_fsdp.checkpoint.space import Plan, peak_count
    from lit_fsdp.config.data import accumulation_steps
    from lit_fsdp.config.run import validation_steps

    steps, interval, data = run.trainer.get("max_steps"), run.trainer.get("val_check_interval"), run.data
    validates = data.val is not None or data.val_split is not None
    if not isinstance(steps, int) or steps <= 0:
        return peak_count(run.checkpoint, Plan(None, validates))
    found: set[int] = set()
    if isinstance(interval, int) and interval > 0 and run.world_size is not None:  # a share of an epoch is not known
        accumulate = accumulation_steps(data.global_batch_size, data.micro_batch_size, run.world_size)
        found = validation_steps(steps, interval, accumulate)
    return peak_count(run.checkpoint, Plan(steps, validates, found))


def checkpoint_bytes(run: RunConfig) -> int | None:
    """Weights and optimizer state of one checkpoint, from shapes; ``None`` where the model's config is not at hand.

    Raises:
        ConfigError: Units, adapters or choices that the model does not have.
    """
    from lit_fsdp.audit import audit_recipe

    try:
        record = audit_recipe(run)
    except OSError:  # a hub that cannot be asked from here; lint says that it did not compare
        return None
    except ConfigError as error:
        is_elsewhere = run.slurm.container or (run.slurm.command and "pip install" in error.fix)
        if is_elsewhere or error.field in ("model.name", "model.tokenizer"):
            return None
        raise
    return sum(rank["parameter_bytes"] + rank["optimizer_bytes"] for rank in record["state_per_rank"])


def _status(argv: list[str]) -> int:
    parser = verb_parser("slurm status", "Where a job is, and what its last lines say.")
    parser.add_argument(
        "run", help="run folder (its newest job), or the number of a job, or of a task of an array: 12_0"
    )
    parser.add_argument("--json", action="store_true", help="JSON on standard output")
    options = parse(parser, argv)
    from lit_fsdp.launch.slurm_nodes import asked_nodes
    from lit_fsdp.launch.slurm_submit import find_jobs, states_of

    number, folder = find_jobs(options.run)
    states = states_of(number, folder)
    if options.json:
        print(json.dumps([vars(state) for state in states], indent=1))
        return 0
    for state in states:
        asked = None if folder is None else asked_nodes(folder, state.job_id)
        nodes = f"{state.nodes} ({state.num_nodes} of {asked})" if asked and state.nodes else state.nodes or asked or ""
        print(
            f"job {state.job_id}  {state.state}  {state.time}  nodes {nodes}  restarts {state.restarts}  "
            f"exit code {'unknown' if state.state == 'UNKNOWN' else state.exit_code}  {state.reason}"
        )
        log = None if folder is None else folder / "slurm" / f"{state.raw_id}.rank-0.log"
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
    parser.add_argument(
        "run", help="run folder (its newest job), or the number of a job, or of a task of an array: 12_0"
    )
    options = parse(parser, argv)
    from lit_fsdp.launch.slurm_submit import cancel, find_jobs

    number, folder = find_jobs(options.run)
    states = cancel(number, folder)
    if all(state.is_ended for state in states):
        print(f"job {number} has ended already: {', '.join(state.state for state in states)}", file=sys.stderr)
    else:
        print(f"cancelled job {number}", file=sys.stderr)
    return 0
