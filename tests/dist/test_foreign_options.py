"""The Trainer's own options and callbacks with somebody else's module, on both engines, against a plain loop."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.foreign import foreign_rows
from tests.dist.foreign_options import ForeignNetWithValidation
from tests.dist.workers import Workers

ROOT = Path(__file__).parents[2]
engines = pytest.mark.parametrize("engine", ["fsdp2", "fsdp1"])


def plain_loop(steps: Iterable[int], clip_value: float | None = None, halves: bool = False) -> tuple[list[float], Any]:
    """Losses of these batches in one process, and the net after them."""
    torch.manual_seed(11)
    net, losses = ForeignNetWithValidation(), []
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for step in steps:
        x, y = foreign_rows(step)
        loss = torch.nn.functional.mse_loss(net(x), y)
        loss.backward()
        if clip_value is not None:
            torch.nn.utils.clip_grad_value_(net.parameters(), clip_value)
        optimizer.step()
        optimizer.zero_grad()
        if halves:
            optimizer.param_groups[0]["lr"] /= 2
        losses.append(float(loss.detach()))
    return losses, net


def fp32(engine: str) -> dict[str, Any]:
    """The strategy's arguments."""
    return {"engine": engine, "precision": "fp32"}


@engines
def test_clipping_by_value(workers: Workers, engine: str) -> None:
    options = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value", "max_steps": 4}
    found = workers.run("train_with_options", 2, strategy=fp32(engine), **options)
    assert found[0]["losses"] == found[1]["losses"] == pytest.approx(plain_loop(range(4), 0.01)[0], rel=1e-5)


@engines
def test_overfit_batches(workers: Workers, engine: str) -> None:
    found = workers.run("train_with_options", 2, strategy=fp32(engine), overfit_batches=2, max_epochs=3)
    assert found[0]["steps"] == 6
    assert found[0]["losses"] == pytest.approx(plain_loop([0, 1] * 3)[0], rel=1e-5)


@engines
def test_limit_val_batches(workers: Workers, engine: str) -> None:
    options = {"validates": True, "limit_val_batches": 2, "max_epochs": 2}
    found = workers.run("train_with_options", 2, strategy=fp32(engine), **options)
    losses, net = plain_loop([0, 1, 2, 3] * 2, halves=True)
    wanted = [float(torch.nn.functional.mse_loss(net(x), y).detach()) for x, y in map(foreign_rows, (100, 101))]
    assert [one["validation_batches"] for one in found] == [4, 4]
    assert found[0]["losses"] == pytest.approx(losses, rel=1e-5)
    assert found[0]["val_loss"] == pytest.approx(sum(wanted) / 2, rel=1e-5)


@engines
def test_early_stopping_stops_all_ranks_at_once(workers: Workers, engine: str) -> None:
    stopping = {"EarlyStopping": {"monitor": "val_loss", "patience": 2, "min_delta": 1e6}}
    found = workers.run(
        "train_with_options", 2, strategy=fp32(engine), callbacks=stopping, validates=True, max_epochs=9
    )
    assert [(one["epochs"], one["steps"]) for one in found] == [(3, 12), (3, 12)]


@engines
def test_the_best_checkpoints_are_kept_and_resumed(workers: Workers, tmp_path: Path, engine: str) -> None:
    saving: dict[str, Any] = {"monitor": "step", "mode": "max", "save_top_k": 2, "every_n_train_steps": 4}
    saving |= {"dirpath": str(tmp_path / "kept"), "filename": "{step}"}
    job = {"strategy": fp32(engine), "callbacks": {"ModelCheckpoint": saving}}
    whole = workers.run("train_with_options", 2, max_steps=12, **job)
    assert whole[0]["kept"] == ["step=12.ckpt", "step=8.ckpt"]
    assert whole[0]["best"] == "step=12.ckpt"
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == whole[0]["kept"]
    saving["dirpath"] = str(tmp_path / "again")
    saved = tmp_path / "kept" / "step=8.ckpt"
    resumed = workers.run("train_with_options", 2, max_steps=12, ckpt_path=str(saved), **job)
    assert [one["losses"] for one in resumed] == [one["losses"][8:] for one in whole]  # bit-equal


@engines
def test_the_learning_rate_is_logged(workers: Workers, tmp_path: Path, engine: str) -> None:
    monitor = {"LearningRateMonitor": {"logging_interval": "step"}}
    options = {"validates": True, "max_steps": 4, "limit_val_batches": 1, "folder": str(tmp_path)}
    workers.run("train_with_options", 2, strategy=fp32(engine), callbacks=monitor, **options)
    with (tmp_path / "metrics.csv").open() as file:
        rates = [float(row["lr-AdamW"]) for row in csv.DictReader(file) if row["lr-AdamW"]]
    assert rates == pytest.approx([1e-2, 5e-3, 2.5e-3, 1.25e-3])


@engines
@pytest.mark.parametrize(
    ("name", "arguments"), [("StochasticWeightAveraging", {"swa_lrs": 1e-2}), ("WeightAveraging", {})]
)
def test_averages_of_shards_are_refused(workers: Workers, engine: str, name: str, arguments: dict[str, Any]) -> None:
    found = workers.run("refusal_of", 2, strategy=fp32(engine), callbacks={name: arguments}, max_epochs=2)
    assert found[0] == found[1]
    assert found[0].startswith(f"trainer.callbacks: got {name} with engine {engine}: it ")
    assert f"fix:     drop {name}" in found[0]


@pytest.mark.parametrize("by", ["torchrun", "itself"])
def test_the_example_runs(root: Path, tmp_path: Path, by: str) -> None:
    script = root / "recipes" / "foreign_module.py"
    assert sum(bool(line.strip()) for line in script.read_text(encoding="utf-8").splitlines()) < 30
    env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    words = [sys.executable, *(torchrun if by == "torchrun" else []), str(script)]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("32 steps, loss ") == 1


def test_what_is_refused_is_refused_before_further_processes_start(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os\n"
        "print('started', os.environ.get('LOCAL_RANK', 'first'), flush=True)\n"
        "from lightning.pytorch import Trainer\n"
        "from lightning.pytorch.callbacks import StochasticWeightAveraging\n"
        "from lightning.pytorch.demos.boring_classes import BoringModel\n"
        "from lit_fsdp import fsdp_strategy\n"
        "average = StochasticWeightAveraging(swa_lrs=1e-2)\n"
        "Trainer(accelerator='cpu', devices=2, strategy=fsdp_strategy(), callbacks=[average]).fit(BoringModel())\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout.split("\n")[0] == "started first"
    assert "started 1" not in done.stdout
    assert done.stderr.count("trainer.callbacks: got StochasticWeightAveraging") == 1
