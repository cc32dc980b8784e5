"""``bench``: one recipe with other values, run after run, and what each of them gives."""

from __future__ import annotations

import csv
import itertools
import json
import re
import signal
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from lit_fsdp.commands.parsing import RECIPE, columns, flags_of, verb_parser
from lit_fsdp.commands.profiling import quiet_flags
from lit_fsdp.errors import ConfigError, require
from lit_fsdp.launch.launcher import devices_of
from lit_fsdp.signals import EXIT_INTERRUPTED, EXIT_STOPPED

_VALUES = re.compile(r",(?![^\[{]*[\]}])")
"""Commas between values, not those inside of a list or mapping."""
_BAR, _LONGEST, _LETTER = 22, 430, 7
"""Height of a bar with its gap, length of the longest one, and width of a letter, in pixels."""
_Cell = dict[str, str]
"""Value by varied key, and ``ranks``."""


def run_bench(argv: Sequence[str]) -> int:
    """Run ``lit-fsdp bench`` and return the exit code: 1 if a cell failed."""
    text = (
        "Tokens per second, scaling efficiency and peak memory of a recipe with other values: every combination is a "
        "short fit in processes of its own, and repeats are interleaved. bench.csv gets a row per run as it ends; the "
        "same command goes on where it was stopped, and tries again what has failed. A folder holds one bench only."
    )
    example = "lit-fsdp bench -c recipes/quickstart.yaml --vary data.micro_batch_size=2,4"
    parser = verb_parser("bench", text, example, RECIPE)
    text = "values of a key of the recipe, or of config, fragments; repeatable: all combinations are run"
    parser.add_argument("--vary", action="append", required=True, metavar="KEY=A,B,...", help=text)
    parser.add_argument("--ranks", metavar="1,2,...", help="values of trainer.devices; default: the recipe's")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each combination; default: 3")
    text = "optimizer steps that are timed, after as many that are not; default: 5"
    parser.add_argument("--steps", type=int, default=5, help=text)
    parser.add_argument("--out", type=Path, help="folder of the results; default: bench in the run folder")
    options, words = parser.parse_known_args(argv)
    from lit_fsdp.config.parser import load_recipe

    for name in ("repeats", "steps"):
        value = getattr(options, name)
        require(value >= 1, f"--{name}", value, ">= 1", f"write --{name} 3")
    recipe = load_recipe(words, "fit", flags_of(parser))
    folder = options.out or Path(recipe.run.trainer["default_root_dir"]) / "bench"
    vary = dict(_varied(text) for text in options.vary)
    fix = "write all values of a key behind its first --vary"
    require(len(vary) == len(options.vary), "--vary", " ".join(options.vary), "each key once", fix)
    require("trainer.devices" not in vary, "--vary", "trainer.devices", "--ranks 1,2", "give --ranks its values")
    ranks = (options.ranks or str(devices_of(recipe.run.trainer))).split(",")
    fits = all(count.isdecimal() and int(count) >= 1 for count in ranks)
    require(fits, "--ranks", options.ranks, "whole numbers >= 1", "write --ranks 1,2")
    names = (*vary, "ranks")
    cells = [dict(zip(names, values, strict=True)) for values in itertools.product(*vary.values(), ranks)]
    timed = {"log_every_n_steps": options.steps, "max_steps": 2 * options.steps}
    words += quiet_flags({"logger": "true", "num_nodes": 1, **timed})
    if "model" not in recipe.run.foreign:  # a schedule that fits these few steps
        words += ["--model.optim.warmup_steps=0"]
    refused: dict[int, ConfigError] = {}
    for number, cell in enumerate(cells):
        try:
            load_recipe([*words, *_words(cell)], "fit", flags_of(parser))
        except ConfigError as error:
            refused[number] = error
    if len(refused) == len(cells):
        raise refused[0]
    _claim(folder, {"recipe": recipe.values, "steps": options.steps, "vary": list(vary)})
    failed = {number: str(error).replace("\n", ";") for number, error in refused.items()}
    code = _run_all(folder, words, cells, options.repeats, failed)
    if code in (EXIT_STOPPED, EXIT_INTERRUPTED):
        return code
    found = _results(cells, _rows(folder / "bench.csv"))
    (folder / "bench.svg").write_text(_picture(found), encoding="utf-8")
    print(_table(found, list(vary)))
    print(f"\n{folder}/bench.csv, {folder}/bench.svg", file=sys.stderr)
    return code


def _varied(text: str) -> tuple[str, list[str]]:
    key, _, values = text.partition("=")
    require(key and values, "--vary", text, "KEY=A,B,...", "write --vary data.micro_batch_size=1,2")
    return key.removeprefix("--"), _VALUES.split(values)


def _words(cell: _Cell) -> list[str]:
    return [f"--{'trainer.devices' if key == 'ranks' else key}={value}" for key, value in cell.items()]


