"""``lit-fsdp parity``: recipes that train as the plain loop does, and builds that do not and are found out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lit_fsdp import commands
from lit_fsdp.errors import ConfigError
from lit_fsdp.parity.trace import TOLERANCES
from tests.dist.forks import ROOT, server
from tests.runs import MORE

STRATEGY = "--trainer.strategy.init_args"
WORDS = ("--config", f"{ROOT}/recipes/quickstart.yaml", "--config", f"{ROOT}/configs/precision/fp32.yaml")
WRONG = """
from lit_fsdp import CausalLMDataModule, CausalLMModule


class Scaled(CausalLMModule):
    def on_before_optimizer_step(self, optimizer):
        super().on_before_optimizer_step(optimizer)
        for param in self.parameters():
            if param.grad is not None:
                param.grad.mul_(2)


class Shifted(CausalLMDataModule):
    def __init__(self, by: int = 1, **kwargs):
        super().__init__(**kwargs)
        self.by = by

    def train_dataloader(self):
        for batch in super().train_dataloader():
            yield {**batch, "labels": batch["labels"].roll(self.by, dims=1)}
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.executable", server().python)


def parity(capsys: pytest.CaptureFixture[str], *words: str | Path, code: int) -> dict[str, Any]:
    """What the command writes as JSON."""
    assert commands.run(["parity", *WORDS, "--json", *map(str, words)]) == code, capsys.readouterr().err
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def largest(found: dict[str, Any]) -> list[float]:
    """The largest differences of losses, gradient norms and weights."""
    told = [[value or 0.0 for value in step] for step in found["steps"]]  # no norm before the first step
    return [max(values) for values in zip(*told, strict=True)]


def test_two_ranks_train_as_the_plain_loop(capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (
        ("--data.packing", "true", f"{STRATEGY}.activation_checkpointing", "full"),
        (f"{STRATEGY}.engine", "fsdp1", "--model.lora", "{r: 4}", "--model.optim", "{schedule: wsd, lr: 1.0e-3}"),
    ):
        found = parity(capsys, *flags, "--steps", "3", code=0)
        assert (found["equal"], found["named"], found["turned"]) == (True, [], [])
        assert found["steps"][0] == [0, None, 0]  # both begin with the same weights
        assert len({loss for loss, _ in found["losses"]}) == 4  # and learn
        assert 0 < max(largest(found)) < 1e-3


@pytest.mark.parametrize(
    ("fragment", "name", "seen"),
    [
        ("scaled.yaml", "model.class_path", 1),  # which AdamW does not care about
        pytest.param("shifted.yaml", "data.class_path", 0, marks=MORE),
        ("reduced.yaml", "trainer.strategy.precision", 2),
    ],
)
def test_a_wrong_build_is_found_and_named(
    capsys: pytest.CaptureFixture[str], fragment: str, name: str, seen: int
) -> None:
    Path("wrong.py").write_text(WRONG)
    Path("scaled.yaml").write_text("model: {class_path: wrong.Scaled}")
    Path("shifted.yaml").write_text("data: {class_path: wrong.Shifted, init_args: {by: 1}}")
    Path("reduced.yaml").write_text("trainer: {strategy: {init_args: {precision: {mode: fp32, reduce_dtype: bf16}}}}")
    words = ("--config", fragment, "--allow-imports", "wrong", "--steps", "2")
    found = parity(capsys, *words, code=1)
    assert found["named"] == [name]
    assert largest(found)[seen] > TOLERANCES["fp32"][seen], found
    assert found["turned"][-1]["name"] == name  # and nothing is turned beyond it


def test_two_recipes_are_compared_choice_by_choice(capsys: pytest.CaptureFixture[str]) -> None:
    Path("other.yaml").write_text(
        "trainer: {devices: 1, strategy: {init_args: {engine: fsdp1, activation_checkpointing: full}}}\n"
        "model: {optim: {lr: 2.0e-4}}"
    )
    found = parity(capsys, "--against", "other.yaml", "--steps", "2", code=1)
    assert found["named"] == ["model.optim"]
    (turn,) = found["turned"]
    assert (turn["before"], turn["after"]) == ("lr 0.0001", "lr 0.0002")


def test_words_that_cannot_be_compared(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (("--steps", "0"), "--steps: got 0"),
        (("--against", "nowhere.yaml"), "nowhere.yaml"),
        (("--agains", "plain"), "write against"),
        (("--data.streaming", "true"), "data.streaming: got true"),
        (("--model.class_path", "lit_fsdp.PreferenceModule"), "model.class_path: got lit_fsdp.PreferenceModule"),
    ):
        with pytest.raises(ConfigError) as caught:
            commands.run(["parity", *WORDS, *words])
        assert said in str(caught.value)
