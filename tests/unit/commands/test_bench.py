"""``lit-fsdp bench`` where nothing is left to run: its arithmetic, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from lit_fsdp import commands
from lit_fsdp.commands import bench
from lit_fsdp.errors import ConfigError
from tests.pages import Page

ROOT = Path(__file__).parents[3]
WORDS = ["bench", "--config", f"{ROOT}/recipes/smollm2-135m_full_fsdp2_2xcpu.yaml"]
VARY = ["--vary", "data.micro_batch_size=1,2", "--ranks", "1,2", "--repeats", "2"]
RATES = {"1-1-1": "100", "1-2-1": "150", "2-1-1": "200", "1-1-2": "120", "1-2-2": "180", "2-1-2": "200"}


def test_rates_and_scaling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Efficiency is of each rank: 165 / 2 of 110; the next command repeats what failed or was interrupted, no more."""
    monkeypatch.chdir(tmp_path)
    asked, interrupted = [], {"1-2-1"}

    def run_fit(folder: Path, words: list[str]) -> str:
        asked.append(folder.name)
        if folder.name in interrupted:
            interrupted.clear()
            raise KeyboardInterrupt
        if folder.name not in RATES:
            return "exit code 1: error: no\nroom"
        folder.mkdir()
        (folder / "metrics.csv").write_text(f"tokens_per_second,peak_memory_gib\n1,9\n{RATES[folder.name]},1.5\n")
        return ""

    monkeypatch.setattr(bench, "run_fit", run_fit)
    with pytest.raises(KeyboardInterrupt):
        commands.run([*WORDS, *VARY])
    asked.clear()
    for expected in ("1-2-1 2-1-1 2-2-1 1-1-2 1-2-2 2-1-2".split(), ["2-2-1"]):
        assert commands.run([*WORDS, *VARY]) == 1
        assert asked == expected
        asked.clear()
        out = capsys.readouterr().out
        assert [line.split() for line in out.splitlines()[1:5]] == [
            ["1", "1", "2", "110", "100", "120", "100%", "1.50"],
            ["2", "1", "2", "200", "200", "200", "100%", "1.50"],
            ["1", "2", "2", "165", "150", "180", "75%", "1.50"],
            ["2", "2", "0", "failed", "-", "-", "-", "-"],
        ]
        assert "2, ranks 2: exit code 1: error: no room" in out
    (chart,) = tmp_path.glob("runs/*/bench/*/bench.html")
    assert Page(chart.read_text()).curves == {"1": 2, "2": 1}
    assert commands.run([*WORDS, *VARY, "--steps", "7"]) == 1  # is another bench
    assert len(asked) == 7


def test_what_is_refused_before_anything_runs():
    cases = [
        (["--vary", "data.micro_batch_size"], "--vary: got data.micro_batch_size"),
        (["--vary", "trainer.devices=1,2"], "--vary: got trainer.devices=1,2"),  # which --ranks would win
        ([*VARY, "--ranks", "a"], "--ranks: got a"),
        ([*VARY, "--repeats", "0"], "--repeats, --steps: got 0"),
        ([], "got no value for --vary"),
    ]
    for words, said in cases:
        with pytest.raises(ConfigError) as caught:
            commands.run([*WORDS, *words])
        assert said in str(caught.value)
