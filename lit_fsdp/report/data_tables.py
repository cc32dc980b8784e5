"""What is about to be trained on, for the terminal and the run's page, and as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from lit_fsdp.data.packing import Samples
from lit_fsdp.report.samples import visible


def data_table(record: Mapping[str, Any]) -> Table:
    """What :func:`lit_fsdp.data.stats.describe_data` returned, one column per split."""
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
            table.add_row(label, *(Text(visible(column[label]) or "-") for column in columns))
    return table


def _cells(split: Mapping[str, Any]) -> dict[str, str]:
    """Label and text of every line of a split's column; no text where there is nothing to say."""
    packs, dropped = split["packs"], "\n".join(f"{count:,} {reason}" for reason, count in split["dropped"].items())
    sources = []
    for source in split["sources"]:
        rows = f"{source['rows']:,} " if "rows" in source else ""  # not known of a stream
        sources.append(f"{source['name']}: {rows}{source['format']}")
    return {
        "from": split["from"],
        "samples of each source": "\n".join(sources),
        "rows read": f"{split['rows_read']:,}",
        "dropped": dropped or "0",
        "truncated": f"{split['truncated']:,}",
        "samples": f"{split['samples']:,}",
        "packs": f"{packs['count']:,}, {packs['fill']:.1%} full" if packs else "",
        "tokens min / median / p95 / max": " / ".join(f"{value:,.0f}" for value in split["lengths"].values()),
        "supervised": f"{split['supervised_share']:.1%} of {split['tokens']:,} tokens",
    }


def write_plot(splits: Mapping[str, Samples], max_seq_length: int, path: Path) -> None:
    """Draw every split into one file: histograms of lengths, of supervised shares, and of how full the packs are."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    axes = figure.subplots(1, 3)
    longest = max(int(split.lengths.max()) for split in splits.values())
    for name, split in splits.items():
        label, shares = f"{name} ({len(split.lengths):,})", 100 * split.num_supervised / split.lengths
        axes[0].hist(split.lengths, np.linspace(0, longest + 1, 41), histtype="step", label=label)
        axes[1].hist(shares, np.linspace(0, 100, 21), histtype="step", label=label)
        axes[2].hist(100 * split.fills, np.linspace(0, 100, 51), histtype="step", label=label)
    axes[0].axvline(max_seq_length, color="grey", linestyle=":", label="max_seq_length")
    labels = ("tokens per sample", "supervised tokens, % of a sample", "how full a pack is, %")
    for axis, label in zip(axes, labels, strict=True):
        axis.set_xlabel(label)
        axis.set_yscale("symlog", linthresh=10)  # a few long samples are seen beside many short ones
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=120)
