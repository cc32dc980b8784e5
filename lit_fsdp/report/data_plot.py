"""Lengths, supervised shares and packs as one picture."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lit_fsdp.data.samples import Samples
from lit_fsdp.data.window_report import WindowSeen
from lit_fsdp.errors import ConfigError

KINDS = (".png", ".svg", ".pdf")
_NUM_BINS = 40


@dataclass(frozen=True)
class Plotted:
    """What is drawn of one split."""

    lengths: np.ndarray
    """Tokens per sample, int64 (N,)."""
    supervised: np.ndarray
    """Supervised tokens per sample, int64 (N,)."""
    fills: np.ndarray | None
    """Share of each pack that is filled, (packs,); ``None`` without packing."""


def plotted(samples: Samples | WindowSeen) -> Plotted:
    """The numbers of one split that are drawn; of a stream those of its first rows."""
    if isinstance(samples, WindowSeen):
        return Plotted(samples.lengths, samples.learnt, samples.fills)
    ids = np.asarray(samples.row_ids)
    lengths = np.diff(np.asarray(samples.rows.offsets))[ids]
    fills = None if samples.capacity is None else samples.item_tokens() / samples.capacity
    return Plotted(lengths, np.asarray(samples.rows.learnt)[ids].astype(np.int64), fills)


def check_plot(path: Path) -> None:
    """Refuse a picture that could not be written, before any work is done for it.

    Raises:
        ConfigError: The folder does not exist, the ending is none of :data:`KINDS`, or matplotlib is missing.
    """
    if path.suffix.lower() not in KINDS:
        raise ConfigError("--plot", str(path), f"a file that ends in {', '.join(KINDS)}", "write --plot data.png")
    if not path.parent.is_dir():
        raise ConfigError("--plot", str(path), "a file in a folder that exists", f"mkdir -p {path.parent}")
    if path.is_dir():
        raise ConfigError("--plot", f"{path}, which is a folder", "a file", f"write --plot {path / 'data.png'}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "--plot", str(path), "matplotlib, which draws it, installed", "pip install 'lit-fsdp[plot]', or drop --plot"
        )


def write_plot(splits: Mapping[str, Plotted], max_seq_length: int, path: Path) -> None:
    """Draw every split into one file: a histogram of lengths, of supervised shares, and of how full the packs are.

    Raises:
        ConfigError: The file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")  # there may be no display
    from matplotlib import pyplot

    packed = any(split.fills is not None for split in splits.values())
    figure, axes = pyplot.subplots(1, 3 if packed else 2, figsize=(12 if packed else 8.4, 3.6), squeeze=False)
    longest = max((int(split.lengths.max()) for split in splits.values() if len(split.lengths)), default=1)
    for name, split in splits.items():
        share = split.supervised / np.maximum(split.lengths, 1)
        edges = np.linspace(0, longest + 1, min(_NUM_BINS, longest + 1) + 1)
        axes[0][0].hist(split.lengths, edges, histtype="step", label=f"{name} ({len(split.lengths):,})")
        axes[0][1].hist(100 * share, np.linspace(0, 100, 21), histtype="step", label=name)
        if split.fills is not None:
            axes[0][2].hist(100 * split.fills, np.linspace(0, 100, 51), histtype="step", label=name)
    axes[0][0].axvline(max_seq_length, color="grey", linestyle=":", label="max_seq_length")
    labels = ("tokens per sample", "supervised tokens, % of a sample", "how full a pack is, %")
    for axis, label in zip(axes[0], labels, strict=False):
        axis.set_xlabel(label)
        axis.set_yscale("symlog", linthresh=10)  # a few long samples are seen beside many short ones
        axis.legend(fontsize=8)
    axes[0][0].set_ylabel("samples (packs on the right)" if packed else "samples")
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ConfigError(
            "--plot", f"{path} ({error.strerror})", "a place that can be written", "name another"
        ) from None
    finally:
        pyplot.close(figure)
