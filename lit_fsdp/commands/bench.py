"""``bench``: measure variations of one recipe in separate runs."""

import csv
import hashlib
import itertools
import json
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lit_fsdp.commands.parsing import RECIPE, columns, flags_of, verb_parser
from lit_fsdp.commands.runs import quiet_flags, run_fit
from lit_fsdp.config.parser import load_recipe
from lit_fsdp.errors import require
from lit_fsdp.launch.launcher import devices_of

_Rows = Sequence[Mapping[str, str]]


def run_bench(argv: Sequence[str]) -> int:
    """Run ``lit-fsdp bench`` and return the exit code: 1 if a cell failed."""
    text = (
        "Measure tokens per second, scaling efficiency and peak memory of variations of a recipe: every combination is "
        "a short fit in separate processes, and repeats are interleaved. Each finished run adds a row to bench.csv, in "
        "a subfolder of the run folder for the recipe and varied keys; the same command resumes an interrupted "
        "benchmark and repeats failed runs."
    )
    example = "lit-fsdp bench -c recipes/quickstart.yaml --vary data.micro_batch_size=2,4"
    parser = verb_parser("bench", text, example, RECIPE)
    text = "values (without commas) of a recipe key, or fragments for the key config; repeatable: runs all combinations"
    parser.add_argument("--vary", action="append", required=True, metavar="KEY=A,B,...", help=text)
    parser.add_argument("--ranks", metavar="1,2,...", help="values of trainer.devices; default: the recipe's")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each combination; default: 3")
    parser.add_argument("--steps", type=int, default=5, help="timed optimizer steps, after equal warm-up; default: 5")
    options, words = parser.parse_known_args(argv)
    least = min(options.repeats, options.steps)
    require(least >= 1, "--repeats, --steps", least, ">= 1", "write --repeats 3")
    recipe = load_recipe(words, "fit", flags_of(parser))
    ranks = (options.ranks or str(devices_of(recipe.run.trainer))).split(",")
    require(all(map(str.isdecimal, ranks)), "--ranks", ",".join(ranks), "whole numbers", "write --ranks 1,2")
    vary: dict[str, list[str]] = {}
    for text in options.vary:
        key, _, values = text.removeprefix("--").partition("=")
        fits = values and key != "trainer.devices"
        require(fits, "--vary", text, "KEY=A,B,...; use --ranks for trainer.devices", "write data.micro_batch_size=1,2")
        vary.setdefault(key, []).extend(values.split(","))
    cells = [dict(zip((*vary, "ranks"), row, strict=True)) for row in itertools.product(*vary.values(), ranks)]
    of = json.dumps([recipe.values, options.steps, list(vary)], default=str)
    name = hashlib.sha256(of.encode()).hexdigest()[:8]
    folder = Path(recipe.run.trainer["default_root_dir"], "bench", name)
    timed = {"log_every_n_steps": options.steps, "max_steps": 2 * options.steps, "max_epochs": -1}
    words += quiet_flags({"logger": "true", "num_nodes": 1, **timed})
    if "model" not in recipe.run.foreign:  # warm-up might exceed these few steps
        words += ["--model.optim.warmup_steps=0", "--model.optim.warmup_ratio=0"]
    has_failed = _run_all(folder, words, cells, options.repeats)
    from lit_fsdp.report.page import write_curves

    table, curves = _results(cells, _rows(folder / "bench.csv"))
    write_curves("tokens/s by ranks", curves, folder / "bench.html")
    print(table)
    print(f"\n{folder}/bench.csv, {folder}/bench.html", file=sys.stderr)
    return int(has_failed)


def _rows(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _run_all(folder: Path, words: Sequence[str], cells: _Rows, repeats: int) -> bool:
    """Run combinations without a finished row, with interleaved repeats; a cell that fails is not repeated.

    A cell contains the value of each varied key, and ``ranks``.
    """
    results, failed = ("tokens_per_second", "peak_memory_gib"), []
    before = _rows(folder / "bench.csv")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "bench.csv").open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*cells[0], "repeat", *results, "failed"])
        if not file.tell():
            writer.writeheader()
        for repeat, cell in itertools.product(range(1, repeats + 1), cells):
            row = {**cell, "repeat": str(repeat)}
            if cell in failed or any((row | {"failed": ""}).items() <= done.items() for done in before):
                continue
            print(f"bench: {', '.join(f'{key} {value}' for key, value in row.items())}", file=sys.stderr, flush=True)
            run = folder / re.sub(r"[^\w.-]+", "_", "-".join(row.values()))
            flags = [f"--{'trainer.devices' if key == 'ranks' else key}={value}" for key, value in cell.items()]
            error = " ".join(run_fit(run, [*words, *flags]).split())
            found = {} if error else (_rows(run / "metrics.csv") or [{}])[-1]
            if not error and not found.get("tokens_per_second"):
                error = "no tokens/s in metrics.csv: a third-party module does not count tokens"
            failed += [cell] if error else []
            writer.writerow({**row, **{name: found.get(name, "") for name in results}, "failed": error})
            file.flush()
    return bool(failed)


def _results(cells: _Rows, rows: _Rows) -> tuple[str, dict[str, list[tuple[int, float]]]]:
    """Return a table of all cells, and curves of tokens/s over ranks.

    Efficiency is tokens per second and rank relative to the same values on the fewest ranks.
    """
    heads = ("ranks", "runs", "tokens/s", "least", "most", "efficiency", "GiB")
    lines: list[Sequence[str]] = [(*(key.rpartition(".")[2] for key in cells[0] if key != "ranks"), *heads)]
    reasons = []
    curves: dict[str, list[tuple[int, float]]] = {}
    for cell in sorted(cells, key=lambda cell: int(cell["ranks"])):  # stable
        *values, ranks = cell.values()
        runs = [row for row in rows if cell.items() <= row.items()]
        rates = [float(row["tokens_per_second"]) for row in runs if not row["failed"]]
        result = ["failed", "-", "-", "-", "-"]
        if rates:
            curve = curves.setdefault(", ".join(values), [])
            curve.append((int(ranks), statistics.median(rates)))
            (fewest, first), (_, rate) = curve[0], curve[-1]
            peak = max(float(row["peak_memory_gib"]) for row in runs if not row["failed"])
            result = [f"{number:,.0f}" for number in (rate, min(rates), max(rates))]
            result += [f"{rate / int(ranks) / (first / fewest):.0%}", f"{peak:.2f}"]
        if runs[-1]["failed"]:
            reasons.append(f"{', '.join(values)}, ranks {ranks}: {runs[-1]['failed']}")
        lines.append([*values, ranks, str(len(rates)), *result])
    return "\n".join([columns(lines, right=heads), *reasons]), curves
