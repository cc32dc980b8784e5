"""The top of a page that compares two runs of the smoke fragment; python docs/pictures/report.py, with chromium.

The runs take half a minute each on two cores, and are left in ``runs/picture``.
"""

from __future__ import annotations

import subprocess
import sys

from drawing import HERE, ROOT
from PIL import Image

FOLDER = ROOT / "runs" / "picture"
LIT_FSDP = (sys.executable, "-m", "lit_fsdp")
RECIPE = ("--config", "recipes/llama3.1-8b_full_fsdp2_8x80gb.yaml", "--config", "configs/debug/smoke.yaml")
STEPS = ("--trainer.max_steps", "80", "--trainer.max_epochs", "9", "--trainer.val_check_interval", "40")


def main() -> None:
    """Train with two learning rates, write the page and take its picture."""
    for rate in ("1e-2", "2e-2"):
        words = ("--model.optim.lr", rate, "--trainer.check_val_every_n_epoch", "null")
        run = ("--trainer.default_root_dir", f"{FOLDER.relative_to(ROOT)}/lr-{rate}")
        subprocess.run([*LIT_FSDP, "fit", *RECIPE, *STEPS, *words, *run], cwd=ROOT, check=True)
    words = [*LIT_FSDP, "report", "lr-1e-2", "lr-2e-2"]
    page = FOLDER / subprocess.run(words, cwd=FOLDER, check=True, capture_output=True, text=True).stdout.strip()
    options = ["--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1100,1010"]
    target = HERE / "report.png"
    subprocess.run(["chromium", *options, f"--screenshot={target}", page.as_uri()], check=True, capture_output=True)
    Image.open(target).quantize(48).save(target, optimize=True)
    print(f"{target.name}: {target.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
