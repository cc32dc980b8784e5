"""``report.html``: the content of one or several run folders as a single self-contained page."""

import contextlib
import csv
import html
import io
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import yaml

from lit_fsdp.checkpoint.files import replace_bytes
from lit_fsdp.checkpoint.run_folder import FOLDER, survey
from lit_fsdp.config.sections import leaves
from lit_fsdp.errors import DataError
from lit_fsdp.host import size_words
from lit_fsdp.redaction import redact
from lit_fsdp.report.data import data_table, visible
from lit_fsdp.report.tables import dtypes_table, parameter_counts, units_table

NAME = "report.html"
_STYLE = Path(__file__).with_name("page.css")
_MAX_STRETCHES = 400
_MOST_MARKED = 40  # points of a curve; more would hide the line
_MOST_SHOWN = 120  # characters of a sample at a glance
_Point = tuple[int, float]


class Curve:
    """Values by non-decreasing step; long curves keep the minimum and maximum of each interval, so peaks remain."""

    def __init__(self, points: Iterable[_Point] = ()) -> None:
        self.last_step = self.num_lost = 0
        """Last step of any value, and number of inf or nan values, which are not points."""
        self.first: _Point | None = None
        self.last: _Point | None = None
        self._steps = 1  # per interval
        self._ends: dict[int, tuple[_Point, _Point]] = {}
        for point in points:
            self.add(*point)

    def add(self, step: int, value: float) -> None:
        """Add a point; at most 800 points are kept."""
        self.last_step = step
        if not math.isfinite(value):
            self.num_lost += 1
            return
        self.last = step, value
        self.first = self.first or self.last
        self._join(self.last, self.last)
        while len(self._ends) > _MAX_STRETCHES:
            self._steps *= 2
            before, self._ends = self._ends, {}
            for low, high in before.values():
                self._join(low, high)

    def _join(self, low: _Point, high: _Point) -> None:
        stretch = low[0] // self._steps
        lowest, highest = self._ends.get(stretch, (low, high))
        self._ends[stretch] = (low if low[1] < lowest[1] else lowest, high if high[1] > highest[1] else highest)

    @property
    def points(self) -> list[_Point]:
        """Points to draw: all points of a short curve."""
        return [point for pair in self._ends.values() for point in sorted({*pair})]


@dataclass(frozen=True)
class RunFiles:
    """Existing files of a run folder; the ``metrics`` are completed optimizer steps and values, by column."""

    folder: Path
    recipe: dict[str, Any]
    audit: dict[str, Any]
    dtypes: dict[str, Any]
    data: dict[str, Any]
    metrics: dict[str, Curve]


def read_run(folder: Path) -> RunFiles:
    """Read the files of a run folder; an incomplete last line of ``metrics.csv`` (killed run) is ignored.

    Raises:
        DataError: A file is invalid.
    """
    metrics: dict[str, Curve] = {}
    records: dict[str, dict[str, Any]] = {}
    path = folder
    try:
        for name in ("recipe.yaml", "audit.json", "dtypes.json", "data.json"):
            path = folder / name
            read = json.loads if path.suffix == ".json" else yaml.safe_load
            records[path.stem] = read(path.read_text(encoding="utf-8")) if path.is_file() else {}
        path = folder / "metrics.csv"
        with path.open(encoding="utf-8") if path.is_file() else io.StringIO() as file:
            for row in csv.DictReader(line for line in file if line.endswith("\n")):
                done = int(row.pop("step"))
                for name, cell in row.items():
                    if cell and name != "epoch":
                        metrics.setdefault(name, Curve()).add(done, float(cell))
    except (KeyError, TypeError, ValueError, yaml.YAMLError) as error:
        raise DataError(f"{path}: not a valid file of a run: {error!r}") from error
    return RunFiles(folder=folder, metrics=metrics, **records)


def report_of(folder: Path) -> str:
    """Write the page of a finished run, and return a log line with its location or error; never raises."""
    try:
        write_page([read_run(folder)], folder / NAME)
    except Exception as error:
        return f"cannot write {folder / NAME}: {type(error).__name__}: {error}"
    return f"report: {folder / NAME}"


