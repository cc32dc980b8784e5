"""``--help`` of every verb fits 80 columns and ends with an example that works."""

from __future__ import annotations

import contextlib
import io
import itertools
import shlex
from pathlib import Path

import pytest
import yaml

from lit_fsdp import commands
from lit_fsdp.commands import training
from lit_fsdp.commands.parsing import example_lines
from lit_fsdp.config.parser import load_recipe, read_yaml

ROOT = Path(__file__).parents[3]
RUN_HERE = ("recipes ls", "recipes show", "recipes cp", "convert")
VERBS = (
    *("ckpt ls", "ckpt verify", "ckpt import", "report", "export", "generate", "doctor", "data inspect", "audit"),
    *("data prepare", "model prepare", "plan", "profile", "bench", "parity", "slurm render", "slurm submit"),
)


@pytest.fixture(autouse=True)
def _checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the recipes, the fragments and the recipe of a run, 80 columns wide."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("recipes", "configs"):
        Path(name).symlink_to(ROOT / name)
    Path("runs/smoke").mkdir(parents=True)
    recipe, smoke = (read_yaml(Path(name)) for name in ("recipes/quickstart.yaml", "configs/debug/smoke.yaml"))
    Path("runs/smoke/recipe.yaml").write_text(yaml.safe_dump(recipe | {"data": recipe["data"] | smoke["data"]}))


def example_of(lines: list[str], verb: str) -> tuple[str, list[str]]:
    """What is piped into the example of a verb, and its words."""
    assert max(map(len, lines)) <= 80, verb
    assert lines[-2] == "example:"
    piped, _, line = lines[-1].rpartition(" | ")
    words = shlex.split(line)
    assert words[: 1 + len(verb.split())] == ["lit-fsdp", *verb.split()]
    return "".join(shlex.split(piped)[1:]), words[1:]


def test_the_example_of_every_verb(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    for verb in (*VERBS, *RUN_HERE):
        with contextlib.suppress(SystemExit):  # by which argparse ends
            commands.run([*verb.split(), "--help"])
        piped, words = example_of(capsys.readouterr().out.splitlines(), verb)
        if verb in RUN_HERE:
            monkeypatch.setattr("sys.stdin", io.StringIO(piped))
            assert commands.run(words) == 0
            assert capsys.readouterr().out
        for flag, file in itertools.pairwise(words):
            assert flag not in ("--config", "-c") or Path(file).is_file()
    assert Path("my.yaml").read_text() == (ROOT / "recipes/smollm2-135m_full_fsdp2_2xcpu.yaml").read_text()
    for verb, example in training.EXAMPLES.items():
        _, words = example_of(example_lines(example).splitlines(), verb)
        assert load_recipe(words[1:], verb).run.model.name
