"""Terminal tables of FSDP units, of memory per rank, and of dtypes."""

import os
from itertools import groupby
from typing import Any, TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from lit_fsdp.host import GIB

_MOST_KEPT = 36  # characters of a unit's name that a narrow terminal does not break
_NUMBERS = ("parameters", "GiB", "share", "weights", "scales", "gradients", "optimizer", "all")


def console_for(file: TextIO) -> Console:
    """Return a console for tables; in a file, such as the log of a job, they have up to 120 columns, or COLUMNS."""
    is_open = not file.isatty() and "COLUMNS" not in os.environ
    return Console(file=file, width=120 if is_open else None)


def units_table(record: dict[str, Any]) -> Table:
    """Format the FSDP units of an audit; equal neighbors share a row, tied weights are named below their unit."""
    recomputes = any(unit["recompute"] != "no" for unit in record["units"])
    columns = ("unit", "class", "parameters", "GiB", "share", *["recompute"] * recomputes)
    table = _table(f"FSDP units by {record['wrapped_by']}", columns)
    for _, alike in groupby(record["units"], key=lambda unit: unit | {"name": ""}):
        first, *others = alike
        count, name = 1 + len(others), first["name"]
        if others:
            stem, _, last = others[-1]["name"].rpartition(".")
            name += f" … {last if name.startswith(f'{stem}.') else others[-1]['name']}"
        table.add_row(
            "\n".join([name, *(f"tied: {tied}" for tied in first["tied"])]),
            f"{count} × {first['class']}" if others else first["class"],
            f"{first['num_params']:,}",
            f"{first['num_bytes'] / GIB:.3f}",
            f"{first['share'] * count:.1%}",
            *[first["recompute"]] * recomputes,
        )
    longest = max((len(line) for cell in table.columns[0].cells for line in str(cell).split("\n")), default=0)
    table.columns[0].min_width = min(longest, _MOST_KEPT)
    return table


def parameter_counts(record: dict[str, Any]) -> str:
    """Format the number of parameters of an audit, with the trained and frozen numbers if some are frozen."""
    total, trained = record["num_params"], record["num_trainable"]
    text = f"{total:,} parameters"
    return text if trained == total else f"{text} ({trained:,} trained, {total - trained:,} frozen)"


def ranks_table(ranks: list[dict[str, int]]) -> Table:
    """Format the memory between steps of each rank of one model copy, in GiB; equal neighbors share a row."""
    kinds = {"weights": "parameter", "scales": "quantization", "gradients": "gradient", "optimizer": "optimizer"}
    kinds = {word: f"{kind}_bytes" for word, kind in kinds.items() if f"{kind}_bytes" in ranks[0]}
    table = _table("kept on each rank between steps, in GiB", ("rank of a copy", "parameters", *kinds, "all"))
    for found, alike in groupby(range(len(ranks)), key=ranks.__getitem__):
        first, *others = alike
        sizes = [found[kind] / GIB for kind in kinds.values()]
        table.add_row(
            f"{first} … {others[-1]}" if others else str(first),
            f"{found['num_params']:,}",
            *(f"{size:.3f}" for size in (*sizes, sum(sizes))),
        )
    return table


def dtypes_table(report: dict[str, Any]) -> Table:
    """Format the dtypes read back from a live run."""
    table = _table(None, ("tensors", "dtypes"))
    for what, found in report["realized"].items():
        table.add_row(what, ", ".join(f"{count} × {dtype}" for dtype, count in found.items()))
    return table


def _table(title: str | None, columns: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for column in columns:
        # on a narrow terminal names are wrapped, because truncated names would be ambiguous
        table.add_column(column, justify="right" if column in _NUMBERS else "left", overflow="fold")
    return table
