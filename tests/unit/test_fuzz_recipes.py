"""Random recipes through everything that stands before a run: no raw traceback, no import, nothing ignored.

``LIT_FSDP_FUZZ=50000`` tries so many recipes instead of 3,000 in the pre-check, and a fiftieth of them in the parser.
"""

from __future__ import annotations

import copy
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from lit_fsdp.config.recipe import read_recipe

from lit_fsdp.config.data import accumulation_steps
from lit_fsdp.config.miniature import adapt_to_miniature
from lit_fsdp.config.run import RunConfig, check_recipe
from lit_fsdp.config.strategy import mesh_shape
from tests.unit.fuzz_recipes import CANARY, SECTIONS, is_visible, lacking, random_recipe, refusal_of

NUM_RECIPES = int(os.environ.get("LIT_FSDP_FUZZ", "3000"))
_VERBS = ("fit", "fit", "fit", "validate", "test", "predict")


class _Imports:
    """First on ``sys.meta_path``: notes every module that is looked for, and finds none."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        self.names.append(name)


@contextmanager
def _imports() -> Iterator[list[str]]:
    finder: Any = _Imports()
    sys.meta_path.insert(0, finder)
    try:
        yield finder.names
    finally:
        sys.meta_path.remove(finder)


def _checked(values: dict[str, Any], verb: str) -> tuple[dict[str, Any], RunConfig]:
    """The recipe after the named replacements of a miniature, and what it resolves to."""
    adapt_to_miniature(values, [])
    return copy.deepcopy(values), check_recipe(values, verb)


def _ignored(given: dict[str, Any], values: dict[str, Any], run: RunConfig) -> list[str]:
    """Keys of an accepted recipe that the resolved configuration does not show."""
    resolved: dict[str, Any] = {name: getattr(run, name) for name in SECTIONS}
    lost = [name for name in SECTIONS if given.get(name) is not None and not is_visible(given[name], resolved[name])]
    trainer = dict(given.get("trainer") or {})
    strategy = trainer.pop("strategy", None)
    if isinstance(strategy, dict) and not is_visible(strategy.get("init_args") or {}, run.strategy):
        lost.append("strategy")
    accumulate = trainer.pop("accumulate_grad_batches", None)
    if accumulate is not None and run.world_size is not None and run.verb == "fit":
        data = run.data
        if accumulate != accumulation_steps(data.global_batch_size, data.micro_batch_size, run.world_size):
            lost.append("accumulate_grad_batches")
    lost += [f"trainer.{key}" for key, value in trainer.items() if not _same(value, run.trainer.get(key, ...))]
    lost += [key for key in ("seed_everything", "ckpt_path") if key in given and not _same(given[key], values[key])]
    return lost


def _same(given: Any, kept: Any) -> bool:
    return repr(given) == repr(kept)  # nan is not itself


def test_the_check_before_anything_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{CANARY}.py").write_text("class Logger: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    rng = random.Random(20)
    random_recipe(rng)
    counts: Counter[str] = Counter()
    with _imports() as imported:
        for number in range(NUM_RECIPES):
            values, verb = random_recipe(rng), rng.choice(_VERBS)
            before = copy.deepcopy(values)
            checks: list[Any] = []
            refusal = refusal_of(lambda: checks.extend(_checked(values, verb)), before)  # noqa: B023
            counts["accepted" if refusal is None else "refused"] += 1
            if refusal is not None:
                assert lacking(refusal) == [], f"recipe {number}: {refusal}"
                continue
            given, run = checks
            assert _ignored(given, values, run) == [], f"recipe {number}: {before!r}"
            if run.world_size is not None:
                replicas, shards = mesh_shape(run.strategy, run.num_nodes, run.world_size)
                assert replicas * shards == run.world_size
    assert imported == []
    assert min(counts.values()) > NUM_RECIPES // 10, counts


def test_words_of_a_command_line(tmp_path: Path) -> None:
    rng = random.Random(21)
    for number in range(NUM_RECIPES // 5):
        values = random_recipe(rng)
        file = tmp_path / "recipe.yaml"
        file.write_text(yaml.dump(values), encoding="utf-8")
        words = ["--config", str(file)]
        for _ in range(rng.randint(0, 3)):
            key = rng.choice(
                ("trainer.max_steps", "model.optim.lr", "data", "a.b", "model..lr", "trainer", "☃", "", "==")
            )
            words += rng.choice(([f"--{key}", "1"], [f"--{key}=[1"], [f"--{key}"], [key], [f"-{key}", "{a: 1}"]))
        rng.shuffle(words)
        refusal = refusal_of(lambda: check_recipe(read_recipe(words).values, "fit"), (words, values))  # noqa: B023
        assert refusal is None or lacking(refusal) == [], f"words {number}: {refusal}"
