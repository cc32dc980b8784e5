"""The factory under somebody else's LightningModule, with the Trainer's own options and callbacks: as a plain loop."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_fsdp.checkpoint.export import export
from lit_fsdp.errors import CheckpointError
from tests.dist.foreign_jobs import ForeignNet, ForeignNetWithValidation, foreign_rows, plain_losses
from tests.dist.forks import on_ranks, server
from tests.runs import records

engines = pytest.mark.parametrize("engine", ["fsdp2", "fsdp1"])


def seeded(net: type[ForeignNet] = ForeignNet) -> ForeignNet:
    torch.manual_seed(11)
    return net()


def trained(engine: str, **options: Any) -> list[dict[str, Any]]:
    strategy = {"engine": engine, "precision": "fp32", **options.pop("strategy", {})}
    return on_ranks("train_foreign", 2, strategy=strategy, **options)


@pytest.mark.parametrize(("engine", "accumulate", "clip"), [("fsdp2", 2, 0.1), ("fsdp1", 1, None)])
def test_losses_equal_a_plain_loop(engine: str, accumulate: int, clip: float | None) -> None:
    """Parameters directly on the LightningModule, self(x) in the step, other weights on rank 1 before: rank 0's win."""
    options = {"gradient_clip_val": clip, "accumulate_grad_batches": accumulate, "batches": 6, "max_steps": 6}
    first, second = trained(engine, **options)
    wanted = plain_losses(seeded(), range(6), partial(torch.nn.utils.clip_grad_norm_, max_norm=clip or math.inf))
    assert first["losses"] == second["losses"] == pytest.approx(wanted, rel=1e-5)
    assert first["units"] == ["layers.0", "layers.1", "layers.2", "(root)"]
    assert first["test_loss"] == pytest.approx(second["test_loss"])
    trusted = {"sync_module_states": False, "cpu_ram_efficient_loading": False}
    found = trained(engine, strategy=trusted, max_steps=1)[0]  # shards of two models
    assert found["losses"] != pytest.approx(wanted[:1], rel=1e-3)


@engines
def test_options_of_the_trainer(engine: str, tmp_path: Path) -> None:
    """Clipping by value, overfit_batches, limit_val_batches, early stopping, a monitor of the learning rate."""
    clip_value = partial(torch.nn.utils.clip_grad_value_, clip_value=0.01)
    clipped = trained(engine, gradient_clip_val=0.01, gradient_clip_algorithm="value", max_steps=4)
    assert clipped[0]["losses"] == clipped[1]["losses"]
    assert clipped[0]["losses"] == pytest.approx(plain_losses(seeded(), range(4), clip_value), rel=1e-5)

    overfit = trained(engine, overfit_batches=2, max_epochs=3)[0]
    assert overfit["losses"] == pytest.approx(plain_losses(seeded(), [0, 1] * 3), rel=1e-5)

    monitor = {"LearningRateMonitor": {"logging_interval": "step"}}
    options = {"validates": True, "limit_val_batches": 2, "max_epochs": 2}
    found = trained(engine, callbacks=monitor, folder=tmp_path, **options)
    net = seeded(ForeignNetWithValidation)
    assert found[0]["losses"] == pytest.approx(plain_losses(net, [0, 1, 2, 3] * 2), rel=1e-5)
    wanted = [float(torch.nn.functional.mse_loss(net(x), y).detach()) for x, y in map(foreign_rows, (100, 101))]
    assert [one["validation_batches"] for one in found] == [4, 4]
    assert found[0]["val_loss"] == pytest.approx(sum(wanted) / 2, rel=1e-5)
    rates = [float(row["lr-AdamW"]) for row in records(tmp_path / "metrics.csv") if row["lr-AdamW"]]
    assert rates == pytest.approx([1e-2 / 2**step for step in range(8)])

    stopping = {"EarlyStopping": {"monitor": "val_loss", "patience": 2, "min_delta": 1e6}}
    stopped = trained(engine, callbacks=stopping, validates=True, max_epochs=9)
    assert [(one["epochs"], one["steps"]) for one in stopped] == [(3, 12), (3, 12)]


