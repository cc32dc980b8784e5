"""``profile``: profile a few steps of a recipe with torch.profiler."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_fsdp.commands.parsing import RECIPE, columns, flags_of, verb_parser
from lit_fsdp.commands.runs import quiet_flags
from lit_fsdp.commands.training import run_training_verb
from lit_fsdp.config.parser import load_recipe
from lit_fsdp.errors import require
from lit_fsdp.host import is_first_process


def run_profile(argv: Sequence[str]) -> int:
    """Run ``lit-fsdp profile`` and return the exit code."""
    text = (
        "Profile the time of a step: a Chrome trace per rank (for ui.perfetto.dev or chrome://tracing), and a table of "
        "computing, communication, exposed communication and idle time for each phase. A few steps are trained as in "
        "fit, and only the profile is saved, in profile/ of the run folder."
    )
    example = "lit-fsdp profile -c recipes/quickstart.yaml -c configs/debug/smoke.yaml"
    parser = verb_parser("profile", text, example, RECIPE)
    parser.add_argument("--steps", type=int, default=3, help="steps to profile, after two warm-up steps; default: 3")
    parser.add_argument("--json", action="store_true", help="JSON instead of tables on standard output")
    options, words = parser.parse_known_args(argv)
    from lit_fsdp.metrics.trace import WARMUP_STEPS, advice

    require(options.steps >= 1, "--steps", options.steps, ">= 1", "write --steps 3")
    trainer = load_recipe(words, "fit", flags_of(parser)).run.trainer
    folder = Path(trainer["default_root_dir"]) / "profile"
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would write two lines per rank
    found: list[Any] = []

    def callbacks() -> list[Any]:
        from lit_fsdp.callbacks.profile import ProfileWindow

        found.append(ProfileWindow(options.steps, folder))
        return found

    changes = {"logger": "false", "default_root_dir": folder, "max_epochs": trainer["max_epochs"] or -1}
    if trainer["max_steps"] > 0:  # at least the recipe's, which fits its warm-up and schedule
        changes |= {"max_steps": max(trainer["max_steps"], options.steps + WARMUP_STEPS), "max_epochs": -1}
    code = run_training_verb("fit", [*words, *quiet_flags(changes)], callbacks)
    if code or not is_first_process():
        return code
    records = found[0].records
    given = f"{options.steps}, but training ended before that"
    require(records, "--steps", given, "fewer steps than the recipe has", "set --trainer.max_epochs higher")
    if options.json:
        print(json.dumps({"ranks": records, "advice": advice(records)}, indent=1))
    else:
        heads = ("operator of rank 0, self time", "ms", "calls")
        cells = [(name[:64], f"{ms:.1f}", f"{calls:.0f}") for name, ms, calls in records[0]["operators"]]
        tables = [*(_phases(rank, record) for rank, record in enumerate(records)), columns([heads, *cells], heads[1:])]
        print("\n\n".join([*tables, "\n".join(advice(records))]))
    print(f"\ntraces: {folder}/rank-*.json", file=sys.stderr)
    return 0


def _phases(rank: int, record: Mapping[str, Any]) -> str:
    rows = {phase: list(row.values()) for phase, row in record["phases"].items()}
    rows["step"] = [sum(column) for column in zip(*rows.values(), strict=True)]
    heads = (f"rank {rank}, ms per step", *record["phases"]["forward"])
    cells = [(phase, *(f"{ms:.1f}" for ms in row)) for phase, row in rows.items()]
    return columns([heads, *cells], right=heads[1:])
