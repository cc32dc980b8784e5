"""Room for checkpoints, and how far ahead the check looks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader

from lit_fsdp.checkpoint import disk_space
from lit_fsdp.checkpoint.disk_space import GIB, check_room, checkpoint_bytes, peak_count
from lit_fsdp.checkpoint.run_folder import Found
from lit_fsdp.config.run import CheckpointConfig, validation_steps
from lit_fsdp.errors import CheckpointError, ConfigError


def test_how_many_there_are_at_a_time():
    for expected, steps, validates, options in (
        (3, 100, False, {"every_steps": 10}),  # two newest and the one being written
        (4, 100, True, {"every_steps": 10}),
        (3, 100, True, {"every_steps": 10, "keep_best": 0}),
        (8, 100, False, {"every_steps": 10, "keep_every": 20}),
        (2, 100, False, {"every_steps": 50}),  # there are never more
        (1, 100, False, {}),  # only the end is saved
        (11, 101, True, {"every_steps": 10, "keep_last": -1}),
        (15, 100, True, {"every_steps": 10, "keep_last": -1, "at": range(4, 101, 20)}),
        (None, None, False, {"every_steps": 10, "keep_last": -1}),
        (3, None, False, {"every_steps": 10}),
    ):
        at: Any = options.pop("at", ())
        assert peak_count(CheckpointConfig(**options), steps, validates, at) == expected, (steps, options, at)


def test_the_size_follows_from_shapes_and_the_optimizer():
    layer = torch.nn.Linear(30, 10)
    for states, cls, options in (
        (0, torch.optim.SGD, {}),
        (1, torch.optim.SGD, {"momentum": 0.9}),
        (2, torch.optim.AdamW, {}),
        (3, torch.optim.AdamW, {"amsgrad": True}),
    ):
        optimizer: Any = cls(layer.parameters(), lr=0.1, **options)
        found = checkpoint_bytes(layer.state_dict(), layer.named_parameters(), [optimizer])
        assert found == round(1.02 * 4 * 310 * (1 + states)), options


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Asks for room for checkpoints of 1 GiB beside those of ``there`` GiB."""

    def ask(free: float, count: int = 1, there: tuple[float, ...] = (), size: float = 1, **options: Any) -> str:
        monkeypatch.setattr(disk_space, "free_bytes", lambda folder: int(free * GIB))
        found = [Found(step, Path(f"step-{step}"), num_bytes=int(gib * GIB)) for step, gib in enumerate(there)]
        config = CheckpointConfig(every_steps=10, **options)
        return check_room(config, Path("run"), found, int(size * GIB), count)

    return ask


def test_room_for_a_run_is_room_for_all_that_is_kept_and_one_more(check: Callable[..., str]):
    assert check(4, 4) == "checkpoints of 1.00 GiB, at most 4 at a time; 4.00 GiB free"
    with pytest.raises(CheckpointError) as error:
        check(4 - 2**-10, 4)
    assert str(error.value).splitlines() == [
        "run: not enough disk space for checkpoints",
        "  needed:  4.00 GiB more: checkpoints of 1.00 GiB, at most 4 at a time",
        "  free:    4.00 GiB on its file system",
        "  missing: 1.00 MiB",
        "  fix:     free that much, keep fewer (keep_last 2, keep_best 1, keep_every None), or name another "
        "trainer.default_root_dir",
    ]


def test_checkpoints_of_a_resumed_run_take_no_more_room(check: Callable[..., str]):
    check(1, 4, there=(1, 1, 1))
    with pytest.raises(CheckpointError, match=r"missing: 0\.50 GiB"):
        check(0.5, 4, there=(1, 1, 1))
    with pytest.raises(CheckpointError, match=r"needed:  1\.00 GiB more"):  # all of them go, but only afterwards
        check(0.5, 4, there=(1, 1, 1, 1, 1, 1))


def test_the_total_of_a_run_is_limited(check: Callable[..., str]):
    check(100, 4, max_total_gib=4)
    with pytest.raises(ConfigError, match=r"checkpoint\.max_total_gib: got 3\.5, 0\.50 GiB too little"):
        check(100, 4, max_total_gib=3.5)
    check(1, there=(1, 1), max_total_gib=3)  # before a save only the next one counts
    with pytest.raises(ConfigError, match=r"got 3, 1\.00 GiB too little"):  # what was written is measured
        check(2, there=(1, 1.5), max_total_gib=3)


class Steps(Callback):
    """After which a validation came."""

    def __init__(self) -> None:
        self.found: list[int] = []

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.found.append(trainer.global_step)


@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning", "ignore:.*does not have many workers")
def test_validations_come_after_the_steps_foretold(tmp_path: Path) -> None:
    for rows, steps, interval, accumulate, every_n in (
        (12, 9, 4, 2, 1),
        (13, 20, 5, 3, 1),  # the last window of an epoch is short
        (7, 12, 5, 2, None),  # over the epochs
        (None, 9, 6, 2, 1),
    ):
        batch = torch.ones(1, 32)
        data = itertools.repeat(batch) if rows is None else DataLoader([batch] * rows, batch_size=None)
        seen = Steps()
        trainer = Trainer(
            accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, max_epochs=-1,
            enable_model_summary=False, num_sanity_val_steps=0, default_root_dir=tmp_path, callbacks=[seen],
            max_steps=steps, val_check_interval=interval, accumulate_grad_batches=accumulate,
            check_val_every_n_epoch=every_n,
        )  # fmt: skip
        trainer.fit(BoringModel(), data, DataLoader([batch], batch_size=None))
        case = (rows, steps, interval, accumulate, every_n)
        assert validation_steps(steps, interval, accumulate, rows, every_n) == set(seen.found) - {0}, case