@engines
def test_lightnings_checkpoints_are_kept_and_resumed_but_are_no_transformers_model(tmp_path: Path, engine: str) -> None:
    saving: dict[str, Any] = {"monitor": "step", "mode": "max", "save_top_k": 2, "every_n_train_steps": 4}
    saving |= {"dirpath": str(tmp_path / "kept"), "filename": "{step}"}
    job = {"callbacks": {"ModelCheckpoint": saving}, "max_steps": 12, "validates": True, "dropout": 0.5}
    whole = trained(engine, **job)
    assert whole[0]["kept"] == ["step=12.ckpt", "step=8.ckpt"]
    assert whole[0]["best"] == "step=12.ckpt"
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == whole[0]["kept"]
    saving["dirpath"] = str(tmp_path / "again")
    saved = tmp_path / "kept" / "step=8.ckpt"
    resumed = trained(engine, ckpt_path=saved, **job)
    assert [one["losses"] for one in resumed] == [one["losses"][8:] for one in whole]  # bit-equal, between two epochs
    with pytest.raises(CheckpointError, match="can be exported"):
        export(saved, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_callbacks_that_need_whole_weights_or_other_batches_are_refused() -> None:
    cases: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("fsdp2", "StochasticWeightAveraging", {"swa_lrs": 1e-2}),
        ("fsdp1", "WeightAveraging", {}),
        ("fsdp2", "ModelPruning", {"pruning_fn": "l1_unstructured"}),
        ("ddp", "BatchSizeFinder", {}),
    )
    for engine, name, arguments in cases:
        first, second = (one["error"] for one in trained(engine, callbacks={name: arguments}, max_epochs=2))
        assert first == second
        assert re.match(rf"trainer\.callbacks: got {name}( with engine {engine})?\n", first)
        assert ("lit_fsdp.EMAWeights" in first) == ("Averaging" in name)
    swa = {"StochasticWeightAveraging": {"swa_lrs": 1e-2, "swa_epoch_start": 1}}
    averaged = trained("ddp", callbacks=swa, max_epochs=3)
    assert [one["epochs"] for one in averaged] == [3, 3]
    assert averaged[0]["test_loss"] == averaged[1]["test_loss"] != averaged[0]["losses"][-1]


def test_norms_of_gradients_are_those_of_one_process() -> None:
    (wanted,) = on_ranks("norms", 1, strategy={"engine": "single"})
    assert wanted.pop("said") == []
    assert list(wanted["23"])[:1] == ["grad_2.0_norm/0.0.weight"]  # of a part, by its own names
    assert not any("never" in key for key in wanted["10"])
    hybrid = {"engine": "fsdp2", "sharding": "hybrid_shard", "replicate_degree": 2}
    for strategy, ranks in (({"engine": "fsdp2"}, 2), ({"engine": "fsdp1"}, 2), ({"engine": "ddp"}, 2), (hybrid, 4)):
        for rank, found in enumerate(on_ranks("norms", ranks, strategy=strategy)):
            said = found.pop("said")
            assert len(said) == (rank == 0 and strategy["engine"] != "ddp")
            assert all(text.startswith("tests.dist.foreign_jobs imports lightning.") for text in said)
            for word, norms in found.items():
                assert norms == pytest.approx(wanted[word], rel=2e-4)
                assert list(norms) == list(wanted[word])