def _claim(folder: Path, about: Mapping[str, Any]) -> None:
    """Note what a folder is a bench of, or refuse one of something else."""
    from lit_fsdp.config.parser import changed_values
    from lit_fsdp.redaction import redact_values

    text = json.dumps(redact_values(dict(about)), indent=1, default=str)
    path = folder / "bench.json"
    if path.is_file():
        changed = "; ".join(changed_values(json.loads(path.read_text(encoding="utf-8")), json.loads(text)))
        given = f"{folder}, which holds a bench of something else: {changed}"
        require(not changed, "--out", given, "a folder for each recipe, --steps and varied keys", "name another --out")
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _rows(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _run_all(folder: Path, words: Sequence[str], cells: Sequence[_Cell], repeats: int, failed: dict[int, str]) -> int:
    """Run what has no finished row yet, the repeats interleaved; a cell that fails is not repeated."""
    names = [*cells[0], "repeat", "tokens_per_second", "peak_memory_gib", "failed"]
    done = [{name: row[name] for name in names[:-3]} for row in _rows(folder / "bench.csv") if not row["failed"]]
    with (folder / "bench.csv").open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        if not file.tell():
            writer.writeheader()
        for number, reason in failed.items():
            writer.writerow({**cells[number], "repeat": 1, "failed": reason})
        for repeat, (number, cell) in itertools.product(range(1, repeats + 1), enumerate(cells)):
            row = {**cell, "repeat": str(repeat)}
            if number in failed or row in done:
                continue
            said = ", ".join(f"{key} {value}" for key, value in row.items())
            print(f"bench: {said}", file=sys.stderr, flush=True)
            run = folder / "runs" / re.sub(r"[^\w.-]+", "_", "-".join(row.values()))
            code, result = _run(run, [*words, *_words(cell)])
            if code in (EXIT_STOPPED, EXIT_INTERRUPTED):
                return code
            failed.update({number: result["failed"]} if result["failed"] else {})
            writer.writerow(row | result)
            file.flush()
    return int(bool(failed))


def _run(folder: Path, words: Sequence[str]) -> tuple[int, dict[str, Any]]:
    """One short fit: its exit code, and what it gives or why it failed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_STOPPED))  # and with this process the run ends as well
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "lit_fsdp", "fit", *words, f"--trainer.default_root_dir={folder}"]
    with (folder / "log.txt").open("w+", encoding="utf-8") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode  # noqa: S603
        log.seek(0)
        errors = [line.strip() for line in log if "error" in line.lower()]
    if code:
        return code, {"failed": errors[-1] if errors else f"exit code {code}"}
    rows = _rows(folder / "metrics.csv")
    if not rows or "tokens_per_second" not in rows[-1]:
        return 0, {"failed": "no tokens/s in metrics.csv: a module of somebody else's counts none"}
    return 0, {**{name: rows[-1][name] for name in ("tokens_per_second", "peak_memory_gib")}, "failed": ""}


@dataclass
class _Result:
    """What the runs of one cell give."""

    values: list[str]
    ranks: int
    rates: list[float]
    """Tokens per second over all ranks, of each finished run; none: it has failed."""
    peak_gib: float
    failed: str
    """Why the last run did; empty where it has finished."""
    efficiency: float = 1.0
    """Tokens per second and rank relative to the same values on the fewest ranks."""

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)

    @property
    def label(self) -> str:
        return f"{', '.join(self.values)}, ranks {self.ranks}"


def _results(cells: Sequence[_Cell], rows: Sequence[Mapping[str, str]]) -> list[_Result]:
    found = []
    for cell in cells:
        *values, ranks = cell.values()
        runs = [row for row in rows if cell.items() <= row.items()]
        finished = [row for row in runs if not row["failed"]]
        rates = [float(row["tokens_per_second"]) for row in finished]
        peak = max((float(row["peak_memory_gib"]) for row in finished), default=0.0)
        found.append(_Result(values, int(ranks), rates, peak, runs[-1]["failed"]))
    with_rates = [one for one in found if one.rates]
    for one in with_rates:
        fewest = min((other for other in with_rates if other.values == one.values), key=lambda other: other.ranks)
        one.efficiency = one.rate / one.ranks / (fewest.rate / fewest.ranks)
    return found


def _picture(found: Sequence[_Result]) -> str:
    """Tokens/s of the cells that finished as an SVG: bars of medians, with a line from the least to the most."""
    bars = [one for one in found if one.rates]
    most = max((max(one.rates) for one in bars), default=1.0)
    left = _LETTER * max((len(one.label) for one in bars), default=0)
    parts = []
    for number, one in enumerate(bars):
        top = 10 + _BAR * number
        median, low, high = (_LONGEST * rate / most for rate in (one.rate, min(one.rates), max(one.rates)))
        parts += [
            f'<text x="{left - 8}" y="{top + 12}" text-anchor="end">{escape(one.label)}</text>',
            f'<rect x="{left}" y="{top}" width="{median:.1f}" height="16" fill="#3b6fb6"/>',
            f'<path d="M{left + low:.1f} {top + 8}H{left + high:.1f}" stroke="#e08a2c" stroke-width="3"/>',
            f'<text x="{left + _LONGEST + 8}" y="{top + 12}">{one.rate:,.0f} tokens/s</text>',
        ]
    size = f'width="{left + _LONGEST + 130}" height="{20 + _BAR * len(bars)}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>\n"])


def _table(found: Sequence[_Result], keys: Sequence[str]) -> str:
    numbers = ("ranks", "runs", "tokens/s", "least", "most", "efficiency", "GiB")
    rows = [(*(key.rpartition(".")[2] for key in keys), *numbers)]
    for one in found:
        results: tuple[str, ...] = ("failed", "-", "-", "-", "-")
        if one.rates:
            rates = (f"{rate:,.0f}" for rate in (one.rate, min(one.rates), max(one.rates)))
            results = (*rates, f"{one.efficiency:.0%}", f"{one.peak_gib:.2f}")
        rows.append((*one.values, str(one.ranks), str(len(one.rates)), *results))
    reasons = [f"{one.label}: {one.failed}" for one in found if one.failed]
    return "\n".join([columns(rows, right=numbers), *reasons])
