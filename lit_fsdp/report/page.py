"""``report.html``: what a run folder holds as one page for people, with nothing to fetch; several runs side by side."""

from __future__ import annotations

import csv
import html
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from rich.table import Table

from lit_fsdp.checkpoint.files import replace_bytes
from lit_fsdp.checkpoint.run_folder import FOLDER, Found, ranked, survey
from lit_fsdp.config.parser import leaves
from lit_fsdp.errors import DataError
from lit_fsdp.host import GIB
from lit_fsdp.redaction import redact
from lit_fsdp.report.data_tables import data_table
from lit_fsdp.report.samples import visible
from lit_fsdp.report.tables import dtypes_table, parameter_counts, units_table

NAME = "report.html"
MAX_RUNS = 8
"""On one page: as many as there are colors."""
_STYLE = Path(__file__).with_name("page.css")
_CHARTS = {
    "Loss": ("train_loss", "val_loss"),
    "Learning rate": ("lr",),
    "Gradient norm, before clipping": ("grad_norm",),
    "Tokens per second, all ranks": ("tokens_per_second", "supervised_tokens_per_second"),
    "Peak memory of rank 0, GiB": ("peak_memory_gib", "peak_reserved_gib"),
    "Share of the time that waits for data": ("data_wait_share",),
    "Token accuracy": ("train_token_accuracy", "val_token_accuracy"),
    "Share of the device's peak rate": ("mfu", "hfu"),
}
"""Columns of ``metrics.csv`` by chart; any other has one of its own, a ``train_`` one together with its ``val_``."""
_MAX_CHARACTERS = 600
"""Of a prompt or an answer; of a prompt the end is shown."""
_WIDTH, _HEIGHT = 360, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 338, 10, 166
_MAX_MARKED, _MAX_STRETCHES = 40, 400
_Points = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class RunFiles:
    """What a run folder holds, as far as it is there: a killed run, or one of somebody else's module, has less."""

    folder: Path
    recipe: dict[str, Any]
    """The resolved one; like the other records empty where there is none."""
    audit: dict[str, Any]
    dtypes: dict[str, Any]
    data: dict[str, Any]
    checkpoints: list[Found]
    """Complete or not, oldest first."""
    unreadable: set[str]
    """Damaged files."""
    metrics: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    """By column: optimizer steps done and finite values."""
    not_finite: dict[str, int] = field(default_factory=dict)
    """How many values of a column are inf or nan."""


def read_run(folder: Path) -> RunFiles:
    """Read what is there; a line of ``metrics.csv`` that a kill has cut off is left out.

    Raises:
        DataError: ``metrics.csv`` is something else.
    """
    unreadable: set[str] = set()
    names = ("recipe.yaml", "audit.json", "dtypes.json", "data.json")
    recipe, audit, dtypes, data = (_record(folder / name, unreadable) for name in names)
    run = RunFiles(folder, recipe, audit, dtypes, data, survey(folder / FOLDER), unreadable)
    path = folder / "metrics.csv"
    if not path.is_file():
        return run
    try:
        text = path.read_text(encoding="utf-8")
        for row in csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1])):
            done = int(row.pop("step")) + 1  # a row counts its step from 0
            for name, cell in row.items():
                if not cell or name == "epoch":
                    continue
                if math.isfinite(float(cell)):
                    run.metrics.setdefault(name, []).append((done, float(cell)))
                else:
                    run.not_finite[name] = run.not_finite.get(name, 0) + 1
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path}: no table of numbers by step: {error!r}") from error
    return run


def report_of(folder: Path) -> str:
    """Write the page of a run that has just ended, and say where it is; without it the run is as good."""
    try:
        write_page([read_run(folder)], folder / NAME)
    except Exception as error:
        return f"{folder / NAME} was not written: {type(error).__name__}: {error}"
    return f"report: {folder / NAME}"


def write_page(runs: Sequence[RunFiles], out: Path) -> None:
    """Write the page of one run, or of several beside each other; a reader sees the old one or the new one.

    Whatever comes from files is escaped, and secrets are ``***``.
    """
    replace_bytes(out, _page(runs).encode(errors="xmlcharrefreplace"))


