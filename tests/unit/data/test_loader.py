"""Packed, split and mixed data through the data module, on ranks that are only claimed."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lit_fsdp.data.loader import BatchLoader
from lit_fsdp.datamodule import CausalLMDataModule

TEMPLATE = "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}{{ '<s>' if add_generation_prompt }}"


@pytest.fixture
def tokenizer(small: Any) -> Any:
    small.chat_template = TEMPLATE
    yield small
    small.chat_template = None


def _module(tokenizer: Any, rank: tuple[int, int] = (0, 1), step: int = 0, **options: Any) -> CausalLMDataModule:
    """A prepared data module of a Trainer that claims a rank and a step."""
    given = {"train": "generated:40", "max_seq_length": 96, "packing": True, "seed": 1}
    data = CausalLMDataModule(**{**given, "global_batch_size": 4, "micro_batch_size": 2, **options})
    data.attach(tokenizer, seed=1)
    data.prepare(("train", "val"))
    device = SimpleNamespace(root_device=torch.device("cpu"))
    data.trainer = SimpleNamespace(  # type: ignore[assignment]
        global_rank=rank[0], world_size=rank[1], global_step=step, strategy=device, accumulate_grad_batches=2
    )
    return data


def _items(loader: BatchLoader, count: int) -> list[list[int]]:
    batches = iter(loader)
    return [next(batches)["row"].tolist() for _ in range(count)]


def test_packs_hold_every_token_once_and_none_of_two_rows_meet(tokenizer: Any):
    data = _module(tokenizer)
    samples = data.prepare(("train",))["train"]
    loader = data.train_dataloader()
    batches = [batch for batch, _ in zip(loader, range(len(loader)), strict=False)]
    assert sum(batch["counts"][1] for batch in batches) == 40
    assert sum(batch["counts"][0] for batch in batches) == samples.meta["tokens"]
    assert sorted(chain(*(batch["row"].tolist() for batch in batches))) == list(range(len(samples)))
    assert {batch["input_ids"].shape[1] for batch in batches} == {96}
    assert all("attention_mask" not in batch for batch in batches)
    assert len(samples) < 40


@pytest.mark.parametrize("workers", [0, 1])
def test_workers_change_nothing(tokenizer: Any, workers: int):
    plain, other = (iter(_module(tokenizer, num_workers=n).train_dataloader()) for n in (0, workers))
    for _ in range(3):
        one, two = next(plain), next(other)
        assert set(one) == set(two)
        assert one.pop("longest") == two.pop("longest")
        assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())


def test_packed_batches_do_not_depend_on_the_ranks(tokenizer: Any):
    count = len(_module(tokenizer).prepare(("train",))["train"])
    whole = _items(_module(tokenizer, micro_batch_size=4).train_dataloader(), 2 * -(-count // 4))
    for step in (0, 1, len(whole) // 2):
        loaders = [_module(tokenizer, (rank, 2), step).train_dataloader() for rank in range(2)]
        for wanted, *parts in zip(whole[step : step + 2], *(_items(loader, 2) for loader in loaders), strict=True):
            assert [item for part in parts for item in part if item != -1] == wanted


def test_a_rank_without_packs_runs_one_without_labels(tokenizer: Any):
    data = [_module(tokenizer, (rank, 4), val="generated:3", val_micro_batch_size=1) for rank in range(4)]
    count = len(data[0].prepare(("val",))["val"])
    assert count < 4
    batches = [list(one.val_dataloader()) for one in data]
    assert [len(part) for part in batches] == [1] * 4
    filler = batches[3][0]
    assert filler["row"].tolist() == [-1]
    assert filler["counts"].tolist() == [0, 0, 96, 0]
    assert filler["input_ids"].shape == (1, 96)
    assert (filler["labels"] == -100).all()
    assert sum(part[0]["counts"][1] for part in batches) == 3


@pytest.mark.parametrize("packing", [False, True])
def test_validation_rows_out_of_the_training_rows(tokenizer: Any, packing: bool):
    data = _module(tokenizer, val_split=0.25, packing=packing)
    assert data.config.val is None
    train, val = (data.prepare(("train", "val"))[split] for split in ("train", "val"))
    rows = [set(chain(*(samples.members(i).tolist() for i in range(len(samples))))) for samples in (train, val)]
    assert rows[0] | rows[1] == set(range(len(train.rows)))
    assert not rows[0] & rows[1]
    (val_loader,) = [data.val_dataloader()]
    assert isinstance(val_loader, BatchLoader)
    assert sum(batch["counts"][1] for batch in val_loader) == len(rows[1]) > 0


def test_a_weighted_mix(tokenizer: Any, tmp_path: Path):
    """Half of the samples come from four rows, the other half from sixteen; what is recorded can be compared."""
    for name, count in (("few", 4), ("many", 16)):
        talks = [
            [{"role": "user", "content": f"{name} {i}"}, {"role": "assistant", "content": "b"}] for i in range(count)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    entries = [{"source": str(tmp_path / f"{name}.jsonl"), "weight": 1.0} for name in ("few", "many")]
    data = _module(tokenizer, train=entries, packing=False, micro_batch_size=4)
    taken = list(chain(*_items(data.train_dataloader(), 15)))  # three epochs of 20
    for epoch in range(3):
        part = taken[20 * epoch : 20 * epoch + 20]
        assert sum(item < 4 for item in part) == 10
    assert sorted(item for item in taken if item >= 4)[:15] != [4] * 15
    assert [taken.count(item) for item in range(4)] in ([8, 8, 7, 7], *_orders([8, 8, 7, 7]))
    assert data.state_dict()["weights"] == [1.0, 1.0]
    assert data.checkpoint_manifest(6)["data"]["groups"] == [4, 16]
    assert data.position_at(6) == (1, 2, 5)
    later = _module(tokenizer, step=7, train=entries, packing=False, micro_batch_size=4)
    assert list(chain(*_items(later.train_dataloader(), 8))) == taken[28:]


def _orders(counts: list[int]) -> list[list[int]]:
    from itertools import permutations

    return [list(order) for order in permutations(counts)]
