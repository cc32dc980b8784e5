"""Human-readable data reports: tables, a plot, and samples with highlighted supervised tokens.

Rows are untrusted, and raw control characters can move the cursor, change colors or hide text. Therefore they are
shown by code point: an escape becomes ``⟨U+001B⟩``.
"""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lit_fsdp.data.batches import Sample
from lit_fsdp.data.packing import Samples

_OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_HEAD, _SUPERVISED, _SPECIAL = "bold cyan", "bold green", "reverse"


def visible(text: str) -> str:
    """Escape all control characters in ``text`` except line breaks and tabs."""
    return _OBEYED.sub(lambda found: f"⟨U+{ord(found[0]):04X}⟩", text)


Piece = tuple[str, bool, bool]
"""Unescaped text, whether it is supervised, and whether it is a special token."""


def pieces(tokenizer: Any, ids: np.ndarray, supervised: np.ndarray) -> list[Piece]:
    """Decode a sample, split where supervision changes and around special tokens.

    Each piece is decoded together with the previous token, because some tokenizers drop a leading space.
    """
    special = np.isin(ids, [number for number, token in tokenizer.added_tokens_decoder.items() if token.special])
    new = (supervised[1:] != supervised[:-1]) | special[1:] | special[:-1]
    starts, whole = [0, *(np.flatnonzero(new) + 1).tolist()], ids.tolist()
    runs = zip(starts, [*starts[1:], len(whole)], strict=True)
    return [(_decoded(tokenizer, whole, a, b), bool(supervised[a]), bool(special[a])) for a, b in runs]


def _decoded(tokenizer: Any, ids: list[int], start: int, end: int) -> str:
    def decode(part: list[int]) -> str:
        return str(tokenizer.decode(part, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    before, both = decode(ids[max(0, start - 1) : start]), decode(ids[max(0, start - 1) : end])
    return both[len(before) :] if both.startswith(before) else decode(ids[start:end])


def print_samples(console: Console, tokenizer: Any, name: str, samples: Sequence[Sample]) -> None:
    """Print samples as text, with supervised tokens in color and between ``⟦`` and ``⟧``."""
    say = partial(console.print, soft_wrap=True, highlight=False)
    say(Text("supervised tokens are between ⟦ and ⟧; control characters are escaped, such as ⟨U+001B⟩"))
    for number, (ids, supervised) in enumerate(samples):
        title = f"\n━━ {name} {number}: {len(ids):,} tokens, {np.count_nonzero(supervised):,} supervised"
        say(Text(title, _HEAD))
        text, inside = Text(), False
        for piece, is_supervised, is_special in [*pieces(tokenizer, ids, supervised), ("", False, False)]:
            if is_supervised != inside:
                text.append("⟦" if is_supervised else "⟧")
            inside = is_supervised
            text.append(visible(piece), " ".join([_SUPERVISED] * is_supervised + [_SPECIAL] * is_special))
        say(text)


def data_table(record: Mapping[str, Any]) -> Table:
    """Format the result of :func:`lit_fsdp.data.packing.describe_data`, one column per split."""
    packing = "packed" if record["packing"] else f"padded, {record['micro_batch_size']} to a micro-batch"
    splits = list(record["splits"].values())
    counted = [split for split in splits if split["rows_read"] is not None]  # not for rows that train holds out
    is_plain = bool(counted) and all(split.get("plain_text") == split["rows_read"] for split in counted)
    formats = {source["format"] for split in splits for source in split["sources"]}
    is_rendered = not is_plain and not formats <= {"text", "tokens"}
    template, loss_on = record["template"] if is_rendered else "no", record["loss_on"]
    if is_plain and loss_on != "every token":
        loss_on = "completions"
    elif not is_rendered and formats:
        loss_on = "every token" if formats == {"text"} else "the tokens that the rows supervise"
    title = (
        f"Data: {template} chat template, loss on {loss_on}, "
        f"samples of at most {record['max_seq_length']:,} tokens, {packing}"
    )
    table = Table("", title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for name in record["splits"]:
        table.add_column(name, justify="right", overflow="fold")
    for label in splits[0] if splits else ():
        cells = [visible(_cell(split[label])) for split in splits]
        if any(cells):
            unit = " (two per pair)" if label == "samples" and "preference" in formats else ""
            table.add_row(label.replace("_", " ") + unit, *(Text(cell or "-") for cell in cells))
    if record["template"] != "no" and any(split.get("plain_text") for split in splits):
        table.caption_justify = "left"
        table.caption = "prompts and completions in plain text get no chat template; to get it, write them as messages"
        if "preference" not in formats:
            table.caption += ", or map their columns to instruction and output (data.columns)"
        table.caption += "; without it, ask the model with lit-fsdp generate --raw"
    return table


def _cell(value: Any) -> str:
    """Format lists and mappings line by line, and shares in percent; empty for missing values."""
    if isinstance(value, Mapping):
        return "\n".join(f"{name}: {_cell(part)}" for name, part in value.items())
    if isinstance(value, list):
        return "\n".join(", ".join(map(_cell, source.values())) for source in value)
    return f"{value:.1%}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value or ""


def write_plot(splits: Mapping[str, Samples], max_seq_length: int, path: Path) -> None:
    """Plot histograms of all splits to one file: lengths, supervised shares, and fill of packs."""
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
        axis.set_yscale("symlog", linthresh=10)  # keeps a few long samples visible
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=120)
