"""The command line of ``doctor``: recipes and flags, tables and JSON, exit codes, signals."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_fsdp.__main__ import main
from lit_fsdp.commands import doctor as command
from lit_fsdp.launch import doctor
from lit_fsdp.launch.bandwidth_report import FORMULA, Rate
from lit_fsdp.launch.checks.row import Row, Wanted
from lit_fsdp.launch.doctor import Report
from lit_fsdp.launch.doctor_table import plain_text, print_report
from tests.unit.launch.conftest import recipe

GOOD, BAD = Row("disk", "58 GiB free"), Row("GPUs [0]", "none", "bad", "run on a machine with GPUs")
REPORT = Report([GOOD, BAD], [Rate("all-reduce", 2**20, 2.0, 4)])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Wanted, bool]]:
    """What would have been examined; the answer is one good row."""
    found: list[tuple[Wanted, bool]] = []

    def examine(wanted: Wanted, complete: Any, quick: bool) -> Report:
        found.append((wanted, quick))
        return Report([GOOD])

    for name in ("SLURM_STEP_ID", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(doctor, "examine", examine)
    monkeypatch.setattr("lit_fsdp.speak.speak", lambda: None)
    return found


def written(tmp_path: Path, **sections: Any) -> str:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(recipe(**sections)))
    return str(path)


def test_without_a_recipe_the_machine_alone(asked: list[Any], capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", "--json", "--quick"]) == 0
    (((wanted, quick),)) = asked
    assert (wanted.model, wanted.checkpoint_bytes, wanted.nodes, quick) == (None, None, 1, True)
    assert json.loads(capsys.readouterr().out)["rows"] == [vars(GOOD)]


def test_a_recipe_says_what_is_wanted(asked: list[Any], tmp_path: Path):
    slurm = {"signal_lead_seconds": 300}
    extra = {"checkpoint": {"keep_last": 3}}
    assert main(["doctor", "--config", written(tmp_path, slurm=slurm, **extra), "--nodes", "4"]) == 0
    (((wanted, quick),)) = asked
    assert (wanted.run_folder, wanted.accelerator) == (Path("/shared/runs/finetune"), "gpu")
    assert (wanted.nodes, wanted.devices, wanted.num_checkpoints, quick) == (4, 8, 5, False)
    assert (wanted.signal_lead_seconds, wanted.compute_dtype, wanted.needs_weights) == (300, "bf16", False)
    assert wanted.copies_to_host


def test_the_command_for_all_nodes_repeats_what_was_asked(asked: list[Any], tmp_path: Path):
    path = written(tmp_path)
    spaced = tmp_path / "a b.yaml"
    spaced.write_text("checkpoint: {keep_last: 3}\n")
    words = ["--config", path, "--config", str(spaced), "--trainer.max_steps", "7", "--quick"]
    assert main(["doctor", "--nodes", "2", *words]) == 0
    (((wanted, _),)) = asked
    assert shlex.split(wanted.words) == words
    assert wanted.nodes == 2


def test_checkpoints_are_counted_as_the_run_counts_them(monkeypatch: pytest.MonkeyPatch):
    """Three last ones, the best and the one being written, but the run has two steps."""
    from lit_fsdp.commands.doctor import _wanted, _with_bytes
    from lit_fsdp.config.run import check_recipe

    monkeypatch.setattr("lit_fsdp.commands.slurm.checkpoint_bytes", lambda run: 1)
    for steps, val, expected in ((2, "generated:8", 2), (100, "generated:8", 5), (100, None, 4)):
        data = {"train": "generated:640", "global_batch_size": 64, "val": val}
        values = recipe(trainer={"max_steps": steps}, checkpoint={"keep_last": 3, "every_steps": 1}, data=data)
        run = check_recipe(values, "fit")
        assert _with_bytes(_wanted(run, values, "r", None), run, 0).num_checkpoints == expected


@pytest.mark.parametrize(
    ("is_terminal", "variables", "is_coloured"),
    [(True, {}, True), (False, {}, False), (True, {"NO_COLOR": "1"}, False), (True, {"TERM": "dumb"}, False)],
)
def test_colours_are_for_terminals(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, variables: dict[str, str], is_coloured: bool
):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return is_terminal

    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm-256color", **variables}.items():
        monkeypatch.setenv(name, value)
    file = Terminal()
    print_report(Report([GOOD, Row("disk", "full", "bad", "free space")]), file)
    colours = re.findall(r"\x1b\[[0-9;]*3[0-7]m", file.getvalue())
    assert bool(colours) is is_coloured
    assert is_terminal or "\x1b" not in file.getvalue()


def test_what_a_recipe_needs_beside_the_core(asked: list[Any], tmp_path: Path):
    model = {"name": "org/model.gguf", "lora": {}}
    assert main(["doctor", "--config", written(tmp_path, model=model)]) == 0
    wanted = asked[0][0]
    assert wanted.extras == ("lora", "gguf")
    assert wanted.needs_weights


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nodes", "0"], "--nodes: got 0"),
        (["--nodes", "x"], "invalid int value"),
        (["--config", "no_such.yaml"], "an existing YAML file"),
        (["--quik"], "quik"),
        (["--model.name", "x"], "a key without a recipe"),
        (["more"], "write --more VALUE"),
    ],
)
def test_a_wrong_command_line(words: list[str], said: str, asked: list[Any], capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", *words]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.out == ""
    assert asked == []


def test_a_wrong_recipe(asked: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", "--config", written(tmp_path, checkpoint={"keep_last": 0})]) == 2
    assert "checkpoint.keep_last: got 0" in capsys.readouterr().err
    assert asked == []


def test_what_is_bad_is_the_exit_code(monkeypatch: pytest.MonkeyPatch, asked: list[Any]):
    monkeypatch.setattr(doctor, "examine", lambda *_: REPORT)
    assert main(["doctor"]) == 1


def test_tables_name_the_fix_below_and_the_formula():
    text = io.StringIO()
    print_report(REPORT, text)
    for words in ("GPUs [0]", "fix: run on a machine with GPUs", "1,048,576", "1 good, 0 warning(s), 1 bad"):
        assert words in text.getvalue()
    assert " ".join(FORMULA.split()) in " ".join(text.getvalue().split())


def test_what_is_bad_is_red():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    text = Terminal()
    print_report(REPORT, text)
    lines = text.getvalue().splitlines()
    assert "\x1b[1;31m" in next(line for line in lines if "GPUs" in line)
    assert "\x1b[1;31m" not in next(line for line in lines if "58 GiB" in line)
    assert "\x1b[1;31m" not in next(line for line in lines if "fix:" in line)


def test_without_rich_it_is_plain_text(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    text = io.StringIO()
    print_report(REPORT, text)
    assert text.getvalue() == plain_text(REPORT)
    assert "bad     GPUs [0]: none\n        fix: run on" in text.getvalue()


def test_a_missing_torch_stops_what_needs_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(doctor, "judge_versions", lambda *_: [Row("torch", "not installed", "bad", "pip")])
    for name in ("ask_torch", "run_ranks"):
        monkeypatch.setattr(doctor, name, lambda *_: pytest.fail("torch was asked"))
    wanted = Wanted(run_folder=tmp_path / "run", cache=tmp_path / "cache")
    limits = doctor.Limits(write_bytes=2**20)
    report = doctor.examine(wanted, lambda *_: pytest.fail("the model was built"), False, limits)
    names = [row.name for row in report.rows]
    assert report.exit_code == 1
    assert "devices, collectives, trial save" in names
    assert "rename" in names
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("number", "error"),
    [(signal.SIGTERM, SystemExit), (signal.SIGUSR1, SystemExit), (signal.SIGINT, KeyboardInterrupt)],
)
def test_a_signal_leads_out_once_and_cleans_up(number: signal.Signals, error: type[BaseException]):
    before = signal.getsignal(number)
    cleaned = []

    def interrupted() -> None:
        with command._ended_by_signals():
            try:
                os.kill(os.getpid(), number)
                pytest.fail("not interrupted")
            finally:
                os.kill(os.getpid(), number)  # an impatient second one does not disturb what removes files
                cleaned.append(True)

    with pytest.raises(error):
        interrupted()
    assert cleaned == [True]
    assert signal.getsignal(number) is before
