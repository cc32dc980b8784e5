"""``--help`` of every verb ends with an example that works, and a shell completes what it lists."""

from __future__ import annotations

import contextlib
import io
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from lit_fsdp import commands
from lit_fsdp.commands import training
from lit_fsdp.commands.parsing import PARSERS, RECIPE, example_lines
from lit_fsdp.config.parser import load_recipe, read_yaml
from lit_fsdp.errors import ConfigError

ROOT = Path(__file__).parents[3]
WITHOUT_RECIPE = (
    "recipes ls|recipes show|recipes cp|convert|ckpt ls|ckpt verify|ckpt import|report|export|generate".split("|")
)
WITH_RECIPE = "doctor|data inspect|model prepare|audit|profile|bench|parity|slurm render|slurm submit".split("|")


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the recipes, the fragments and the recipe of a run, 80 columns wide."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("recipes", "configs"):
        Path(name).symlink_to(ROOT / name)
    Path("runs/smoke").mkdir(parents=True)
    recipe, smoke = (read_yaml(Path(name)) for name in ("recipes/quickstart.yaml", "configs/debug/smoke.yaml"))
    Path("runs/smoke/recipe.yaml").write_text(yaml.safe_dump(recipe | {"data": recipe["data"] | smoke["data"]}))
    return tmp_path


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """The lines of a verb's help."""
    with contextlib.suppress(SystemExit):  # by which argparse ends
        commands.run([*words, "--help"])
    return capsys.readouterr().out.splitlines()


def words_of(lines: Sequence[str], verb: str) -> list[str]:
    """The example's words behind its verb."""
    assert lines[-2] == "example:"
    words = shlex.split(lines[-1].rpartition(" | ")[2])
    assert words[: 1 + len(verb.split())] == ["lit-fsdp", *verb.split()]
    return words[1 + len(verb.split()) :]


def test_the_example_of_every_verb_is_a_command_line(checkout: Path, capsys: pytest.CaptureFixture[str]):
    for verb in (*WITHOUT_RECIPE, *WITH_RECIPE):
        lines = shown(capsys, *verb.split())
        assert max(map(len, lines)) <= 80
        words = words_of(lines, verb)
        if verb in WITHOUT_RECIPE:
            PARSERS[verb].parse_args(words)
        elif rest := PARSERS[verb].parse_known_args(words)[1]:
            assert load_recipe(rest, "fit").run.model.name
            assert RECIPE in " ".join(lines[:2])


def test_the_example_of_a_verb_that_trains(checkout: Path):
    for verb, example in training.EXAMPLES.items():
        lines = example_lines(example).splitlines()
        assert max(map(len, lines)) <= 80
        assert load_recipe(words_of(lines, verb), verb).run.model.name


def test_bash_completes_verbs_keys_and_words(checkout: Path, capsys: pytest.CaptureFixture[str]):
    assert commands.run(["--print_completion", "bash"]) == 0
    Path("completion.bash").write_text(capsys.readouterr().out)
    strategy = "--trainer.strategy.init_args"
    cases = [
        ("gen", "generate"),
        ("recipes sh", "show"),
        ("recipes show qwen3-32b_full_fsdp2_1", "qwen3-32b_full_fsdp2_16x80gb"),
        ("fit --model.optim.warm", "--model.optim.warmup_steps"),
        ("slurm submit --data.pack", "--data.packing"),
        ("audit --ra", "--ranks"),
        (f"fit --config recipes/quickstart.yaml {strategy}.sharding no", "no_shard"),
        (f"fit {strategy}.precision.red", f"{strategy}.precision.reduce_dtype"),
        ("fit --data.train runs/smoke/rec", "runs/smoke/recipe.yaml"),
    ]
    lines = ["source ./completion.bash", "compopt() { :; }"]  # which only bash itself may call
    for typed, _ in cases:
        words = ["lit-fsdp", *typed.split()]
        lines.append(f"COMP_WORDS=({' '.join(words)}) COMP_CWORD={len(words) - 1} COMPREPLY=()")
        lines.append('_shtab_lit_fsdp; echo "${COMPREPLY[@]}"')
    done = subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [completed for _, completed in cases]


def test_a_shell_that_is_not_known(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(ConfigError, match=r"--print_completion: got nosh\n  allowed: bash, zsh"):
        commands.run(["--print_completion", "nosh"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'lit-fsdp\[completion\]'"):
        commands.run(["--print_completion", "bash"])


def test_examples_that_need_no_run_work(
    checkout: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    for verb in ("recipes ls", "recipes show", "recipes cp", "convert"):
        line = shown(capsys, *verb.split())[-1]
        given = shlex.split(line.rpartition(" | ")[0])[1:]
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(given)))
        assert commands.run(shlex.split(line.rpartition(" | ")[2])[1:]) == 0
        assert capsys.readouterr().out
    assert Path("my.yaml").read_text() == (ROOT / "recipes/smollm2-135m_full_fsdp2_2xcpu.yaml").read_text()
