"""Every recipe is tried out as its README says: the smoke fragment, two processes, four steps."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.dist.workers import Workers

ROOT = Path(__file__).resolve().parents[2]
# Those that others try out already come last, so that the ones kept by default are new ground.
RECIPES = sorted((ROOT / "recipes").glob("*_*.yaml"), key=lambda path: ("hybrid" not in path.stem, path.stem))
# Those of one model with adapters differ in ranks and batch sizes, which the fragment sets: one of them is tried.
ADAPTED = {path.stem.split("_")[0]: path for path in reversed(RECIPES) if "_lora_" in path.stem}
RECIPES = [path for path in RECIPES if "_lora_" not in path.stem] + sorted(ADAPTED.values())


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_runs_in_miniature(recipe: Path, workers: Workers, tmp_path: Path) -> None:
    files = ["--config", str(recipe), "--config", str(ROOT / "configs/debug/smoke.yaml")]
    words = ["fit", *files, "--trainer.default_root_dir", "run"]
    done = workers.run("command", 2, words=words, cwd=str(tmp_path))
    assert [rank["code"] for rank in done] == [0, 0], done[0]["err"]
    with (tmp_path / "run" / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["0", "1", "2", "3"]
    assert all(0 < float(row["train_loss"]) < 10 for row in rows)
    steps = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert steps == ["step-00000002", "step-00000004"]