def _page(runs: Sequence[RunFiles]) -> str:
    names = [str(run.folder) for run in runs]
    several = len(runs) > 1
    parts = [_beside("At a glance", names, [_facts(run) for run in runs], colored=several)]
    if several:
        recipes = [run.recipe for run in runs]
        parts.append(_differences("Where the recipes differ", names, recipes) or "<p>The recipes are equal.</p>")
    parts.append(_charts(runs))
    if memory := _beside("Memory, planned and measured", names, [_memory(run) for run in runs]):
        parts += [memory, "<p class=note>On a GPU what torch allocated; on a CPU what the process grew by.</p>"]
    parts.append(_beside("Versions", names, [run.audit.get("versions", {}) for run in runs]))
    for run, name in zip(runs, names, strict=True):
        parts += [f"<h2 class=run>{_text(name)}</h2>"] if several else []
        parts += [_checkpoints(run), _changes(run), _samples(run), _data(run), _model(run), _yaml(run)]
        parts += [f"<p class=note>Damaged: {_text(path)}</p>" for path in sorted(run.unreadable)]
    title = _text(f"{len(runs)} runs" if several else names[0])
    style = _STYLE.read_text(encoding="utf-8")
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    body = "\n".join(part for part in parts if part)
    return f"<!DOCTYPE html>\n<html lang=en><head>{head}<style>{style}</style></head>\n" + (
        f"<body><h1>{title}</h1>\n{body}\n</body></html>\n"
    )


def _differences(title: str, names: Sequence[str], recipes: Sequence[Mapping[str, Any]]) -> str:
    """A table of every key that two of the recipes do not have alike; nothing where there is none."""
    flat = [dict(leaves(recipe)) for recipe in recipes]
    keys = dict.fromkeys(key for values in flat for key in values)
    differing = [key for key in keys if any(values.get(key) != flat[0].get(key) for values in flat)]
    return _beside(title, names, [{key: _yaml_word(values.get(key)) for key in differing} for values in flat])


