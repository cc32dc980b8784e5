"""What the pictures have in common: size, colors, and SVG whose text is text."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # there may be no display
matplotlib.rcParams.update(
    {"svg.fonttype": "none", "svg.hashsalt": "lit_fsdp", "font.size": 9, "axes.spines.top": False}
)
matplotlib.rcParams.update({"axes.spines.right": False, "font.family": "sans-serif", "legend.frameon": False})
from matplotlib import pyplot  # noqa: E402

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]
BLUE, ORANGE, GREEN, RED, VIOLET, GREY = "#3b6fb6", "#e08a2c", "#3f9a5f", "#c8463c", "#8465b0", "#9a9a9a"


def figure(width: float = 7.0, height: float = 3.2, **options: Any) -> Any:
    """A figure with axes, in inches, on white, so that it can be read on dark pages."""
    return pyplot.subplots(figsize=(width, height), **options)


def save(drawn: Any, name: str) -> None:
    """Write ``docs/pictures/NAME.svg``."""
    drawn.tight_layout()
    drawn.savefig(HERE / f"{name}.svg", metadata={"Date": None, "Creator": None}, facecolor="white")
    pyplot.close(drawn)
    print(f"{name}.svg: {(HERE / f'{name}.svg').stat().st_size:,} bytes")
