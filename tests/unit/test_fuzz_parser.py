"""Random recipes that pass the first check, through the parser that Lightning's command line is made of.

Nothing is instantiated. ``LIT_FSDP_FUZZ=50000`` tries a fiftieth of so many instead of 60.
"""

from __future__ import annotations

import copy
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lit_fsdp import cli
from lit_fsdp.config.run import check_recipe
from lit_fsdp.signals import SignalFlags
from tests.unit.fuzz_recipes import CANARY, SECTIONS, is_visible, lacking, random_recipe, refusal_of, with_classes

NUM_RECIPES = max(60, int(os.environ.get("LIT_FSDP_FUZZ", "3000")) // 50)


class _ParsedOnly(cli.RecipeCLI):
    """Stops once the recipe is parsed; the parser is built once."""

    parsed: Any = None
    kept: Any = None

    def setup_parser(self, *args: Any) -> None:
        """Once for all recipes."""
        if _ParsedOnly.kept is None:
            super().setup_parser(*args)
            _ParsedOnly.kept = self.parser, self._subcommand_parsers, self._subcommand_method_arguments
        self.parser, self._subcommand_parsers, self._subcommand_method_arguments = _ParsedOnly.kept

    def instantiate_classes(self) -> None:
        """Nothing."""

    def run_trainer(self, *choices: Any) -> None:
        """Only note what would have run."""
        _ParsedOnly.parsed = self.config[self.verb]


def _lost(given: dict[str, Any], parsed: Any) -> list[str]:
    """Keys of an accepted recipe that the parser's result does not show."""
    resolved = parsed.as_dict()
    lost = [name for name in SECTIONS if given.get(name) and not is_visible(given[name], resolved[name])]
    trainer = dict(given["trainer"])
    strategy = trainer.pop("strategy")["init_args"]
    trainer.pop("accumulate_grad_batches", None)
    if not is_visible(strategy, resolved["trainer"]["strategy"]["init_args"]):
        lost.append("strategy")
    return lost + [
        f"trainer.{k}"
        for k, v in trainer.items()
        if not isinstance(v, (dict, list)) and not is_visible(v, resolved["trainer"][k])
    ]


@pytest.mark.filterwarnings("ignore:No seed found")  # Lightning, of seed_everything: true
def test_the_parser_refuses_with_words_and_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{CANARY}.py").write_text("class Logger: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(cli, "RecipeCLI", _ParsedOnly)
    monkeypatch.setattr(cli, "speak", lambda: None)
    monkeypatch.setattr(SignalFlags, "install", lambda self: None)
    called: list[Any] = []
    monkeypatch.setattr(os, "system", called.append)
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kwargs: called.append(args))
    before = {"antigravity", "this", "turtle", "wsgiref", CANARY} & set(sys.modules)
    rng, done, accepted = random.Random(22), 0, 0
    while done < NUM_RECIPES:
        values = random_recipe(rng)
        if refusal_of(lambda values=values: check_recipe(values, "fit"), values) is not None:
            continue
        path = with_classes(values, rng) if rng.random() < 0.5 else None
        done, given = done + 1, copy.deepcopy(values)
        refusal = refusal_of(lambda values=values: cli.run_verb("fit", values, []), given)
        if refusal is not None:
            assert lacking(refusal) == [], refusal
            continue
        assert path in (None, ""), f"recipe {done} was accepted with {path}"
        accepted += 1
        assert _lost(given, _ParsedOnly.parsed) == [], f"recipe {done}: {given!r}"
    assert accepted > NUM_RECIPES // 5
    assert called == []
    assert {"antigravity", "this", "turtle", "wsgiref", CANARY} & set(sys.modules) == before
