"""Every recipe is tried out as its README says: the smoke fragment, two processes, four steps."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.dist.forks import ROOT, SMOKE, command
from tests.runs import records

LONG = pytest.mark.long("one of each family of models and of each method is tried in `make test`")
RECIPES = sorted((ROOT / "recipes").glob("*_*.yaml"), key=lambda path: ("hybrid" not in path.stem, path.stem))
# Those of one model with adapters differ in ranks and batch sizes, which the fragment sets: one of them is tried.
ADAPTED = {path.stem.split("_")[0]: path for path in reversed(RECIPES) if "_lora_" in path.stem}
RECIPES = [path for path in RECIPES if "_lora_" not in path.stem] + sorted(ADAPTED.values())
KINDS = [{re.split(r"[\d.-]", path.stem)[0], path.stem.split("_")[1]} for path in RECIPES]


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(path, id=path.stem, marks=[LONG] * (kinds <= set().union(*KINDS[:number])))
        for number, (path, kinds) in enumerate(zip(RECIPES, KINDS, strict=True))
    ],
)
def test_a_recipe_runs_in_miniature(recipe: Path, tmp_path: Path) -> None:
    files = ["--config", recipe, "--config", ROOT / "configs/debug/smoke.yaml"]
    # both ranks share rows, so that a step has twice as many micro-batches
    often = ["--trainer.val_check_interval=8"] if "-long_" in recipe.stem else []
    done = command(2, ["fit", *files, *often, "--trainer.default_root_dir", "run"], tmp_path)
    assert [rank.code for rank in done] == [0, 0], done[0].err
    rows = records(tmp_path / "run" / "metrics.csv")
    assert [row["step"] for row in rows] == ["1", "2", "3", "4"]
    assert all(0 < float(row["train_loss"]) < 10 for row in rows)
    steps = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert steps == ["step-00000002", "step-00000004"]


def test_an_epoch_of_own_rows_is_shorter_than_the_validation_interval(tmp_path: Path) -> None:
    rows = [{"prompt": f"What is 1 + {n}?", "completion": str(n + 1)} for n in range(6)]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = ["--data.train=own.jsonl", "--data.val=null", "--data.val_split=0.2"]
    often = ["--trainer.max_epochs=-1", "--trainer.default_root_dir=run"]
    done = command(2, ["fit", *SMOKE, *data, *often], tmp_path)
    assert [rank.code for rank in done] == [0, 0], done[0].err
    assert [row["step"] for row in records(tmp_path / "run" / "metrics.csv") if row["val_loss"]] == ["2", "4"]