def _facts(run: RunFiles) -> dict[str, str]:
    audit, trainer, model = run.audit, run.recipe.get("trainer") or {}, run.recipe.get("model") or {}
    logged = [points[-1][0] for points in run.metrics.values()]
    done = max([*logged, *(found.step for found in run.checkpoints if not found.damage)], default=0)
    limit = trainer.get("max_steps") or -1
    facts = {"optimizer steps": f"{done:,} of {limit:,}" if limit > 0 else f"{done:,}"}
    if points := run.metrics.get("train_loss"):
        facts["training loss, last"] = _number(points[-1][1])
    if points := run.metrics.get("val_loss"):
        step, value = min(points, key=lambda point: point[1])
        facts["validation loss, lowest"] = f"{_number(value)} after step {step:,}"
    if points := run.metrics.get("tokens_per_second"):
        facts["tokens per second, median"] = _number(sorted(value for _, value in points)[len(points) // 2])
    if audit:
        copies = audit["replicate_degree"]
        ranks = f"{audit['shard_degree'] * copies} ranks" + (f", {copies} copies" if copies > 1 else "")
        facts["engine"] = f"{audit['engine']}, {audit['sharding']}, {ranks}"
        words = [str(model[key]) for key in ("name", "class_path") if model.get(key)]
        words += ["a miniature of random weights"] if model.get("miniature") else []
        facts["model"] = ", ".join([*words, parameter_counts(audit)])
    if mode := run.dtypes.get("mode"):
        facts["precision"] = mode
    return facts


def _charts(runs: Sequence[RunFiles]) -> str:
    columns = list(dict.fromkeys(name for run in runs for name in run.metrics))
    charts: dict[str, list[str]] = {title: [] for title in _CHARTS}
    known = {name: title for title, names in _CHARTS.items() for name in names}
    for name in columns:
        charts.setdefault(known.get(name) or name.removeprefix("train_").removeprefix("val_"), []).append(name)
    steps = [step for run in runs for points in run.metrics.values() for step, _ in points]
    neighbors = len({run.folder.parent for run in runs}) == 1
    drawn = []
    for title, names in charts.items():
        curves = []
        for i, run in enumerate(runs):
            for j, name in enumerate(names):
                whose = run.folder.name if neighbors else run.folder
                label, look = (f"{whose} {name}", (i, j)) if len(runs) > 1 else (name, (j, 0))
                curves.append(_Curve(_said(label), run.metrics.get(name, ()), *look))
        if names:
            drawn.append(_chart(_said(title), curves, min(steps), max(steps)))
    lost = [f"{run.folder}: {name} {count}" for run in runs for name, count in run.not_finite.items()]
    note = f"<p class=note>Not drawn, as they are inf or nan: {_text(', '.join(lost))}.</p>" if lost else ""
    what = f"<div class=charts>{''.join(drawn)}</div>" if drawn else "<p>No step was logged.</p>"
    return f"<h2>By optimizer step</h2>{what}{note}"


def _memory(run: RunFiles) -> dict[str, str]:
    predicted, measured = run.audit.get("predicted_peak_bytes"), run.audit.get("measured_peak_bytes_per_rank")
    found = {}
    if predicted is not None:
        found["predicted, rank that holds most"] = _gib(predicted)
    if measured:
        found[f"measured, highest of {len(measured)}"] = _gib(max(measured))
        found["measured, lowest"] = _gib(min(measured))
    if predicted and measured and max(measured) > 0:
        found["predicted ÷ measured"] = f"{predicted / max(measured):.1%}"
    return found


def _checkpoints(run: RunFiles) -> str:
    section = run.recipe.get("checkpoint") or {}
    monitor, mode = section.get("monitor", "val_loss"), section.get("mode", "min")
    complete = [found for found in run.checkpoints if not found.damage]
    means = {"last": complete[-1:], "best": ranked(complete, monitor, mode)[:1]}
    rows = []
    for found in run.checkpoints:
        value = found.metrics.get(monitor)
        words = [word for word, meant in means.items() if found in meant]
        rows.append(
            [
                found.path.name,
                found.created.replace("T", " ").removesuffix("+00:00"),
                _gib(found.num_bytes),
                "–" if value is None else _number(value),
                found.damage or ", ".join(words),
            ]
        )
    others = sorted((run.folder / FOLDER).glob("*.ckpt"))  # of Lightning's own strategies
    rows += [[path.name, "", _gib(path.stat().st_size), "", ""] for path in others]
    return _table("Checkpoints", ["", "time (UTC)", "size", monitor, ""], rows)


def _changes(run: RunFiles) -> str:
    """What a run that was resumed does otherwise than when its checkpoints were saved."""
    saved = [found for found in run.checkpoints if not found.damage and (found.path / "recipe.yaml").is_file()]
    names = [*(f"until step {found.step}" for found in saved), "now"]
    recipes = [*(_record(found.path / "recipe.yaml", run.unreadable) for found in saved), run.recipe]
    without = [{key: value for key, value in recipe.items() if key != "ckpt_path"} for recipe in recipes]
    return _differences("Recipe changed by a resume", names, without)


def _samples(run: RunFiles) -> str:
    path = run.folder / "samples.csv"
    if not path.is_file():
        return ""
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.reader(file) if len(row) == 4]
    if not rows:
        return ""
    head, asked = rows[0], rows[1:]
    shown = {row[0] for row in (*asked[:1], *asked[-1:])}
    cut = [
        [step, *(("…" if len(text) > _MAX_CHARACTERS else "") + text[-_MAX_CHARACTERS:] for text in texts)]
        for step, *texts in asked
        if step in shown
    ]
    return _table("Samples, first and last time asked", head, cut, look="long")


def _data(run: RunFiles) -> str:
    return f"<h3>Data</h3>{_rich(data_table(run.data))}" if run.data else ""


def _model(run: RunFiles) -> str:
    tables = [("FSDP units", units_table(run.audit))] if run.audit else []
    tables += [("Dtypes, as read back", dtypes_table(run.dtypes))] if run.dtypes else []
    return "".join(f"<h3>{title}</h3>{_rich(table)}" for title, table in tables)


def _yaml(run: RunFiles) -> str:
    if not run.recipe:
        return ""
    text = yaml.safe_dump(run.recipe, sort_keys=False, allow_unicode=True)
    return f"<h3>Recipe</h3><details><summary>recipe.yaml</summary><pre>{_text(text)}</pre></details>"


def _record(path: Path, unreadable: set[str]) -> dict[str, Any]:
    """What a file holds; of one that is not there, or is damaged and named then, nothing."""
    try:
        text = path.read_text(encoding="utf-8") if path.is_file() else "{}"
        return (json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)) or {}
    except (ValueError, yaml.YAMLError):
        unreadable.add(str(path))
        return {}


def _yaml_word(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=math.inf).removesuffix("\n").removesuffix("\n...")


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.3g} GiB"


def _said(text: str) -> str:
    """Of a file, to be shown: no secrets, and nothing that changes how the rest is read."""
    return redact(visible(text))


def _text(text: Any) -> str:
    return html.escape(_said(str(text)))


def _beside(title: str, names: Sequence[str], columns: Sequence[Mapping[str, str]], colored: bool = False) -> str:
    """One row per key and one column per run."""
    rows = [
        [key, *(column.get(key, "–") for column in columns)]
        for key in dict.fromkeys(key for column in columns for key in column)
    ]
    return _table(title, ["", *names] if len(names) > 1 else [], rows, look="facts", swatches=colored)


