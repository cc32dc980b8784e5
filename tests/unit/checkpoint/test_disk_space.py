"""Bytes of a checkpoint before it is written, and room for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_fsdp.checkpoint import disk_space
from lit_fsdp.checkpoint.disk_space import GIB, check_room, checkpoint_bytes, free_bytes, peak_count
from lit_fsdp.checkpoint.run_folder import Found
from lit_fsdp.checkpoint.store import save_checkpoint
from lit_fsdp.config.run import CheckpointConfig
from lit_fsdp.errors import CheckpointError, ConfigError


def on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("optimizer", "options", "layout"),
    [
        (torch.optim.AdamW, {}, "sharded"),
        (torch.optim.AdamW, {"amsgrad": True}, "full"),
        (torch.optim.SGD, {}, "sharded"),
        (torch.optim.SGD, {"momentum": 0.9}, "full"),
        (torch.optim.RMSprop, {"momentum": 0.9}, "sharded"),
    ],
)
def test_the_estimate_is_within_two_percent_of_what_is_written(tmp_path, layout, optimizer, options):
    """Before the first step, when the optimizer holds nothing yet; a frozen layer has no state."""
    model = torch.nn.ModuleDict({f"layer{i}": torch.nn.Linear(512, 500) for i in range(4)})
    model["layer0"].requires_grad_(False)
    made = optimizer([p for p in model.parameters() if p.requires_grad], lr=0.1, **options)
    expected = checkpoint_bytes(model.state_dict(), model.named_parameters(), [made])
    for param in model.parameters():
        param.grad = torch.ones_like(param) if param.requires_grad else None
    made.step()
    tensors = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    for name, param in model.named_parameters():
        for key, value in made.state.get(param, {}).items():
            if value is not None:
                tensors[f"optim/{name}/{key}"] = torch.as_tensor(value)
    save_checkpoint(tmp_path / "c", tensors, {}, {"global_step": 1}, layout)
    assert expected == pytest.approx(on_disk(tmp_path / "c"), rel=0.02)


def test_how_many_there_are_at_a_time():
    for expected, steps, validates, options in (
        (3, 100, False, {"every_steps": 10}),  # two newest and the one being written
        (4, 100, True, {"every_steps": 10}),
        (5, 100, True, {"every_steps": 10, "keep_best": 2}),
        (3, 100, True, {"every_steps": 10, "keep_best": 0}),
        (8, 100, False, {"every_steps": 10, "keep_every": 20}),
        (2, 100, False, {"every_steps": 50}),  # there are never more
        (1, 100, False, {}),  # only the end is saved
        (4, 100, True, {}),
        (11, 101, True, {"every_steps": 10, "keep_last": -1}),
        (15, 100, True, {"every_steps": 10, "keep_last": -1, "at": range(4, 101, 20)}),
        (10, 100, True, {"every_steps": 10, "keep_last": -1, "at": range(20, 101, 20)}),
        (10, 100, True, {"every_steps": 10, "keep_last": -1, "at": range(5), "keep_best": 0}),
        (3, 100, True, {"keep_last": -1, "at": (20, 50, 100)}),
        (None, None, False, {"every_steps": 10, "keep_last": -1}),
        (None, None, False, {"every_steps": 10, "keep_every": 20}),
        (3, None, False, {"every_steps": 10}),
    ):
        at: Any = options.pop("at", ())
        assert peak_count(CheckpointConfig(**options), steps, validates, at) == expected, (steps, options, at)


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
    assert check(900, 4, size=93) == "checkpoints of 93.00 GiB, at most 4 at a time; 900.00 GiB free"
    assert check(900, 4, size=94) == "large checkpoints of 94.00 GiB, at most 4 at a time; 900.00 GiB free"  # 101 GB
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
    with pytest.raises(ConfigError) as error:
        check(100, 4, max_total_gib=3.5)
    assert str(error.value).splitlines() == [
        "checkpoint.max_total_gib: got 3.5, 0.50 GiB too little",
        "  allowed: 4 or more, or null",
        "  fix:     set max_total_gib: 4, or keep fewer (keep_last 2, keep_best 1, keep_every None)",
    ]


def test_before_a_save_only_the_next_one_counts(check: Callable[..., str]):
    check(1, there=(1, 1), max_total_gib=3)
    with pytest.raises(ConfigError, match=r"got 3, 0\.50 GiB too little"):
        check(1, there=(1, 1.5), max_total_gib=3)
    with pytest.raises(CheckpointError, match=r"needed:  1\.50 GiB more"):
        check(1, there=(1,), size=1.5)


def test_free_bytes_of_a_folder_to_be(tmp_path):
    assert 0 < free_bytes(tmp_path / "not" / "yet") <= 2**60
