"""The real command, as a user calls it: a recipe in miniature on two processes, and what it must refuse."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ["--config", str(ROOT / "recipes/llama3.2-1b_full_fsdp2_8xgpu.yaml")]
SMOKE = [*RECIPE, "--config", str(ROOT / "configs/debug/smoke.yaml")]


def lit_fsdp(*words: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run ``lit-fsdp`` in a folder."""
    return subprocess.run(
        [sys.executable, "-m", "lit_fsdp", *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(cwd)]), **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished miniature run; its folder is ``run`` inside."""
    cwd = tmp_path_factory.mktemp("smoke")
    started = time.monotonic()
    done = lit_fsdp("fit", *SMOKE, "--trainer.default_root_dir", "run", cwd=cwd)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - started < 60
    assert "miniature: trainer.accelerator: 'gpu' → 'cpu'" in done.stderr
    assert " → llama of 2 layers, hidden size 64, random init" in done.stderr
    assert "FSDP units by the model's no-split classes (LlamaDecoderLayer)" in done.stderr
    return cwd


def test_the_run_folder(smoke: Path) -> None:
    run = smoke / "run"
    steps = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert steps == ["step-00000002", "step-00000004"]
    names = sorted(path.name for path in run.iterdir())
    assert names == ["audit.json", "checkpoints", "dtypes.json", "metrics.csv", "recipe.yaml"]
    with (run / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["0", "1", "2", "3"]
    assert all(float(row["train_loss"]) > 0 for row in rows)
    assert [bool(row["val_loss"]) for row in rows] == [False, True, False, True]
    audit = json.loads((run / "audit.json").read_text())
    assert audit["shard_degree"] == 2
    assert len(audit["peak_host_memory_per_rank"]) == 2
    dtypes = json.loads((run / "dtypes.json").read_text())
    assert dtypes["declared"] == {"param": "fp32", "compute": "bf16", "reduce": "fp32"}
    assert dtypes["realised"]["reductions"].keys() == {"fp32"}


def test_the_resolved_recipe_can_be_fed_back(smoke: Path) -> None:
    first = lit_fsdp("fit", "--config", "run/recipe.yaml", "--print_config", cwd=smoke)
    assert first.returncode == 0, first.stderr
    (smoke / "again.yaml").write_text(first.stdout)
    second = lit_fsdp("fit", "--config", "again.yaml", "--print_config", cwd=smoke)
    assert yaml.safe_load(first.stdout) == yaml.safe_load(second.stdout)
    assert yaml.safe_load(first.stdout)["data"]["global_batch_size"] == 4


def test_resume_continues_run_and_metrics(smoke: Path) -> None:
    words = ["--trainer.default_root_dir", "run", "--ckpt_path", "last", "--trainer.max_steps", "6"]
    done = lit_fsdp("fit", *SMOKE, *words, "--trainer.strategy.init_args.engine", "fsdp1", cwd=smoke)
    assert done.returncode == 0, done.stderr
    with (smoke / "run/metrics.csv").open(newline="") as file:
        assert [row["step"] for row in csv.DictReader(file)] == [str(step) for step in range(6)]
    assert "step-00000006" in {path.name for path in (smoke / "run/checkpoints").iterdir()}
    assert "parameters after resume" in json.loads((smoke / "run/dtypes.json").read_text())["realised"]


def test_validate_and_predict_the_best(smoke: Path) -> None:
    words = [*SMOKE, "--trainer.default_root_dir", "run", "--ckpt_path", "best"]
    done = lit_fsdp("validate", *words, cwd=smoke)
    assert done.returncode == 0, done.stderr
    assert "val_perplexity" in done.stdout
    done = lit_fsdp("predict", *words, "--data.predict", "generated:7", cwd=smoke)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (smoke / "run/predictions.jsonl").read_text().splitlines()]
    assert [row["row"] for row in rows] == list(range(7))
    assert all(row["supervised_tokens"] > 0 and row["loss_sum"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("words", "needles"),
    [
        (["--trainer.default_root_dir", "run"], ["which holds", "--ckpt_path last"]),
        (["--model.optim.warmup", "1"], ["model.optim.warmup", "does not exist", "write model.optim.warmup_steps"]),
        (["--data.max_seq", "64"], ["data.max_seq", "write data.max_seq_length"]),
        (["--trainer.precision", "bf16-mixed"], ["trainer.precision: got bf16-mixed", "precision: mixed"]),
        (["--data.micro_batch_size", "3"], ["got 4 with micro_batch_size 3 on 2 ranks", "set global_batch_size: 6"]),
        (["--ckpt_path", "nowhere"], ["nowhere"]),
        (["--trainer.strategy.init_args.engine", "fsdp3"], ["'fsdp3'", "fsdp2 | fsdp1"]),
    ],
)
def test_refused_at_once_without_torch(smoke: Path, words: list[str], needles: list[str]) -> None:
    (smoke / "torch.py").write_text("raise SystemExit('torch was imported')\n")
    try:
        started = time.monotonic()
        done = lit_fsdp("fit", *SMOKE, "--trainer.default_root_dir", "other", *words, cwd=smoke)
        seconds = time.monotonic() - started
    finally:
        (smoke / "torch.py").unlink()
    assert done.returncode in (1, 2)
    assert done.stdout == ""
    assert done.stderr.splitlines()[0].startswith(("error: ", "miniature: "))
    assert "Traceback" not in done.stderr
    assert "torch was imported" not in done.stderr
    for needle in needles:
        assert needle in done.stderr
    assert seconds < 5  # about 0.1 s on an idle machine, see the benchmarks


@pytest.mark.parametrize(
    ("words", "needles"),
    [
        (["--trainer.max_step", "3"], ["trainer.max_step: got 3", "write trainer.max_steps"]),
        (["--trainer.callbacks", "sideeffect.Thing"], ["not allowed"]),
        (
            ["--trainer.strategy.init_args.wrap", "[GPT2Block]"],
            ["'GPT2Block', which matches no module"],
        ),
        (["--data.train", "missing.jsonl"], ["missing.jsonl: no such file"]),
        (["--data.train", "broken.jsonl"], ["broken.jsonl:2"]),
        (["--data.train", "empty.jsonl"], ["empty.jsonl", "no rows"]),
    ],
)
def test_refused_before_any_process_starts(smoke: Path, words: list[str], needles: list[str]) -> None:
    (smoke / "sideeffect.py").write_text("open('imported', 'w').close()\nclass Thing: pass\n")
    (smoke / "broken.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{"prompt": \n')
    (smoke / "empty.jsonl").write_text("\n")
    done = lit_fsdp("fit", *SMOKE, "--trainer.default_root_dir", "other", *words, cwd=smoke)
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr
    assert "rank 1" not in done.stderr
    for needle in needles:
        assert needle in done.stderr
    assert not (smoke / "imported").exists()
    assert not (smoke / "other" / "checkpoints").exists()


def test_help_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')\n")
    done = lit_fsdp("--help", cwd=tmp_path)
    assert done.returncode == 0
    for verb in ("fit", "validate", "test", "predict", "export", "generate"):
        assert f"\n  {verb} " in done.stdout