def write_page(runs: Sequence[RunFiles], out: Path) -> None:
    """Write the page of one run, or of several runs side by side.

    Content of files is escaped, and secrets are replaced by ``***``.
    """
    names = [str(run.folder) for run in runs]
    several = len(runs) > 1
    parts = [_beside("At a glance", names, [_facts(run) for run in runs])]
    if several:
        flat = [dict(leaves(run.recipe)) for run in runs]
        keys = dict.fromkeys(key for values in flat for key in values)
        differing = [key for key in keys if any(_read(values.get(key)) != _read(flat[0].get(key)) for values in flat)]
        columns = [
            {key: json.dumps(_read(values.get(key)), ensure_ascii=False) for key in differing} for values in flat
        ]
        parts.append(_beside("Where the recipes differ", names, columns) or "<p>The recipes are equal.</p>")
    ends = [curve.last_step for run in runs if (curve := run.metrics.get("train_loss"))]
    if len({*ends}) > 1:
        steps = ", ".join(f"{end:,}" for end in ends)
        parts.append(f"<p>Training losses end at different steps ({steps}): compare curves at the same step.</p>")
    parts.append(_charts(runs))
    if memory := _beside("Memory, planned and measured", names, [_memory(run) for run in runs]):
        parts += [memory, "<p class=note>GPU: memory allocated by torch; CPU: growth of the process.</p>"]
    parts.append(_beside("Versions", names, [run.audit.get("versions", {}) for run in runs]))
    for run, name in zip(runs, names, strict=True):
        parts += [f"<h2 class=run>{_text(name)}</h2>"] if several else []
        parts += [_checkpoints(run), _samples(run), *_data_and_model(run)]
        if run.recipe:
            text = yaml.safe_dump(run.recipe, sort_keys=False, allow_unicode=True)
            parts.append(f"<h3>Recipe</h3><details><summary>recipe.yaml</summary><pre>{_text(text)}</pre></details>")
    _write(f"{len(runs)} runs" if several else names[0], parts, out)


def write_curves(title: str, curves: Mapping[str, Sequence[_Point]], out: Path) -> None:
    """Write a page with one chart; points are ranks and values, by curve name."""
    drawn = [(name, Curve(points), number, 0) for number, (name, points) in enumerate(curves.items())]
    chart = _chart(title, drawn, "ranks")
    _write(title, [f"<div class=charts>{chart}</div>"], out)


def _write(title: str, parts: Iterable[str], out: Path) -> None:
    style, body = _STYLE.read_text(encoding="utf-8"), "\n".join(parts)
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{_text(title)}</title>'
    page = f"<!DOCTYPE html>\n<html lang=en><head>{head}<style>{style}</style></head>\n"
    page += f"<body><h1>{_text(title)}</h1>\n{body}\n</body></html>\n"
    replace_bytes(out, page.encode(errors="xmlcharrefreplace"))


def _read(value: Any) -> Any:
    """The value that a text is, as flags give."""
    with contextlib.suppress(yaml.YAMLError):
        return yaml.safe_load(value) if isinstance(value, str) else value
    return value


def _facts(run: RunFiles) -> dict[str, str]:
    audit, model = run.audit, run.recipe.get("model") or {}
    model = {**model, **(model.get("init_args") or {})}
    saved = [found.step for found in survey(run.folder / FOLDER) if not found.damage]
    done = max([*(curve.last_step for curve in run.metrics.values()), *saved], default=0)
    limit = (run.recipe.get("trainer") or {}).get("max_steps") or -1
    facts = {"status": audit["status"]} if "status" in audit else {}
    if start := audit.get("started"):
        facts["last start"] = f"{start[:19].replace('T', ' ')} UTC"
        seconds = (datetime.fromisoformat(audit.get("ended", start)) - datetime.fromisoformat(start)).total_seconds()
        facts |= {"duration": str(timedelta(seconds=round(seconds)))} if "ended" in audit else {}
    if len(starts := audit.get("starts", [])) > 1:  # the facts below describe the last one
        facts["starts"] = "; ".join(_start(**start) for start in starts)
    facts["optimizer steps"] = f"{done:,} of {limit:,}" if limit > 0 else f"{done:,}"
    losses = {name: run.metrics[name].last for name in ("train_loss", "val_loss") if name in run.metrics}
    if final := [f"{name} {_number(last[1])}" for name, last in losses.items() if last]:
        facts["final losses"] = ", ".join(final)
    if samples := _sample_rows(run)[1:]:
        step, prompt, _, got = samples[-1]
        facts[f"sample at step {step}"] = f"{prompt[-_MOST_SHOWN:]} → {got[:_MOST_SHOWN]}"
    if audit:
        copies = audit["replicate_degree"]
        number = audit["shard_degree"] * copies
        ranks = f"{number} rank{'s' if number != 1 else ''}" + (f", {copies} copies" if copies > 1 else "")
        facts["engine"] = f"{audit['engine']}, {audit['sharding']}, {ranks}"
        words = [str(model[key]) for key in ("name", "class_path") if model.get(key)]
        words += ["miniature with random weights"] if model.get("miniature") else []
        facts["model"] = ", ".join([*words, parameter_counts(audit)])
    return facts


