"""The doctor's report for people: one row per check, what is bad in red, the fix below it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TextIO

from lit_fsdp.launch.bandwidth_report import FORMULA, Rate
from lit_fsdp.launch.checks.row import Row
from lit_fsdp.launch.doctor import Report

_NAME_WIDTH = 28
_STYLES = {"good": "green", "warning": "yellow", "bad": "bold red"}


def as_json(report: Report) -> dict[str, Any]:
    """The report as plain values."""
    return {
        "exit_code": report.exit_code,
        "rows": [vars(row) for row in report.rows],
        "rates": [
            {
                "op": rate.op,
                "bytes": rate.num_bytes,
                "ms": rate.ms,
                "ranks": rate.world,
                "algorithm_gb_per_second": rate.algorithm,
                "bus_gb_per_second": rate.bus,
            }
            for rate in report.rates
        ],
        "ranks": report.ranks,
    }


def print_report(report: Report, file: TextIO) -> None:
    """Tables on ``file``; lines of plain text where rich is missing, which is one of the things that may be bad."""
    try:
        from rich.console import Console
    except ImportError:
        file.write(plain_text(report))
        return
    console = Console(file=file)
    if not console.is_terminal:
        console = Console(file=file, width=120)
    console.print(_rows_table(report.rows))
    if report.rates:
        console.print(_rates_table(report.rates))
        console.print(FORMULA, highlight=False)
    console.print(verdict(report), highlight=False, style=_STYLES["bad" if report.exit_code else "good"])


def plain_text(report: Report) -> str:
    """The same without colours and frames."""
    lines = []
    for row in report.rows:
        lines.append(f"{row.grade:<8}{row.name}: {row.found}")
        if row.fix:
            lines.append(f"        fix: {row.fix}")
    for rate in report.rates:
        lines.append(f"{rate.op}  {rate.num_bytes} bytes  {rate.ms:.3f} ms  {rate.bus:.3f} GB/s bus")
    return "\n".join([*lines, verdict(report)]) + "\n"


def verdict(report: Report) -> str:
    """How many rows are of which kind."""
    counts = {grade: sum(row.grade == grade for row in report.rows) for grade in _STYLES}
    return f"{counts['good']} good, {counts['warning']} warning(s), {counts['bad']} bad"


def _rows_table(rows: Sequence[Row]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table()
    table.add_column("check", max_width=_NAME_WIDTH, overflow="fold")
    table.add_column("found", overflow="fold")
    table.add_column("")
    for row in rows:
        style = _STYLES[row.grade]
        found = Text(row.found, style=style if row.grade == "bad" else "")
        if row.fix and row.grade != "good":
            found.append(f"\nfix: {row.fix}", style="default")
        table.add_row(Text(row.name, style=style if row.grade == "bad" else ""), found, Text(row.grade, style=style))
    return table


def _rates_table(rates: Sequence[Rate]) -> Any:
    from rich.table import Table

    table = Table("collective", title=f"{rates[0].world} ranks", title_justify="left")
    for column in ("bytes", "ms", "algorithm GB/s", "bus GB/s"):
        table.add_column(column, justify="right")
    for rate in rates:
        table.add_row(rate.op, f"{rate.num_bytes:,}", f"{rate.ms:.3f}", f"{rate.algorithm:.3f}", f"{rate.bus:.3f}")
    return table
