"""``--help`` of every verb fits 80 columns and ends with an example that works."""

from __future__ import annotations

import contextlib
import io
import itertools
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lit_fsdp import commands
from lit_fsdp.commands import training
from lit_fsdp.commands.parsing import example_lines
from lit_fsdp.config.parser import load_recipe
from lit_fsdp.config.yaml_files import read_yaml

ROOT = Path(__file__).parents[3]
RUN_HERE = ("recipes ls", "recipes show", "recipes cp", "convert")
VERBS = (
    *("ckpt ls", "ckpt verify", "ckpt import", "report", "export", "generate", "doctor", "data inspect", "audit"),
    *("model prepare", "plan", "profile", "bench", "parity", "slurm render", "slurm submit"),
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
        assert training.run_training_verb(verb, ["--help"]) == 0
        assert capsys.readouterr().out.splitlines()[2].endswith(".")  # of Lightning's docstring only a part of it
        _, words = example_of(example_lines(example).splitlines(), verb)
        assert load_recipe(words[1:], verb).run.model.name


def test_bash_completes_verbs_keys_and_words(capsys: pytest.CaptureFixture[str]):
    assert commands.run(["--print_completion", "bash"]) == 0
    Path("completion.bash").write_text(capsys.readouterr().out)
    strategy = "--trainer.strategy.init_args"
    cases = [
        ("gen", "generate"),
        ("recipes sh", "show"),
        ("recipes show qwen3-32b_full_fsdp2_1", "qwen3-32b_full_fsdp2_16x80gb"),
        ("fit --model.optim.warmup_s", "--model.optim.warmup_steps"),
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


def test_torchao_says_nothing_about_a_gpu_that_this_torch_does_not_know_and_else_what_it_has_to_say():
    code = """
import logging, torch
import lit_fsdp
torch.version.cuda = None
import transformers.quantizers.auto
log = logging.getLogger("torchao")
for text in ("Failed to load _C_mxfp8.so: none", "Failed to load rows", "a kernel is slow"):
    log.warning(text)
torch.version.cuda = "13.0"
log.warning("Failed to load _C_mxfp8.so: bad ELF")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == [
        "Failed to load rows",
        "a kernel is slow",
        "Failed to load _C_mxfp8.so: bad ELF",
    ]