def _start(step: int, ranks: int, changed: Sequence[str]) -> str:
    """Format one start of a run: where it began, and which values of the recipe were new."""
    return ", ".join([f"from step {step:,} on {ranks} rank{'s' if ranks != 1 else ''}", *changed])


def _charts(runs: Sequence[RunFiles]) -> str:
    """Draw one chart per column of ``metrics.csv``; columns ``train_…`` and ``val_…`` share a chart."""
    charts: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for run in runs for name in run.metrics):
        charts.setdefault(name.removeprefix("train_").removeprefix("val_"), []).append(name)
    drawn = []
    for title, names in charts.items():
        curves: list[tuple[str, Curve, int, int]] = []
        for i, run in enumerate(runs):
            for j, name in enumerate(names):
                label, look = (name, (j, 0)) if len(runs) == 1 else (f"{run.folder} {name}", (i, j))
                curves.append((label, run.metrics.get(name, Curve()), *look))
        drawn.append(_chart(title, curves))
    return f"<h3>By optimizer step</h3><div class=charts>{''.join(drawn) or 'No steps were logged.'}</div>"


def _memory(run: RunFiles) -> dict[str, str]:
    predicted, measured = run.audit.get("predicted_peak_bytes"), run.audit.get("measured_peak_bytes_per_rank")
    found = {} if predicted is None else {"predicted, largest rank": size_words(predicted)}
    if measured:
        found[f"measured, maximum of {len(measured)} rank{'s' if len(measured) > 1 else ''}"] = size_words(
            max(measured)
        )
        found["measured, minimum"] = size_words(min(measured))
    if predicted and measured and max(measured) > 0:
        found["predicted ÷ measured"] = f"{predicted / max(measured):.1%}"
    return found


def _checkpoints(run: RunFiles) -> str:
    monitor = (run.recipe.get("checkpoint") or {}).get("monitor", "val_loss")
    rows = []
    for found in survey(run.folder / FOLDER):
        value = "–" if monitor not in found.metrics else _number(found.metrics[monitor])
        time = found.created.replace("T", " ").removesuffix("+00:00")
        rows.append([found.path.name, time, size_words(found.num_bytes), value, found.damage or ""])
    others = sorted((run.folder / FOLDER).glob("*.ckpt"))  # from Lightning's own strategies
    rows += [[path.name, "", size_words(path.stat().st_size), "", ""] for path in others]
    return _table("Checkpoints", ["", "time (UTC)", "size", monitor, ""], rows)


def _samples(run: RunFiles) -> str:
    head, *rows = _sample_rows(run) or [[]]
    shown = [row for row in rows if row[0] in (rows[0][0], rows[-1][0])]
    return _table("Samples, first and last generation", head, shown, look="long")


def _sample_rows(run: RunFiles) -> list[list[str]]:
    path = run.folder / "samples.csv"
    with path.open(newline="", encoding="utf-8") if path.is_file() else io.StringIO() as file:
        return [row for row in csv.reader(file) if len(row) == 4]


