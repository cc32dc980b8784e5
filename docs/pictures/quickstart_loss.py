"""The training loss of the quickstart, every step of it; python docs/pictures/quickstart_loss.py (four minutes).

Needs what ``make quickstart`` installs, and writes its run to runs/quickstart-loss.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys

from drawing import BLUE, ORANGE, ROOT, figure, save

RUN = ROOT / "runs/quickstart-loss"


def main() -> None:
    """Train unless that was done, and draw."""
    import quickstart

    os.chdir(ROOT)
    if not (RUN / "checkpoints/step-00000030").is_dir():
        quickstart.prepare_model()
        quickstart.prepare_rows()
        words = ["--config", "recipes/quickstart.yaml", "--trainer.log_every_n_steps", "1"]
        words += ["--trainer.default_root_dir", str(RUN)]
        subprocess.run([sys.executable, "-m", "lit_fsdp", "fit", *words], check=True)
    with (RUN / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    train = [(int(row["step"]) + 1, float(row["train_loss"])) for row in rows if row["train_loss"]]
    val = [(int(row["step"]) + 1, float(row["val_loss"])) for row in rows if row.get("val_loss")]
    drawn, axes = figure(6.4, 2.8)
    axes.plot(*zip(*train, strict=True), color=BLUE, label="training loss of each step")
    axes.plot(*zip(*val, strict=True), "o", color=ORANGE, label="validation loss at the end")
    axes.set(xlabel="optimizer step", ylabel="loss per supervised token", ylim=(0, None))
    axes.legend()
    save(drawn, "quickstart-loss")


if __name__ == "__main__":
    main()
