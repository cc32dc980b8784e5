"""``lit-fsdp profile`` on two ranks: a trace each, and phases that add up to what was traced."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.dist.forks import ROOT, command

SMOKE = ["--config", ROOT / "recipes/llama3.2-1b_full_fsdp2_8x24gb.yaml", "--config", ROOT / "configs/debug/smoke.yaml"]


def test_traces_and_tables_of_two_ranks(tmp_path: Path) -> None:
    done = command(2, ["profile", *SMOKE, "--json"], tmp_path)
    assert [rank.code for rank in done] == [0, 0], done[0].err
    folder = tmp_path / "runs/smoke/profile"
    assert not (folder / "checkpoints").exists()
    assert [path.name for path in sorted(folder.glob("rank-*"))] == ["rank-0.json", "rank-1.json"]
    found = json.loads(done[0].out)
    assert found["advice"]
    for rank, record in enumerate(found["ranks"]):
        events = json.loads((folder / f"rank-{rank}.json").read_text())["traceEvents"]
        marks = [event for event in events if event["name"].startswith("lit_fsdp: ")]
        assert len(marks) == 3 * 2 * 4  # three steps of two micro-batches, four phases each
        end = max(mark["ts"] + mark["dur"] for mark in marks)
        step = sum(phase["all"] for phase in record["phases"].values())
        assert step * 3 == pytest.approx((end - min(mark["ts"] for mark in marks)) / 1000, rel=1e-6)
        for phase in record["phases"].values():
            parts = phase["compute"] + phase["exposed communication"] + phase["idle"]
            assert parts == pytest.approx(phase["all"])
            assert phase["communication"] >= phase["exposed communication"] >= 0
        for name in ("forward", "backward"):
            assert record["phases"][name]["compute"] > 0
            assert record["phases"][name]["communication"] > 0


def test_what_is_refused(tmp_path: Path) -> None:
    short = ["--trainer.max_steps", "-1", "--trainer.max_epochs", "1", "--data.train", "generated:8"]
    cases = [
        (["--steps", "0"], "--steps: got 0"),
        (["--step", "2"], "fix:     write steps"),
        ([*short, "--steps", "9"], "--steps: got 9, but training ended before that"),
    ]
    for words, said in cases:
        (done,) = command(1, ["profile", *SMOKE, "--trainer.devices=1", *words], tmp_path)
        assert (done.code, said in done.err) == (2, True), done.err
