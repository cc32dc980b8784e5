"""``lit-fsdp bench`` where nothing is left to run: its arithmetic, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from lit_fsdp import commands
from lit_fsdp.errors import ConfigError

ROOT = Path(__file__).parents[3]
WORDS = ["bench", "--config", f"{ROOT}/recipes/smollm2-135m_full_fsdp2_2xcpu.yaml", "--out", "bench"]
VARY = ["--vary", "data.micro_batch_size=1,2", "--ranks", "1,2", "--repeats", "2"]
FINISHED = """data.micro_batch_size,ranks,repeat,tokens_per_second,peak_memory_gib,failed
2,2,1,,,error: out of memory
1,1,1,100,1.5,
1,2,1,150,1.25,
2,1,1,200,2,
2,2,1,320,1.75,
1,1,2,120,1.25,
1,2,2,180,1.5,
2,1,2,200,2.25,
2,2,2,320,1.75,
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_rates_and_scaling_of_finished_runs(capsys: pytest.CaptureFixture[str]):
    """Efficiency is of each rank: 165 / 2 of 110, and 320 / 2 of 200."""
    Path("bench").mkdir()
    Path("bench/bench.csv").write_text(FINISHED)
    assert commands.run([*WORDS, *VARY]) == 0
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert table[1:] == [
        ["1", "1", "2", "110", "100", "120", "100%", "1.50"],
        ["1", "2", "2", "165", "150", "180", "75%", "1.50"],
        ["2", "1", "2", "200", "200", "200", "100%", "2.25"],
        ["2", "2", "2", "320", "320", "320", "80%", "1.75"],
    ]
    assert Path("bench/bench.csv").read_text() == FINISHED
    bars = ElementTree.parse("bench/bench.svg").findall("{*}rect[@x]")
    widths = [float(bar.get("width", "")) for bar in bars]
    assert widths == pytest.approx([widths[3] * rate / 320 for rate in (110, 165, 200, 320)], abs=0.1)
    for words in (["--steps", "7"], ["--data.packing", "true"]):
        with pytest.raises(ConfigError, match="--out: got bench, which holds a bench of something else"):
            commands.run([*WORDS, *VARY, *words])


def test_what_is_refused_before_anything_runs():
    cases = [
        (["--vary", "data.micro_batch_siz=1,2"], "data.micro_batch_siz: got a key that does not exist"),
        (["--vary", "data.micro_batch_size=0,-1"], "data.micro_batch_size: got 0"),
        (["--vary", "data.micro_batch_size"], "--vary: got data.micro_batch_size"),
        (["--vary", "trainer.devices=1,2"], "--vary: got trainer.devices\n  allowed: --ranks"),  # which would win
        ([*VARY, "--vary", "data.micro_batch_size=4"], "--vary: got data.micro_batch_size=1,2 data.micro_batch_size=4"),
        ([*VARY, "--ranks", "0"], "--ranks: got 0"),
        ([*VARY, "--repeats", "0"], "--repeats: got 0"),
        ([*VARY, "--steps", "0"], "--steps: got 0"),
        ([], "arguments are required: --vary"),
    ]
    for words, said in cases:
        with pytest.raises(ConfigError) as caught:
            commands.run([*WORDS, *words])
        assert said in str(caught.value)
    assert not Path("bench").exists()
