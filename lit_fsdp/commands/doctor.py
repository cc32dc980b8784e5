"""``doctor``: find problems of this machine, or of the nodes of a job, before a run."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
from collections.abc import MutableMapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from lit_fsdp.commands.parsing import refuse_two_values, verb_parser
from lit_fsdp.errors import CheckpointError, ConfigError
from lit_fsdp.host import free_port

if TYPE_CHECKING:
    from lit_fsdp.config.parser import LoadedRecipe
    from lit_fsdp.launch.doctor import Report, Wanted

_OWN = ("nodes", "json")
_TEXT = "Check this machine, or all nodes with srun or torchrun, for problems that stop a run, and print fixes."


def run_doctor(argv: Sequence[str]) -> int:
    """Run ``lit-fsdp doctor`` and return the exit code: 1 if a row is ``fail``."""
    from lit_fsdp.config.parser import load_recipe

    options, words = _options(argv)
    recipe = load_recipe(words, "fit", also=_OWN) if words else None

    from lit_fsdp.launch.doctor import Report, ask_torch, judge_machine
    from lit_fsdp.logs import setup_logging

    setup_logging()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # temporary files are removed on exit
    processes = _name_launch(os.environ)
    rank, is_leader = os.environ["RANK"], os.environ["LOCAL_RANK"] == "0"
    facts = ask_torch() if is_leader else {"gpus": []}
    num_gpus = len(facts.get("gpus", ()))
    if recipe is not None and recipe.run.world_size is None:
        recipe = load_recipe([*words, "--trainer.devices", str(num_gpus or 1)], "fit", also=_OWN)
    wanted = _wanted(recipe, options.nodes, is_leader and "error" not in facts)
    rows = judge_machine(wanted, facts, processes or wanted.devices or num_gpus or 1) if is_leader else []
    report = Report(rows)
    if "error" in facts:
        if rank != "0":
            raise CheckpointError(f"doctor: torch does not load: {facts['error']}")
    else:
        import torch.distributed as dist

        from lit_fsdp.launch.doctor_ranks import examine

        try:
            report = examine(rows, wanted, num_gpus)
        except dist.DistError as error:
            raise CheckpointError(f"doctor: the rendezvous failed, see the output of rank 0: {error}") from error
    if rank == "0":
        _print(report, options.json)
    return report.exit_code


def _options(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Separate the flags of this verb from those of a recipe."""
    parser = verb_parser(
        "doctor", _TEXT, "lit-fsdp doctor --json", "[--config RECIPE.yaml] [--key value ...] [options]"
    )
    parser.add_argument("--nodes", type=int, help="nodes of the planned run; start with srun to check all nodes")
    parser.add_argument("--json", action="store_true", help="JSON instead of a table on standard output")
    options, words = parser.parse_known_args(list(argv))
    if words and options.nodes:
        refuse_two_values({"trainer.num_nodes": ("--nodes", options.nodes)}, words, _OWN)
        words += ["--trainer.num_nodes", str(options.nodes)]
    return options, words


def _name_launch(environment: MutableMapping[str, str]) -> int:
    """Set torchrun's variables for this process; return how many processes share its GPUs and cores (0: see recipe)."""
    from lit_fsdp.launch.launcher import adopt_step

    adopt_step(environment)
    if "TORCHELASTIC_RUN_ID" in environment:
        return int(environment["LOCAL_WORLD_SIZE"])
    if "SLURM_STEP_ID" in environment and environment["SLURM_STEP_NUM_TASKS"] != "1":
        names = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_STEP_NUM_TASKS", "LOCAL_RANK": "SLURM_LOCALID"}
        environment.update({name: environment[slurm] for name, slurm in names.items()})
        return 1
    environment.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    return 0


def _wanted(recipe: LoadedRecipe | None, nodes: int | None, can_measure: bool) -> Wanted:
    """The recipe's requirements; the size of a checkpoint only if torch and the model's config are available."""
    from lit_fsdp.launch.doctor import Wanted

    if recipe is None:
        return Wanted(run_folder=Path("runs"), nodes=nodes or 1)
    run, trainer = recipe.run, recipe.run.trainer
    num_bytes, count = None, 1
    if can_measure:
        from lit_fsdp.checkpoint.disk_space import peak_count
        from lit_fsdp.commands.slurm import checkpoint_bytes

        steps = trainer["max_steps"]
        count = peak_count(run.checkpoint, steps if steps > 0 else None, run.data.has("val")) or 2
        with contextlib.suppress(CheckpointError, ConfigError):  # the run reports problems with the model
            num_bytes = checkpoint_bytes(run)
    return Wanted(
        run_folder=Path(trainer["default_root_dir"]),
        accelerator=trainer["accelerator"],
        devices=(run.world_size or 1) // run.num_nodes,
        nodes=run.num_nodes,
        checkpoint_bytes=num_bytes,
        num_checkpoints=count,
    )


def _print(report: Report, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"exit_code": report.exit_code, **asdict(report)}, indent=1))
        return
    for row in report.rows:
        print(f"{row.grade:<5} {row.name:<24} {row.found}")
        if row.fix:
            print(f"{'':<30} fix: {row.fix}")
    for rate in report.rates:
        print(f"all-reduce {rate['bytes']:>13,} bytes {rate['ms']:>9.3f} ms {rate['bus_gb_per_second']:>8.3f} GB/s bus")
    counts = {grade: sum(row.grade == grade for row in report.rows) for grade in ("ok", "warn", "fail")}
    print(", ".join(f"{count} {grade}" for grade, count in counts.items()), flush=True)
