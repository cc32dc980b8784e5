"""How large checkpoints will be, how many there will be at a time, and whether there is room for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lit_fsdp.checkpoint import disk_space
from lit_fsdp.checkpoint.disk_space import check_room, checkpoint_bytes, peak_count
from lit_fsdp.checkpoint.run_folder import Found
from lit_fsdp.config.run import CheckpointConfig
from lit_fsdp.errors import CheckpointError
from lit_fsdp.host import GIB


def test_how_many_there_are_at_a_time():
    for expected, steps, validates, options in (
        (3, 100, False, {"every_steps": 10}),  # two newest and the one being written
        (4, 100, True, {"every_steps": 10}),
        (3, 100, True, {"every_steps": 10, "keep_best": 0}),
        (3, None, False, {"every_steps": 10}),
        (2, 100, False, {"every_steps": 50}),  # there are never more
        (1, 1, True, {"every_steps": 10}),
        (1, 100, False, {}),  # only the end is saved
        (10, 100, False, {"every_steps": 10, "keep_last": -1}),
        (None, 100, True, {"every_steps": 10, "keep_last": -1}),
        (None, None, False, {"every_steps": 10, "keep_every": 20}),
    ):
        assert peak_count(CheckpointConfig(**options), steps, validates) == expected, (steps, options)


def test_the_size_follows_from_shapes_and_the_optimizer():
    layer = torch.nn.Linear(30, 10)
    for states, cls, options in (
        (0, torch.optim.SGD, {}),
        (1, torch.optim.SGD, {"momentum": 0.9}),
        (2, torch.optim.AdamW, {}),
    ):
        optimizer: Any = cls(layer.parameters(), lr=0.1, **options)
        found = checkpoint_bytes(layer.state_dict(), layer.named_parameters(), [optimizer])
        assert found == round(1.02 * 4 * 310 * (1 + states)), options


def test_room_for_a_run_is_room_for_all_that_is_kept_and_one_more(monkeypatch: pytest.MonkeyPatch):
    def check(free: float, there: tuple[float, ...] = ()) -> str:
        monkeypatch.setattr(disk_space, "free_bytes", lambda folder: int(free * GIB))
        found = [Found(step, Path(f"step-{step}"), num_bytes=int(gib * GIB)) for step, gib in enumerate(there)]
        return check_room(CheckpointConfig(every_steps=10), Path("run"), found, GIB, 4)

    assert check(4) == "checkpoints of 1.0 GiB, at most 4 at a time; 4.0 GiB free"
    with pytest.raises(CheckpointError) as error:
        check(3.5)
    fixes = ("free 512.0 MiB, keep fewer (keep_last 2", "default_root_dir")
    for words in ("needed:  4.0 GiB more", "free:    3.5 GiB", *fixes):
        assert words in str(error.value)
    check(1, there=(1, 1, 1))  # those of a resumed run take no more room
    with pytest.raises(CheckpointError, match=r"free 512\.0 MiB"):
        check(0.5, there=(1, 1, 1))
    with pytest.raises(CheckpointError, match=r"needed:  1\.0 GiB more"):  # all of them go, but only afterwards
        check(0.5, there=(1, 1, 1, 1, 1, 1))
    with pytest.raises(CheckpointError, match=r"needed:  3\.5 GiB more"):  # what was written is measured
        check(2, there=(1, 1.5))
