"""``doctor``: what would fail later on this machine, or on the nodes of a job, said now."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from lit_fsdp.commands.parsing import verb_parser
from lit_fsdp.errors import CheckpointError, ConfigError
from lit_fsdp.host import cache_root
from lit_fsdp.signals import EXIT_STOPPED

if TYPE_CHECKING:
    from lit_fsdp.config.run import RunConfig
    from lit_fsdp.launch.checks.row import Wanted
    from lit_fsdp.launch.doctor import Report

_ENDING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_USAGE = "lit-fsdp doctor [--config RECIPE.yaml ...] [--key value ...] [--nodes N] [--json] [--quick]"


def run_doctor(argv: Sequence[str]) -> int:
    """Run ``lit-fsdp doctor`` and return the exit code: 1 if anything is bad."""
    options, rest = _options(list(argv))
    if options is None:
        return 0
    run, values, name = _recipe(rest, options.nodes)
    from lit_fsdp.launch.meeting import started_as
    from lit_fsdp.speak import speak

    place = started_as(os.environ)
    speak()

    def complete(wanted: Wanted, num_gpus: int) -> Wanted:
        return wanted if run is None else _with_bytes(wanted, run, num_gpus)

    words = [*rest, *(f"--{flag}" for flag in ("json", "quick") if getattr(options, flag))]
    wanted = _wanted(run, values, name, options.nodes)
    wanted = dataclasses.replace(wanted, words="".join(f" {shlex.quote(word)}" for word in words))
    with _ended_by_signals():
        if place is None:
            from lit_fsdp.launch.doctor import examine

            report = examine(wanted, complete, options.quick)
            _print(report, options.json)
            return report.exit_code
        return _together(place, wanted, complete, options)


def _together(place: Any, wanted: Wanted, complete: Any, options: argparse.Namespace) -> int:
    from lit_fsdp.launch.doctor import Report
    from lit_fsdp.launch.doctor_together import Together, port_is_taken

    together = Together(place, wanted, options.quick)
    if place.rank:
        try:
            return together.attend(complete)
        except ConnectionError as error:
            raise CheckpointError(f"doctor on rank {place.rank}: {error}; see what rank 0 says") from error
    try:
        together.open()
    except OSError as error:
        _print(Report([port_is_taken(place, error)]), options.json)
        return 1
    report = together.report(complete)
    _print(report, options.json)
    together.part(report.exit_code)
    return report.exit_code


def _options(argv: list[str]) -> tuple[argparse.Namespace | None, list[str]]:
    text = "Look at this machine, or under srun or torchrun at all nodes, and say what would fail later, with the fix."
    parser = verb_parser("doctor", text)
    parser.usage = _USAGE
    parser.add_argument("--config", action="append", help="recipe and fragments; without one the machine alone")
    parser.add_argument("--nodes", type=int, help="nodes that a run will have; start it by srun to look at all of them")
    parser.add_argument("--json", action="store_true", help="JSON instead of tables on standard output")
    parser.add_argument("--quick", action="store_true", help="without collectives and trial save")
    if "-h" in argv or "--help" in argv:
        parser.print_help()
        return None, []
    try:
        options, rest = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ConfigError(parser.prog, str(error), _USAGE, f"see {parser.prog} --help") from None
    if options.nodes is not None and options.nodes < 1:
        raise ConfigError("--nodes", options.nodes, "a whole number >= 1", "write --nodes 2")
    return options, [word for path in options.config or () for word in ("--config", path)] + rest


def _recipe(words: list[str], nodes: int | None) -> tuple[RunConfig | None, dict[str, Any], str]:
    """The checked recipe, its values and its name; ``None`` where the command line names no recipe."""
    from lit_fsdp.config.miniature import adapt_to_miniature
    from lit_fsdp.config.recipe import read_recipe
    from lit_fsdp.config.run import check_recipe

    recipe = read_recipe(words, also=("nodes", "json", "quick"))
    if not recipe.files:
        for given in (*recipe.values, *recipe.flags):
            fix = "write --config RECIPE.yaml in front of it"
            raise ConfigError(f"lit-fsdp doctor --{given.lstrip('-')}", "a key without a recipe", _USAGE, fix)
        return None, {}, "run"
    if recipe.only_shows:
        raise ConfigError("lit-fsdp doctor", recipe.flags[0], _USAGE, "lit-fsdp fit --print_config shows a recipe")
    values = recipe.values
    trainer = values.get("trainer")
    if nodes is not None and (trainer is None or isinstance(trainer, dict)):
        values["trainer"] = {**(trainer or {}), "num_nodes": nodes}
    for line in adapt_to_miniature(values, recipe.replaced):
        print(f"miniature: {line}", file=sys.stderr)
    return check_recipe(values, "fit"), values, recipe.files[0].stem


def _wanted(run: RunConfig | None, values: dict[str, Any], name: str, nodes: int | None) -> Wanted:
    from lit_fsdp.launch.checks.row import Wanted

    if run is None:
        return Wanted(run_folder=Path("runs").absolute(), cache=cache_root().absolute(), nodes=nodes or 1)
    trainer, kept = run.trainer, run.checkpoint
    folder = Path(trainer.get("default_root_dir") or f"runs/{name}").expanduser().absolute()
    word = trainer.get("accelerator")
    model = run.model.name if isinstance(run.model.name, str) and not run.model.miniature else None
    precision = run.strategy.precision_config
    extras = {
        "lora": run.model.lora is not None,
        "fp8": precision.mode == "fp8",
        "gguf": bool(model and model.endswith(".gguf")),
    }
    per_node = None if run.world_size is None else run.world_size // run.num_nodes
    return Wanted(
        run_folder=folder,
        cache=Path(run.data.cache_dir or cache_root()).expanduser().absolute(),
        accelerator="cpu" if word == "cpu" else "gpu" if word in ("gpu", "cuda") else "auto",
        devices=per_node,
        nodes=run.num_nodes,
        num_checkpoints=(2 if kept.keep_last == -1 else kept.keep_last) + kept.keep_best + 1,
        copies_to_host=kept.async_save if kept.async_save is not None else word != "cpu",
        model=model,
        needs_weights=model is not None and not model.endswith(".json"),
        extras=tuple(extra for extra, holds in extras.items() if holds),
        compute_dtype=precision.mode if precision.mode in ("auto", "fp8") else precision.row.compute,
        signal_lead_seconds=run.slurm.signal_lead_seconds if values.get("slurm") else None,
    )


def _with_bytes(wanted: Wanted, run: RunConfig, num_gpus: int) -> Wanted:
    """The same with the size of a checkpoint, as far as the model's config is at hand."""
    from lit_fsdp.commands.slurm import checkpoint_bytes

    if run.world_size is None:
        devices = num_gpus if num_gpus and wanted.accelerator != "cpu" else 1
        run = dataclasses.replace(run, trainer={**run.trainer, "devices": devices})
    try:
        return dataclasses.replace(wanted, checkpoint_bytes=checkpoint_bytes(run))
    except (CheckpointError, ConfigError):  # a run says what is wrong with the model; here its size is not known
        return wanted


def _print(report: Report, as_values: bool) -> None:
    from lit_fsdp.launch.doctor_table import as_json, print_report

    if as_values:
        print(json.dumps(as_json(report), indent=1))
    else:
        print_report(report, sys.stdout)
    sys.stdout.flush()


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Turn the signals that end a command into exceptions, once, so that what was written is removed on the way out."""
    before = {}

    def end(number: int, frame: Any) -> NoReturn:
        for other in (*_ENDING, signal.SIGINT):
            signal.signal(other, signal.SIG_IGN)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        print(f"stopped by {signal.Signals(number).name}", file=sys.stderr, flush=True)
        raise SystemExit(EXIT_STOPPED)

    for number in (*_ENDING, signal.SIGINT):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
            before[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
