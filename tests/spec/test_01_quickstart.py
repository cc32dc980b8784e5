"""A recipe trains in two processes, what it declares is what ran, and the result answers in plain transformers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import yaml

from tests.spec.running import checkpoint, logged, run


def test_it_learns_and_answers(reference: Path) -> None:
    losses = [float(loss) for loss in logged(reference).values()]
    assert len(losses) == 6
    assert 5 < losses[0] < math.log(512) + 0.5  # random weights over the 512 tokens of the miniature's tokenizer
    assert losses[-1] < losses[0] - 0.5

    out, _ = run("export", "--ckpt", checkpoint(reference, 6), "--out", "model", "--verify")
    assert "keys, tensors and logits are equal" in out
    answer, _ = run("generate", "--model", "model", "--prompt", "Hello", "--max_new_tokens", "4")
    assert answer.endswith("\n")


def test_the_resolved_recipe_repeats_the_run(reference: Path, tmp_path: Path) -> None:
    run("fit", "--config", reference / "recipe.yaml", "--trainer.default_root_dir", tmp_path / "again")
    assert logged(tmp_path / "again") == logged(reference)
    recipes = [yaml.safe_load((folder / "recipe.yaml").read_text()) for folder in (reference, tmp_path / "again")]
    for recipe in recipes:
        del recipe["trainer"]["default_root_dir"]
    assert recipes[0] == recipes[1]
    assert recipes[0]["model"]["optim"]["eps"] == 1e-8  # every default is spelled out


def test_a_wrong_word_is_refused_with_the_right_one(tmp_path: Path) -> None:
    recipe = {"trainer": {"devices": 2, "max_steps": 1}, "model": {"name": "x"}, "data": {"train": "y"}}
    Path("recipe.yaml").write_text(json.dumps(recipe))
    words = ("--trainer.default_root_dir", tmp_path / "run", "--data.max_seq_lenght", "64")
    said = run("fit", "--config", "recipe.yaml", *words, code=2)[1]
    assert said.startswith("error: data.max_seq_lenght: got a key that does not exist")
    assert said.endswith("fix:     write --data.max_seq_length 64\n")
    assert not (tmp_path / "run").exists()
