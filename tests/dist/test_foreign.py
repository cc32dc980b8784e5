"""The factory under somebody else's LightningModule, and the examples of the manual and the README as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lit_fsdp.checkpoint.export import export
from lit_fsdp.errors import CheckpointError
from tests.dist.foreign import ForeignNet, foreign_rows
from tests.dist.workers import Workers

ENGINES = ("fsdp2", "fsdp1")


def reference(steps: int, clip: float | None = None) -> list[float]:
    """The same net in a plain loop, one process."""
    torch.manual_seed(11)
    net = ForeignNet()
    optimizer = net.configure_optimizers()
    losses = []
    for step in range(steps):
        x, y = foreign_rows(step)
        loss = torch.nn.functional.mse_loss(net(x), y)
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("engine", ENGINES)
def test_losses_equal_a_plain_loop(workers: Workers, engine: str, accumulate: int, clip: float | None) -> None:
    """Parameters directly on the LightningModule, self(x) in the step, other weights on rank 1 before: rank 0's win."""
    strategy = {"engine": engine, "precision": "fp32"}
    options = {"gradient_clip_val": clip, "accumulate_grad_batches": accumulate}
    results = workers.run("train_foreign", 2, strategy=strategy, steps=6, **options)
    wanted = reference(6, clip)
    assert results[0]["losses"] == results[1]["losses"] == pytest.approx(wanted, rel=1e-5)
    assert results[0]["units"] == ["layers.0", "layers.1", "layers.2", "(root)"]
    assert results[0]["test_loss"] == pytest.approx(results[1]["test_loss"])


@pytest.mark.parametrize("engine", ENGINES)
def test_meta_weights_are_reset_alike_on_all_ranks(workers: Workers, engine: str) -> None:
    results = workers.run("train_foreign", 2, strategy={"engine": engine, "precision": "fp32"}, steps=3, meta=True)
    assert results[0]["losses"] == results[1]["losses"]
    assert all(0 < loss < 100 for loss in results[0]["losses"])


@pytest.mark.parametrize("engine", ENGINES)
def test_lightnings_own_checkpoints_resume_but_are_no_transformers_model(
    workers: Workers, tmp_path: Path, engine: str
) -> None:
    job = {"strategy": {"engine": engine, "precision": "fp32"}, "run": str(tmp_path / "run")}
    whole = workers.run("train_foreign_with_checkpoints", 2, steps=5, **job)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["step=2.ckpt", "step=4.ckpt"]
    saved = tmp_path / "run" / "step=2.ckpt"
    job["run"] = str(tmp_path / "again")
    after = workers.run("train_foreign_with_checkpoints", 2, steps=5, ckpt_path=str(saved), **job)
    assert after == [losses[2:] for losses in whole]  # bit-equal
    with pytest.raises(CheckpointError, match="can be exported"):
        export(saved, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_examples_run(root: Path, tmp_path: Path) -> None:
    (example,) = blocks_after(root / "docs" / "own-module.md", "<!-- example: [^>]*-->\n")
    (lines,) = blocks_after(root / "README.md", "")
    (tmp_path / "my_package.py").write_text(
        example.partition("trainer = ")[0].replace("Net", "MyModule")
        + "my_rows = torch.utils.data.DataLoader(rows, batch_size=8)\n"
    )
    for number, text in enumerate((example, lines)):
        script = tmp_path / f"example{number}.py"
        script.write_text(text + "\nprint('steps', trainer.global_step)\n")
        env = {**os.environ, "PYTHONPATH": str(root)}
        done = subprocess.run(
            [sys.executable, str(script)],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert f"steps {(8, 4)[number]}" in done.stdout  # 64 rows, 2 ranks of 8, 2 epochs; or max_steps


def blocks_after(page: Path, mark: str) -> list[str]:
    """The blocks of Python of a page that stand behind such a comment."""
    return re.findall(f"{mark}```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