def test_a_scheduler_that_would_never_step_is_named() -> None:
    epoch, step, plateau = {"interval": "epoch"}, {"interval": "step"}, {"monitor": "val_loss"}
    idle: list[Any] = [  # eight batches per epoch
        (epoch, {"max_steps": 4}), ({}, {"max_steps": 8}), (epoch | {"frequency": 3}, {"max_epochs": 2}),
        (plateau, {"max_steps": 4, "val_check_interval": 2}), (step | {"frequency": 9}, {"max_epochs": 3}),
        (step | {"frequency": 6}, {"max_epochs": 2, "accumulate_grad_batches": 4}),
    ]  # fmt: skip
    moves: list[Any] = [
        (epoch, {"max_steps": 9}), (epoch, {"max_epochs": 2}), (step, {"max_steps": 2}),
        (epoch, {"fast_dev_run": True}), (plateau, {"max_epochs": 2}),
        (plateau | step, {"max_steps": 4, "val_check_interval": 1}),
        (step | {"frequency": 8}, {"max_epochs": 2, "accumulate_grad_batches": 3}),
    ]  # fmt: skip
    for said in on_ranks("idle", 1, cases=idle + moves, engine="single"):
        assert [len(texts) for texts in said] == [1] * len(idle) + [0] * len(moves), said
        assert said[0][0].startswith("StepLR has no effect: Lightning steps it after every epoch of 8 steps, but this ")
        assert '"interval": "step"' in said[0][0]
    first, second = on_ranks("idle", 2, cases=idle[:1], engine="fsdp2")
    assert (len(first[0]), second[0]) == (1, [])  # once


@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1", "ddp"])
def test_a_module_under_tensor_parallelism_is_refused(engine: str) -> None:
    for error in on_ranks("on_dtensors", 2, engine=engine):
        assert error.startswith("OnDTensors: got the DTensor layers.1.0.weight, for example from a tp_plan\n")


def run_script(script: Path, root: Path, *launcher: str) -> subprocess.CompletedProcess[str]:
    words, env = [server().python, *launcher, str(script)], {**os.environ, "PYTHONPATH": str(root)}
    return subprocess.run(words, cwd=script.parent, env=env, capture_output=True, text=True, timeout=400, check=False)


def test_the_examples_run(root: Path, tmp_path: Path) -> None:
    """Those of the manual and of the README as they stand, and the one of recipes/ under torchrun."""
    pages = ((root / "docs" / "own-module.md", "<!-- example: [^>]*-->\n"), (root / "README.md", ""))
    (example,), (lines,) = (
        re.findall(f"{mark}```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL) for page, mark in pages
    )
    (tmp_path / "my_package.py").write_text(
        example.partition("trainer = ")[0].replace("Net", "MyModule")
        + "my_rows = torch.utils.data.DataLoader(rows, batch_size=8)\n"
    )
    script = tmp_path / "example.py"
    for text, steps in ((example, 8), (lines, 4)):  # 64 rows, 2 ranks of 8, 2 epochs; or max_steps
        script.write_text(text + "\nprint('steps', trainer.global_step)\n")
        done = run_script(script, root)
        assert done.returncode == 0, done.stderr
        assert f"steps {steps}" in done.stdout
    script.write_text((root / "recipes" / "foreign_module.py").read_text(encoding="utf-8"))
    done = run_script(script, root, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("32 steps, loss ") == 1


def test_what_is_refused_is_refused_before_further_processes_start(root: Path, tmp_path: Path) -> None:
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
    done = run_script(script, root)
    assert done.returncode == 1
    assert done.stdout.split("\n")[0] == "started first"
    assert "started 1" not in done.stdout
    assert done.stderr.count("trainer.callbacks: got StochasticWeightAveraging") == 1


def test_a_notebook_trains_in_one_process(root: Path, tmp_path: Path) -> None:
    cell = tmp_path / "cell.py"
    cell.write_text(
        "from lightning.pytorch import Trainer\n"
        "from lightning.pytorch.demos.boring_classes import BoringModel\n"
        "from lit_fsdp import fsdp_strategy\n"
        "def train(devices):\n"
        "    options = {'accelerator': 'cpu', 'max_steps': 2, 'enable_progress_bar': False}\n"
        "    trainer = Trainer(devices=devices, strategy=fsdp_strategy(), **options)\n"
        "    trainer.fit(BoringModel())\n"
        "    print('steps', trainer.global_step)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(root)}
    cells = f"exec(open({str(cell)!r}).read())\ntrain(1)\ntrain(2)\n"
    words = [sys.executable, "-i", "-q"]  # a shell, as the one behind a notebook
    done = subprocess.run(words, input=cells, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.stdout.count("steps 2") == 1, done.stderr
    assert "Trainer(devices=...): got 2 from a notebook or an interactive shell" in done.stderr
    assert "!lit-fsdp fit" in done.stderr
    assert "ddp_notebook" not in done.stderr
