"""Lengths, supervised shares and packs as one picture."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from lit_fsdp.data.stats import SampleNumbers
from lit_fsdp.errors import require

_NUM_BINS = 40


def check_plot(path: Path) -> None:
    """Refuse a picture that could not be written, before any work is done for it.

    Raises:
        ConfigError: The folder does not exist, or matplotlib is missing.
    """
    require(path.parent.is_dir(), "--plot", path, "a file in a folder that exists", f"mkdir -p {path.parent}")
    installed = importlib.util.find_spec("matplotlib") is not None
    fix = "pip install 'lit-fsdp[plot]', or drop --plot"
    require(installed, "--plot", path, "matplotlib, which draws it, installed", fix)


def write_plot(splits: Mapping[str, SampleNumbers], max_seq_length: int, path: Path) -> None:
    """Draw every split into one file: a histogram of lengths, of supervised shares, and of how full the packs are."""
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
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
