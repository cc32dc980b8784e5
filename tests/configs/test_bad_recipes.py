"""What is wrong with a recipe is said before anything heavy is imported, word for word as in bad_recipes.txt."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from lit_fsdp.config.parser import load_recipe
from lit_fsdp.errors import ConfigError

ROOT = Path(__file__).parents[2]
# Each case is a line of flags after `# `, then the whole error.
CASES = [
    case.split("\n", 1)
    for case in Path(__file__).with_name("bad_recipes.txt").read_text(encoding="utf-8").strip()[2:].split("\n\n# ")
]
GOOD = """
trainer:
  devices: 4
  max_steps: 20
  strategy:
    class_path: lit_fsdp.fsdp_strategy
    init_args: {sharding: full_shard}
model:
  name: some-model
  optim: {lr: 1.0e-4, warmup_steps: 10}
data:
  train: rows.jsonl
  global_batch_size: 16
  micro_batch_size: 2
"""


@pytest.fixture
def good(tmp_path: Path) -> Path:
    file = tmp_path / "good.yaml"
    file.write_text(GOOD, encoding="utf-8")
    return file


def test_a_bad_recipe_is_refused_with_these_words(good: Path):
    assert load_recipe(["--config", str(good)], "fit").run.world_size == 4
    for flags, expected in CASES:
        with pytest.raises(ConfigError) as caught:
            load_recipe(["--config", str(good), *re.split(r" (?=--)", flags)], "fit")
        assert str(caught.value) == expected


def test_the_command_line_says_it_in_the_same_words_without_a_traceback(good: Path):
    command = [sys.executable, "-X", "importtime", "-m", "lit_fsdp", "fit", "--config", str(good)]
    done = subprocess.run(
        [*command, "--data.global_batch_size", "6"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    imports = {line.rsplit("|", 1)[1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    said = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert done.returncode == 2
    assert said == [
        "error: data.global_batch_size: got 6 with micro_batch_size 2 on 4 ranks",
        "  allowed: a multiple of micro_batch_size * ranks == 8",
        "  fix:     set global_batch_size: 8, or another micro_batch_size",
    ]
    assert imports.isdisjoint({"torch", "lightning", "transformers"})
    assert "yaml" in imports