def _rich(table: Table) -> str:
    rows = zip(*(map(str, column.cells) for column in table.columns), strict=True)
    return _table(None, [str(column.header) for column in table.columns], rows, caption=str(table.title or ""))


def _table(
    title: str | None,
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    caption: str = "",
    look: str = "",
    swatches: bool = False,
) -> str:
    """Escaped, in a box that scrolls; nothing where there are no rows."""
    lines = ["".join(f"<td>{_text(cell)}</td>" for cell in row) for row in rows]
    if not lines:
        return ""
    colors = [f' class="swatch c{n - 1}"' if swatches and n else "" for n in range(len(head))]
    heads = "".join(f"<th{color}>{_text(cell)}</th>" for color, cell in zip(colors, head, strict=True))
    above = (f"<h3>{_text(title)}</h3>" if title else "") + (f"<p class=note>{_text(caption)}</p>" if caption else "")
    inner = f"<thead><tr>{heads}</tr></thead>" * any(head) + "".join(f"<tr>{line}</tr>" for line in lines)
    return f'{above}<div class=box><table class="{look}">{inner}</table></div>'


# -- curves as inline SVG, which needs nothing but a browser


@dataclass(frozen=True)
class _Curve:
    """One line of a chart; its looks are classes of the page's style sheet."""

    label: str
    points: _Points
    """Optimizer steps done, and finite values."""
    color: int
    dash: int


def _chart(title: str, curves: Sequence[_Curve], first: int, last: int) -> str:
    """A figure from one step to another, with a legend that has the last value of each curve that has points."""
    curves = [curve for curve in curves if curve.points]
    values = [value for curve in curves for _, value in curve.points]
    low = 0.0 if 0 <= min(values) < max(values) / 2 else min(values)
    heights = _ticks(low, max(values) if max(values) > low else low + (abs(low) or 1.0))
    marks = [tick for tick in _ticks(first, last) if first <= tick <= last and tick == int(tick)]

    def x(step: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * ((step - first) / (last - first) if last > first else 0.5)

    def y(value: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * (value - heights[0]) / (heights[-1] - heights[0])

    drawn, legend = [], []
    for tick in heights:
        drawn.append(f'<line class="grid" x1="{_LEFT}" x2="{_RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        drawn.append(f'<text class="y" x="{_LEFT - 6}" y="{y(tick) + 3.5:.1f}">{_number(tick)}</text>')
    for tick in marks:
        drawn.append(f'<text class="x" x="{x(tick):.1f}" y="{_BOTTOM + 17}">{tick:,.0f}</text>')
    for curve in curves:
        look, name = f"c{curve.color} d{curve.dash}", html.escape(curve.label)
        places = [f"{x(step):.1f},{y(value):.1f}" for step, value in thinned(curve.points)]
        drawn.append(f'<polyline class="{look}" points="{" ".join(places)}"/>')
        for step, value in curve.points if len(curve.points) <= _MAX_MARKED else ():
            text = f"<title>{name}, step {step:,}: {_number(value)}</title>"
            drawn.append(f'<circle class="{look}" cx="{x(step):.1f}" cy="{y(value):.1f}" r="2.2">{text}</circle>')
        swatch = f'<svg class="swatch" viewBox="0 0 20 8"><line class="{look}" x1="0" x2="20" y1="4" y2="4"/></svg>'
        legend.append(f"<span>{swatch}{name} <b>{_number(curve.points[-1][1])}</b></span>")
    what = html.escape(title)
    picture = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{what}">{"".join(drawn)}</svg>'
    return f"<figure><figcaption>{what}</figcaption>{picture}<p class=legend>{' '.join(legend)}</p></figure>"


def _ticks(low: float, high: float) -> list[float]:
    """Two to seven round numbers, the first at or below ``low`` and the last at or above ``high``."""
    step = 10.0 ** math.floor(math.log10((high - low) / 4)) if high > low else 1.0
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= 5)
    return [n * step for n in range(math.floor(low / step), math.ceil(high / step) + 1)]


def thinned(points: _Points) -> _Points:
    """All points of a short curve; of a long one the lowest and the highest of each stretch, so that peaks stay."""
    if len(points) <= 2 * _MAX_STRETCHES:
        return points
    size = math.ceil(len(points) / _MAX_STRETCHES)
    stretches = [points[start : start + size] for start in range(0, len(points), size)]
    return [
        point for part in stretches for point in sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})
    ]


def _number(value: float) -> str:
    """Four digits, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
