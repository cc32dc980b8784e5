"""``report.html``: the numbers of a run's files, escaped, in a page that fetches nothing."""

from __future__ import annotations

import io
import json
import math
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from rich.console import Console

from lit_fsdp.commands import run as lit_fsdp
from lit_fsdp.errors import ConfigError, DataError
from lit_fsdp.models.tokenizers import miniature_tokenizer
from lit_fsdp.report.data import print_samples
from lit_fsdp.report.page import Curve, read_run
from tests.pages import Page

EVIL = "<script>alert('x')</script>"
GIB = 2**30
RECIPE: dict[str, Any] = {
    "trainer": {"max_steps": 6, "default_root_dir": "runs/a"},
    "model": {"name": EVIL, "optim": {"lr": 1e-4, "warmup_steps": 10}},
    "data": {"train": ["a.jsonl", EVIL]},
}
END: dict[str, Any] = {"status": "stopped", "started": "2031-01-02T03:04:05+00:00"}
END |= {"ended": "2031-01-02T04:04:06+00:00"}
UNITS: dict[str, Any] = {"wrapped_by": "hand", "units": [], "num_params": 1234, "num_trainable": 1234}
MESH: dict[str, Any] = {"engine": "fsdp2", "sharding": "hybrid_shard", "shard_degree": 2, "replicate_degree": 4}
STARTS = [{"step": 0, "ranks": 8, "changed": []}, {"step": 2, "ranks": 1, "changed": ["model.optim.lr: 0.1 → 0.2"]}]
ROWS = ["step,train_loss,lr,val_loss,mine", "1,4.0,0.1,,", "2,3.0,0.2,2.5,nan", "3,inf,0.3,,7", "4,2.0,0.4,3.5,8"]


def run_folder(folder: Path, recipe: dict[str, Any] = RECIPE, rows: list[str] = ROWS, **files: Any) -> Path:
    """A run of somebody, with as much in it as is given."""
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (folder / "metrics.csv").write_text("\n".join(rows) + "\n")
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def page_of(*words: str | Path, capsys: pytest.CaptureFixture[str]) -> Page:
    assert lit_fsdp(["report", *map(str, words)]) == 0
    page = Page(Path(capsys.readouterr().out.strip()).read_text())
    assert page.tags.isdisjoint({"script", "link", "img", "iframe"})
    assert "http" not in page.text
    assert "url(" not in page.text
    return page


def test_what_a_run_folder_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_API_TOKEN", "tell-nobody")
    peaks = {"predicted_peak_bytes": 3 * GIB, "measured_peak_bytes_per_rank": [2 * GIB, 4 * GIB]}
    folder = run_folder(
        tmp_path / "run", audit={**peaks, **UNITS, **MESH, **END, "starts": STARTS, "versions": {"torch": "2.99"}}
    )
    answers = [f'1,"{EVIL} tell-nobody",wanted,first', "2,asked,wanted,between", '3,"two\nlines",wanted,"last\x1b[2J"']
    (folder / "samples.csv").write_text("\n".join(["step,prompt,expected,generated", *answers]) + "\n")
    page = page_of(folder, capsys=capsys)
    assert page.curves == {"train_loss": 3, "val_loss": 2, "lr": 4, "mine": 2}
    assert page.ticks == [["1", "2", "3", "4"], ["1", "2", "3", "4"], ["3", "4"]]
    assert (page.text.count("h0M"), "<path class" in page.text) == (7, True)  # a marker on each of the 11 points
    assert ("mine (1 inf or nan)" in page.text, "loss (1 inf or nan)" in page.text) == (True, True)
    memory = dict(page.tables["Memory, planned and measured"])
    assert list(memory.values()) == ["3.0 GiB", "4.0 GiB", "2.0 GiB", "75.0%"]
    glance = dict(page.tables["At a glance"])
    assert glance["starts"] == "from step 0 on 8 ranks; from step 2 on 1 rank, model.optim.lr: 0.1 → 0.2"
    assert glance["optimizer steps"] == "4 of 6"
    assert glance["engine"] == "fsdp2, hybrid_shard, 8 ranks, 4 copies"
    assert [glance[name] for name in ("status", "last start", "duration")] == [
        "stopped",
        "2031-01-02 03:04:05 UTC",
        "1:00:01",
    ]
    assert glance["final losses"] == "train_loss 2, val_loss 3.5"
    assert glance["sample at step 3"] == "two\nlines → last⟨U+001B⟩[2J"
    assert page.tables["Versions"] == [["torch", "2.99"]]
    prompts = [row[1] for row in page.tables["Samples, first and last generation"]]
    assert prompts == ["prompt", f"{EVIL} ***", "two\nlines"]
    assert ("⟨U+001B⟩" in page.text, "\x1b" in page.text) == (True, False)