def _data_and_model(run: RunFiles) -> list[str]:
    tables = [data_table(run.data)] if run.data else []
    tables += [units_table(run.audit)] if run.audit else []
    tables += [dtypes_table(run.dtypes)] if run.dtypes else []
    found = []
    for table in tables:
        rows = zip(*(map(str, column.cells) for column in table.columns), strict=True)
        title = str(table.title or "Dtypes of the run")
        found.append(_table(title, [str(column.header) for column in table.columns], rows))
        found += [f"<p>{_text(table.caption)}</p>"] if table.caption else []
    return found


def _beside(title: str, names: Sequence[str], columns: Sequence[Mapping[str, str]]) -> str:
    """Build a table with one row per key and one column per run."""
    keys = dict.fromkeys(key for column in columns for key in column)
    rows = [[key, *(column.get(key, "–") for column in columns)] for key in keys]
    return _table(title, ["", *names] if len(names) > 1 else [], rows, look="facts")


def _table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]], look: str = "") -> str:
    """Build an escaped table in a scrollable box; empty without rows."""
    lines = ["".join(f"<td>{_text(cell)}</td>" for cell in row) for row in rows]
    heads = "".join(f"<th>{_text(cell)}</th>" for cell in head)
    inner = f"<thead><tr>{heads}</tr></thead>" * bool(head) + "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<h3>{_text(title)}</h3><div class=box><table class="{look}">{inner}</table></div>' if lines else ""


def _text(text: Any) -> str:
    """Escape text of a file for display: no secrets, and nothing that affects the rest of the page."""
    return html.escape(redact(visible(str(text))))


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _chart(title: str, curves: Sequence[tuple[str, Curve, int, int]], across: str = "steps") -> str:
    """Draw curves (name, curve, color, dash) with their last values; the title has the number of inf and nan."""
    every = [point for _, curve, _, _ in curves for point in (*curve.points, curve.first, curve.last) if point]
    lost = sum(curve.num_lost for _, curve, _, _ in curves)
    title = _text(f"{title} ({lost} inf or nan)" if lost else title)
    if not every:
        return f"<figure><figcaption>{title}</figcaption></figure>" if lost else ""
    first, last = min(step for step, _ in every), max(step for step, _ in every)
    low, high = min(value for _, value in every), max(value for _, value in every)
    ends = [_number(value) for value in (low, high)]
    if low == high:  # centered, with its value in the legend
        low, high, ends = low - (abs(low) or 1), low + (abs(low) or 1), ["", ""]
    elif 0 <= low < high / 2:
        low, ends[0] = 0.0, "0"

    def place(step: float, value: float) -> str:
        right = (step - first) / (last - first) if last > first else 0.5
        return f"{100 * right:.2f},{100 * (high - value) / (high - low):.2f}"

    drawn, legend = [], []
    for name, curve, color, dash in curves:
        look = f'class="c{color % 8} d{dash % 3}"'
        places = [place(*point) for point in curve.points]
        drawn.append(f'<polyline {look} points="{" ".join(places)}"/>')
        if len(places) <= _MOST_MARKED:
            drawn.append(f'<path class="c{color % 8}" d="{"".join(f"M{point}h0" for point in places)}"/>')
        end = _number(curve.last[1]) if curve.last else "–"
        legend.append(f"<span><i {look}></i>{_text(name)} <b>{end}</b></span>")
    svg = (
        f'<svg viewBox="0 0 100 100" preserveAspectRatio="none" role="img" aria-label="{title}">{"".join(drawn)}</svg>'
    )
    plot = f'<div class=plot data-low="{ends[0]}" data-high="{ends[1]}">{svg}</div>'
    where = [(step, place(step, low).partition(",")[0]) for step in _ticks(first, last)]
    ticks = "".join(f'<small style="left:{right}%">{step:,}</small>' for step, right in where)
    plot += f"<div class=ticks>{ticks}</div><div class=across>{across}</div>"
    return f"<figure><figcaption>{title}</figcaption>{plot}<p class=legend>{' '.join(legend)}</p></figure>"


def _ticks(first: int, last: int) -> list[int]:
    """At most six round numbers between two steps."""
    sizes = (size * 10**power for power in itertools.count() for size in (1, 2, 5))
    size = next(size for size in sizes if last // size - (first - 1) // size <= 6)
    return list(range(-(-first // size) * size, last + 1, size)) or [first]
