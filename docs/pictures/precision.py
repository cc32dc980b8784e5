"""Losses of three precision modes, from the table of recipes/README.md; python docs/pictures/precision.py.

`make precision-study` measures the table's rows.
"""

from __future__ import annotations

from drawing import BLUE, GREEN, RED, ROOT, figure, save

COLORS = {"fp32": GREEN, "mixed": BLUE, "low_precision": RED}


def main() -> None:
    """Held-out loss and share of lost updates by learning rate."""
    text = (ROOT / "recipes/README.md").read_text(encoding="utf-8").partition("| learning rate | precision |")[2]
    rows = [
        [cell.strip(" `%") for cell in line.strip("|").split("|")] for line in text.partition("\n\n")[0].splitlines()
    ]
    rows = [row for row in rows[2:] if row[0]]
    drawn, (left, right) = figure(7.4, 2.9, ncols=2)
    for mode, color in COLORS.items():
        mine = [row for row in rows if row[1] == mode]
        rates = [row[0].replace("e-0", "e-") for row in mine]
        left.plot(rates, [float(row[4]) for row in mine], "o-", color=color, label=mode)
        right.plot(rates, [float(row[8]) for row in mine], "o-", color=color, label=mode)
    left.set(xlabel="learning rate", ylabel="held-out loss after 16 steps", ylim=(0, None))
    right.set(xlabel="learning rate", ylabel="% unchanged in step 16", ylim=(-3, 103))
    left.legend()
    save(drawn, "precision")


if __name__ == "__main__":
    main()
