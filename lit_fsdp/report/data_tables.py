"""Tables of what is about to be trained on, for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from rich.table import Table
from rich.text import Text

from lit_fsdp.report.samples import visible, visible_lines
from lit_fsdp.report.tables import wide_console

_LEVELS = " ▁▂▃▄▅▆▇█"
_Split = Mapping[str, Any]


def print_data(record: Mapping[str, Any], file: TextIO) -> None:
    """The supervision proof: one column per split, the sources where there are several, and what to look at."""
    console = wide_console(file)
    console.print(splits_table(record))
    for name, split in record["splits"].items():
        if len(split.get("sources", ())) > 1:
            console.print(sources_table(name, split))
    for name, split in record["splits"].items():
        if "cache" in split:
            console.print(
                Text(f"data.{name}: {split['fingerprint'][:12]}, tokens in {visible(split['cache'])}"), soft_wrap=True
            )
    for line in record["warnings"]:
        console.print(Text(f"warning: {visible(line)}", style="yellow"), soft_wrap=True)


def splits_table(record: Mapping[str, Any]) -> Table:
    """Rows, tokens, supervision and lengths of every split."""
    table = Table(title=_title(record), title_justify="left")
    table.add_column("", no_wrap=True)
    for name in record["splits"]:
        table.add_column(name, justify="right", overflow="fold")
    for label, cell in _LINES.items():
        cells = [cell(split) for split in record["splits"].values()]
        if any(cells):
            table.add_row(label, *(Text(visible_lines(text) or "-") for text in cells))
    return table


def sources_table(name: str, split: _Split) -> Table:
    """The sources of one split beside each other."""
    columns = ("source", "format", "weight", "rows", "dropped", "duplicates", "samples", "tokens", "supervised")
    table = Table(title=f"sources of data.{name}", title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in ("source", "format") else "right", overflow="fold")
    for source in split["sources"]:
        table.add_row(
            Text(visible(source["name"])),
            source["format"] or "-",
            "-" if source["weight"] is None else f"{source['weight']:g}",
            f"{source['rows_read']:,}",
            f"{sum(source['dropped'].values()):,}",
            f"{source['duplicates']:,}",
            f"{source['samples']:,}",
            f"{source['tokens']:,}",
            f"{source['supervised_share']:.1%}",
        )
    return table


def histogram_bars(counts: Sequence[int]) -> str:
    """One block per bin, as high as its share of the largest; what is not empty is visible."""
    largest = max(counts, default=0) or 1
    return "".join(_LEVELS[-(-count * (len(_LEVELS) - 1) // largest)] for count in counts)


def _title(record: Mapping[str, Any]) -> str:
    template = record["template"]
    marks = {True: " with generation marks", False: " without generation marks", None: ""}[template["generation_marks"]]
    packing = "packed" if record["packing"] else f"padded, {record['micro_batch_size']} to a micro-batch"
    return (
        f"Data: {template['name']} chat template{marks}, loss on {record['loss_on']}, "
        f"samples of at most {record['max_seq_length']:,} tokens, {packing}"
    )


def _reasons(split: _Split) -> str:
    if split["rows_read"] is None:
        return ""
    return "\n".join(f"{count:,} {reason}" for reason, count in split["dropped"].items()) or "0"


def _lengths(split: _Split) -> str:
    values = split["lengths"]
    return " / ".join(f"{values[key]:,.0f}" for key in ("min", "median", "mean", "p95", "max"))


def _packs(split: _Split) -> str:
    packs = split["packs"]
    return f"{packs['count']:,}, {packs['fill']:.1%} full" if packs else ""


def _histogram(split: _Split) -> str:
    return f"|{histogram_bars(split['supervised_share_histogram'][1:])}|"


def _count(key: str) -> Callable[[_Split], str]:
    return lambda split: "" if split.get(key) is None else f"{split[key]:,}"


_LINES: dict[str, Callable[[_Split], str]] = {
    "seen": lambda split: str(split.get("seen", "")),
    "taken out of": lambda split: str(split.get("taken_out_of", "")),
    "rows read": _count("rows_read"),
    "format": lambda split: str(split["format"]),
    "dropped": _reasons,
    "truncated": _count("truncated"),
    "split in pieces": lambda split: f"{split['split']:,}" if split["split"] else "",
    "duplicates": _count("duplicates"),
    "also in train": lambda split: f"{split['in_train']:,}" if split.get("in_train") else "",
    "samples": _count("samples"),
    "packs": _packs,
    "tokens min / median / mean / p95 / max": _lengths,
    "supervised": lambda split: f"{split['supervised_share']:.1%} of {split['tokens']:,} tokens",
    "supervised share of rows, 0 to 100 %": _histogram,
    "tokens per epoch": _count("tokens_per_epoch"),
    "supervised tokens per epoch": _count("supervised_tokens_per_epoch"),
}
