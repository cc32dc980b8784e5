"""The losses of the quickstart, from its log; python docs/pictures/quickstart_loss.py.

After ``make quickstart 2>&1 | tee runs/quickstart.log``; without a terminal, steps that end 10 s after a line have one.
"""

from __future__ import annotations

import re

from drawing import BLUE, ORANGE, ROOT, figure, save


def main() -> None:
    """Training loss of the steps that are in the log, and the validation loss at the end."""
    text = (ROOT / "runs/quickstart.log").read_text(encoding="utf-8")
    drawn, axes = figure(6.4, 2.6)
    for pattern, style, color, label in (
        (r"^step (\d+)/\d+  loss (\S+)", "o-", BLUE, "training loss of the step"),
        (r"^step (\d+): val_loss (\S+)", "D", ORANGE, "validation loss at the end"),
    ):
        found = [(int(step), float(loss)) for step, loss in re.findall(pattern, text, re.MULTILINE)]
        axes.plot(*zip(*found, strict=True), style, color=color, label=label)
    axes.set(xlabel="optimizer step", ylabel="loss per supervised token", ylim=(0, None))
    axes.legend()
    save(drawn, "quickstart-loss")


if __name__ == "__main__":
    main()
