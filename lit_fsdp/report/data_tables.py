"""What is about to be trained on, for the terminal and the run's page, and as a picture."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from rich.table import Table
from rich.text import Text

from lit_fsdp.data.stats import SplitNumbers
from lit_fsdp.errors import require
from lit_fsdp.report.samples import visible, visible_lines
from lit_fsdp.report.tables import wide_console

_NUM_BINS = 40


def print_data(record: Mapping[str, Any], file: TextIO) -> None:
    """Print what :func:`lit_fsdp.data.stats.describe_data` returned: tables, where tokens lie, and what to look at."""
    console = wide_console(file)
    for table in data_tables(record):
        console.print(table)
    for name, split in record["splits"].items():
        if "cache" in split:
            said = f"data.{name}: {split['fingerprint'][:12]}, tokens in {visible(split['cache'])}"
            console.print(Text(said), soft_wrap=True)
    for line in record["warnings"]:
        console.print(Text(f"warning: {visible(line)}", style="yellow"), soft_wrap=True)


def data_tables(record: Mapping[str, Any]) -> list[Table]:
    """One column per split, and a table of its sources where a split has several."""
    packing = "packed" if record["packing"] else f"padded, {record['micro_batch_size']} to a micro-batch"
    title = (
        f"Data: {record['template']} chat template, loss on {record['loss_on']}, "
        f"samples of at most {record['max_seq_length']:,} tokens, {packing}"
    )
    table = Table("", title=title, title_justify="left")
    for name in record["splits"]:
        table.add_column(name, justify="right", overflow="fold")
    columns = [_cells(split) for split in record["splits"].values()]
    for label in columns[0] if columns else ():
        if any(column[label] for column in columns):
            table.add_row(label, *(Text(visible_lines(column[label]) or "-") for column in columns))
    many = {name: split["sources"] for name, split in record["splits"].items() if len(split.get("sources", ())) > 1}
    return [table, *(_sources_table(name, sources) for name, sources in many.items())]


def _cells(split: Mapping[str, Any]) -> dict[str, str]:
    """Label and text of every line of a split's column; no text where there is nothing to say."""
    lengths, packs = split["lengths"], split["packs"]
    dropped = "\n".join(f"{count:,} {reason}" for reason, count in split.get("dropped", {}).items())
    return {
        "seen": split.get("seen", ""),
        "rows read": _count(split.get("rows_read")),
        "format": split["format"],
        "dropped": dropped or ("0" if "dropped" in split else ""),
        "truncated": _count(split.get("truncated")),
        "duplicates": _count(split["duplicates"]),
        "also in train": _count(split.get("in_train")),
        "samples": _count(split["samples"]),
        "packs": f"{packs['count']:,}, {packs['fill']:.1%} full" if packs else "",
        "tokens min / median / mean / p95 / max": " / ".join(f"{value:,.0f}" for value in lengths.values()),
        "supervised": f"{split['supervised_share']:.1%} of {split['tokens']:,} tokens",
    }


def _count(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _sources_table(name: str, sources: list[dict[str, Any]]) -> Table:
    columns = ("format", "weight", "rows", "dropped", "samples", "tokens", "supervised")
    table = Table("source", title=f"sources of data.{name}", title_justify="left")
    for column in columns:
        table.add_column(column, justify="right", overflow="fold")
    for source in sources:
        table.add_row(
            Text(visible(source["name"])),
            source["format"],
            "-" if source["weight"] is None else f"{source['weight']:g}",
            _count(source["rows_read"]),
            _count(sum(source["dropped"].values())),
            _count(source["samples"]),
            _count(source["tokens"]),
            f"{source['supervised_share']:.1%}",
        )
    return table


def check_plot(path: Path) -> None:
    """Refuse a picture that could not be written, before any work is done for it.

    Raises:
        ConfigError: The folder does not exist, or matplotlib is missing.
    """
    require(path.parent.is_dir(), "--plot", path, "a file in a folder that exists", f"mkdir -p {path.parent}")
    installed = importlib.util.find_spec("matplotlib") is not None
    fix = "pip install 'lit-fsdp[plot]', or drop --plot"
    require(installed, "--plot", path, "matplotlib, which draws it, installed", fix)


def write_plot(splits: Mapping[str, SplitNumbers], max_seq_length: int, path: Path) -> None:
    """Draw every split into one file: histograms of lengths, of supervised shares, and of how full the packs are."""
    import matplotlib

    matplotlib.use("Agg")  # there may be no display
    from matplotlib import pyplot

    packed = any(split.fills is not None for split in splits.values())
    figure, axes = pyplot.subplots(1, 3 if packed else 2, figsize=(12 if packed else 8.4, 3.6))
    longest = max((int(split.lengths.max()) for split in splits.values()), default=1)
    for name, split in splits.items():
        edges = np.linspace(0, longest + 1, min(_NUM_BINS, longest + 1) + 1)
        axes[0].hist(split.lengths, edges, histtype="step", label=f"{name} ({len(split.lengths):,})")
        axes[1].hist(100 * split.supervised / split.lengths, np.linspace(0, 100, 21), histtype="step", label=name)
        if split.fills is not None:
            axes[2].hist(100 * split.fills, np.linspace(0, 100, 51), histtype="step", label=name)
    axes[0].axvline(max_seq_length, color="grey", linestyle=":", label="max_seq_length")
    labels = ("tokens per sample", "supervised tokens, % of a sample", "how full a pack is, %")
    for axis, label in zip(axes, labels, strict=False):
        axis.set_xlabel(label)
        axis.set_yscale("symlog", linthresh=10)  # a few long samples are seen beside many short ones
        axis.legend(fontsize=8)
    axes[0].set_ylabel("samples (packs on the right)" if packed else "samples")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