def test_runs_beside_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    other = json.loads(json.dumps(RECIPE))
    other["model"]["optim"] = {"lr": 1e-3, "schedule": EVIL}
    run_folder(Path("runs/a"))
    run_folder(Path("runs/b"), other, [*ROWS[:3], "3,1.0,0."])  # killed in the middle of a line
    (tmp_path / "runs/b/metrics.csv").write_text((tmp_path / "runs/b/metrics.csv").read_text().rstrip("\n"))
    page = page_of("runs/a", "runs/b", capsys=capsys)
    assert Path("runs/report-a-b.html").is_file()
    assert page.tables["Where the recipes differ"] == [
        ["", "runs/a", "runs/b"],
        ["model.optim.lr", "0.0001", "0.001"],
        ["model.optim.warmup_steps", "10", "null"],
        ["model.optim.schedule", "null", f'"{EVIL}"'],
    ]
    assert (page.curves["runs/a train_loss"], page.curves["runs/b train_loss"]) == (3, 2)
    assert "Training losses end at different steps (4, 2): compare curves at the same step." in page.text
    (single := Path("runs/pairs")).mkdir()
    pairs = {"class_path": "lit_fsdp.PreferenceModule", "init_args": {"name": "somebody/base", "miniature": True}}
    run_folder(single / "p", {**RECIPE, "model": pairs}, ["step,val_loss", "2,5.8"], audit={**MESH, **UNITS})
    page = page_of(single / "p", capsys=capsys)
    assert dict(page.tables["At a glance"])["model"].startswith("somebody/base, lit_fsdp.PreferenceModule, miniature")
    assert 'data-low="" data-high=""' in page.text  # a single value is at half the height, with its number below
    assert "M50.00,50.00h0" in page.text
    for name, devices in (("c", 2), ("d", "2"), ("e", 2.0)):  # as by a flag
        run_folder(Path("runs", name), {**RECIPE, "trainer": {**RECIPE["trainer"], "devices": devices}})
    both = page_of("runs/c", "runs/d", "runs/e", "-o", "both.html", capsys=capsys).text
    assert "The recipes are equal" in both
    assert "different steps" not in both


def test_what_cannot_be_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    run_folder(Path("runs/a"))
    run_folder(Path("runs/empty"), rows=ROWS[:1])
    for folder, lacks in (("runs/empty", "has no step in metrics.csv"), ("nowhere", "does not exist")):
        with pytest.raises(ConfigError, match=f"{folder}, which {lacks}"):
            lit_fsdp(["report", "runs/a", folder])
    for name, text in (("metrics.csv", "epoch,loss\n1,2\n"), ("audit.json", '{"engine": ')):
        Path("runs/a", name).write_text(text)
        with pytest.raises(DataError, match=f"^runs/a/{name}: not a valid file of a run: "):
            lit_fsdp(["report", "runs/a"])


def test_what_is_supervised_is_marked_and_in_color(monkeypatch: pytest.MonkeyPatch):
    sample = np.array(miniature_tokenizer()("b")["input_ids"]), np.array([True])
    for variable, code in (("FORCE_COLOR", "1;32"), ("NO_COLOR", "1")):  # bold is no color
        monkeypatch.setenv(variable, "1")
        console = Console(file=(out := io.StringIO()), force_terminal=True, color_system="standard")
        print_samples(console, miniature_tokenizer(), "train", [sample])
        assert f"\x1b[{code}mb" in out.getvalue()
        assert out.getvalue().count("⟦") == out.getvalue().count("⟧") == 2  # in the legend, and in the sample


def test_long_curves_keep_their_peaks():
    for apart in (1, 50):  # steps between two that are logged
        points = [(n * apart, 100.0 if n == 77_777 else n % 7 - 0.5 * (n == 5)) for n in range(100_000)]
        kept = Curve(points).points
        assert 400 <= len(kept) <= 800
        assert ((77_777 * apart, 100.0) in kept, (5 * apart, 4.5) in kept) == (True, False)
        assert kept == sorted(kept)
        assert Curve(points[:400]).points == points[:400]
    curve = Curve([*points, (8_000_000, math.nan)])
    assert (curve.first, curve.last, curve.last_step, curve.num_lost) == (points[0], points[-1], 8_000_000, 1)


def test_a_page_takes_no_more_memory_for_more_steps(tmp_path: Path):
    peaks = []
    for steps in (2_000, 20_000):
        folder = tmp_path / str(steps)
        run_folder(
            folder, rows=["step,loss,lr", *(f"{step + 1},{step * 7919 % 101},{step}.5" for step in range(steps))]
        )
        tracemalloc.start()
        assert read_run(folder).metrics["lr"].last == (steps, steps - 0.5)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]
