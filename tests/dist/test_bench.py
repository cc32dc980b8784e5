"""``lit-fsdp bench``: killed after its first run it goes on with the others; one that fails does not stop them."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from tests.dist.forks import ROOT, SMOKE, server
from tests.runs import records

RECIPE = [
    *SMOKE,
    *("--trainer.strategy.init_args.precision", "fp32", "--trainer.default_root_dir", "run"),
]
VARY = ["--vary", "data.train=generated:64,missing.jsonl,", "--ranks", "1", "--repeats", "2", "--steps", "1"]


def test_it_goes_on_after_a_kill_and_after_a_failure(tmp_path: Path) -> None:
    """The third value is none, which the recipe's own rules refuse without a run."""
    command = [server().python, "-m", "lit_fsdp", "bench", *RECIPE, *VARY]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL) as first:
        while first.poll() is None and not any(
            row["tokens_per_second"] for row in records(tmp_path / "run/bench/bench.csv")
        ):
            time.sleep(0.05)
        first.terminate()
        assert first.wait(20) == 75
    before = records(tmp_path / "run/bench/bench.csv")
    assert [row["data.train"] for row in before] == ["", "generated:64"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith("bench: ")] == [
        "bench: data.train missing.jsonl, ranks 1, repeat 1",
        "bench: data.train generated:64, ranks 1, repeat 2",
    ]
    after = records(tmp_path / "run/bench/bench.csv")
    assert after[:2] == before
    finished = [row for row in after if not row["failed"]]
    assert [(row["data.train"], row["repeat"]) for row in finished] == [("generated:64", "1"), ("generated:64", "2")]
    assert all(float(row["tokens_per_second"]) > 0 and float(row["peak_memory_gib"]) > 0 for row in finished)
    (failed,) = [row for row in after if row["data.train"] == "missing.jsonl"]
    assert "missing.jsonl" in failed["failed"]
    assert "failed" in done.stdout
    assert not (tmp_path / "run/bench/runs/generated_64-1-1/checkpoints").exists()
