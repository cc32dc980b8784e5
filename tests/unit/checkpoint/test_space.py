"""Bytes of a checkpoint before it is written, and room for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lit_fsdp.checkpoint.find import Found
from lit_fsdp.checkpoint.manifest import TensorSpec
from lit_fsdp.checkpoint.space import GIB, Budget, Contents, Plan, free_bytes, peak_count, saved_tensors
from lit_fsdp.checkpoint.store import save_checkpoint
from lit_fsdp.config.run import CheckpointConfig
from lit_fsdp.errors import CheckpointError, ConfigError

GIB_OF_WEIGHTS = {"model/w": TensorSpec("float32", (1024, 256, 1024))}


def contents(**changes: Any) -> Contents:
    return Contents(**{"tensors": GIB_OF_WEIGHTS, "layout": "sharded", "world_size": 1, "shards": 1, **changes})


def on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def state_of(optimizer_class: type, **options: Any) -> tuple[dict[str, torch.Tensor], dict[str, TensorSpec], tuple]:
    """What an optimizer really keeps after a step, and what was foretold before it."""
    model = torch.nn.ModuleDict({f"layer{i}": torch.nn.Linear(64, 96) for i in range(8)})
    model["layer0"].requires_grad_(False)
    optimizer = optimizer_class([p for p in model.parameters() if p.requires_grad], lr=0.1, **options)
    foretold, assumed = saved_tensors(model.state_dict(), model.named_parameters(), [optimizer])
    for param in model.parameters():
        param.grad = torch.ones_like(param) if param.requires_grad else None
    optimizer.step()
    tensors = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    for name, param in model.named_parameters():
        for key, value in optimizer.state.get(param, {}).items():
            tensors[f"optim/{name}/{key}"] = torch.as_tensor(value)
    return tensors, foretold, assumed


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.Adam, {"fused": True}),
        (torch.optim.SGD, {}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
        (torch.optim.NAdam, {}),
        (torch.optim.RAdam, {}),
        (torch.optim.Adamax, {}),
        (torch.optim.Adagrad, {}),
        (torch.optim.Adadelta, {}),
    ],
)
def test_optimizer_state_is_foretold_exactly(optimizer, options):
    tensors, foretold, assumed = state_of(optimizer, **options)
    real = {name: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()}
    assert {name: (spec.dtype, spec.shape) for name, spec in foretold.items()} == real
    assert assumed == ()


def test_an_optimizer_of_ones_own_is_taken_for_adamw_and_said_so():
    class Lion(torch.optim.AdamW):
        pass

    tensors, foretold, assumed = state_of(Lion)
    assert foretold.keys() == tensors.keys()
    assert assumed == ("Lion is taken to keep two tensors per parameter, as AdamW does",)


@pytest.mark.parametrize("layout", ["sharded", "full"])
@pytest.mark.parametrize(("count", "shape"), [(40, (256, 256)), (3, (2048, 512)), (200, (256, 128))])
def test_the_estimate_is_within_two_percent_of_what_is_written(tmp_path, layout, count, shape):
    tensors = {f"model/model.layers.{i}.self_attn.q_proj.weight": torch.zeros(shape) for i in range(count)}
    file = b"x" * 5000
    expected = contents(
        tensors={name: TensorSpec("float32", shape) for name in tensors}, layout=layout, file_bytes=[len(file)]
    ).num_bytes
    save_checkpoint(tmp_path / "c", tensors, {}, {"global_step": 1}, layout, {"hf/tokenizer.json": file})
    written = on_disk(tmp_path / "c")
    assert abs(expected - written) <= 0.02 * written, (expected, written)
    assert expected > sum(tensor.nbytes for tensor in tensors.values())


def test_more_shards_have_more_overhead_and_the_same_data():
    one, four = contents().num_bytes, contents(world_size=4, shards=4).num_bytes
    assert GIB < one < four < GIB + 200_000


def peak(steps: int | None, validates: bool = False, at: Any = (), **options: Any) -> int | None:
    return peak_count(CheckpointConfig(**options), Plan(steps, validates, at))


@pytest.mark.parametrize(
    ("expected", "arguments"),
    [
        (3, {"steps": 100, "every_steps": 10}),  # two newest and the one being written
        (4, {"steps": 100, "every_steps": 10, "validates": True}),
        (5, {"steps": 100, "every_steps": 10, "validates": True, "keep_best": 2}),
        (3, {"steps": 100, "every_steps": 10, "validates": True, "keep_best": 0}),
        (8, {"steps": 100, "every_steps": 10, "keep_every": 20}),
        (2, {"steps": 100, "every_steps": 50}),  # there are never more
        (1, {"steps": 100}),  # only the end is saved
        (4, {"steps": 100, "validates": True}),
        (10, {"steps": 100, "every_steps": 10, "keep_last": -1}),
        (11, {"steps": 101, "every_steps": 10, "keep_last": -1}),
        (15, {"steps": 100, "every_steps": 10, "keep_last": -1, "validates": True, "at": range(4, 101, 20)}),
        (10, {"steps": 100, "every_steps": 10, "keep_last": -1, "validates": True, "at": range(20, 101, 20)}),
        (10, {"steps": 100, "every_steps": 10, "keep_last": -1, "validates": True, "at": range(5), "keep_best": 0}),
        (3, {"steps": 100, "keep_last": -1, "validates": True, "at": (20, 50, 100)}),
        (None, {"steps": None, "every_steps": 10, "keep_last": -1}),
        (None, {"steps": None, "every_steps": 10, "keep_every": 20}),
        (3, {"steps": None, "every_steps": 10}),
    ],
)
def test_how_many_there_are_at_a_time(expected, arguments):
    assert peak(**arguments) == expected


def budget(free: float, **options: Any) -> Budget:
    given = Budget(CheckpointConfig(every_steps=10, **options), Path("run"), contents(), lambda folder: int(free))
    given.checkpoint_bytes = GIB
    return given


def there(*gib: float) -> list[Found]:
    return [Found(step, Path(f"step-{step}"), {}, "", int(size * GIB)) for step, size in enumerate(gib)]


PLAN = Plan(total_steps=100, validates=True)


def test_room_for_a_run_is_room_for_all_that_is_kept_and_one_more():
    assert budget(4 * GIB).check_run([], PLAN) == "checkpoints: 1.00 GiB each, at most 4 at a time; 4.00 GiB free"
    with pytest.raises(CheckpointError) as error:
        budget(4 * GIB - 2**20).check_run([], PLAN)
    assert str(error.value).splitlines() == [
        "run: not enough disk space for checkpoints",
        "  needed:  4.00 GiB more, 1.00 GiB for each checkpoint: 4 at a time (keep_last 2, keep_best 1, and the one "
        "being written)",
        "  free:    4.00 GiB on its file system",
        "  missing: 1.00 MiB",
        "  fix:     free that much, lower checkpoint.keep_last, or name another trainer.default_root_dir",
    ]


def test_checkpoints_of_a_resumed_run_take_no_more_room():
    budget(1 * GIB).check_run(there(1, 1, 1), PLAN)
    with pytest.raises(CheckpointError, match=r"missing: 0\.50 GiB"):
        budget(0.5 * GIB).check_run(there(1, 1, 1), PLAN)
    with pytest.raises(CheckpointError, match=r"needed:  1\.00 GiB more"):  # all of them go, but only afterwards
        budget(0.5 * GIB).check_run(there(1, 1, 1, 1, 1, 1), PLAN)


def test_every_way_out_is_named():
    with pytest.raises(CheckpointError) as error:
        budget(0, keep_last=-1, keep_best=2, keep_every=20).check_run([], PLAN)
    assert (
        "lower checkpoint.keep_last, set checkpoint.keep_every above 20 or to null, lower checkpoint.keep_best, or"
        in (str(error.value))
    )
    with pytest.raises(CheckpointError, match="fix:     free that much, or name another"):
        budget(0, keep_last=1).check_run([], PLAN)


def test_the_total_of_a_run_is_limited():
    budget(100 * GIB, max_total_gib=4).check_run([], PLAN)
    with pytest.raises(ConfigError) as error:
        budget(100 * GIB, max_total_gib=3.5).check_run([], PLAN)
    assert str(error.value).splitlines() == [
        "checkpoint.max_total_gib: got 3.5 (3.50 GiB), 0.50 GiB too little for checkpoints of 1.00 GiB",
        "  allowed: 4 or more, for 4 at a time (keep_last 2, keep_best 1, and the one being written); or null",
        "  fix:     set max_total_gib: 4, or lower checkpoint.keep_last",
    ]


def test_before_a_save_only_the_next_one_counts():
    ready = budget(1 * GIB, max_total_gib=3)
    ready.check_save(there(1, 1))
    with pytest.raises(ConfigError, match=r"got 3 \(3\.00 GiB\), 0\.50 GiB too little"):
        ready.check_save(there(1, 1.5))
    with pytest.raises(CheckpointError, match=r"needed:  1\.50 GiB for the next checkpoint\n"):
        ready.check_save(there(1), written=[int(1.5 * GIB)])  # what was really written beats the estimate
    with pytest.raises(CheckpointError, match=r"missing: 512\.00 MiB|missing: 0\.50 GiB"):
        budget(0.5 * GIB).check_save([])


def test_free_bytes_of_a_folder_to_be(tmp_path):
    assert 0 < free_bytes(tmp_path / "not" / "yet") <= 2**60
