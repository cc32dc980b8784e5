"""What is changed in which round, what is noticed, and which families keep packed samples apart."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import permutations
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lit_fsdp.models.packing import (
    Worst,
    changed_in,
    last_hidden_states,
    model_inputs,
    moved,
    num_rounds,
    other_ids,
    recut,
    sequence_numbers,
    takes_positions,
)
from tests.unit.models.families import tiny

LENGTHS = [[5, 17, 9, 3], [14, 2, 8, 12]]  # of 40 tokens: padding at the end of both packs


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads cost more than they bring at this size."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _batch() -> dict[str, Any]:
    rows = [torch.cat([torch.arange(n) for n in (*row, 40 - sum(row))]) for row in LENGTHS]
    borders = torch.tensor([0, *(n for row in LENGTHS for n in (*row, 40 - sum(row)))]).cumsum(0).int()
    ids = torch.randint(3, 128, (2, 40), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "position_ids": torch.stack(rows), "cu_seq_lens": borders, "longest": 32}


def test_what_is_noticed():
    numbers, before = torch.tensor([[0, 0, 1, 1]]), torch.ones(1, 4, 2)
    worst = Worst()
    worst.compare(before, before.clone(), numbers, torch.tensor([False, False]))
    assert (worst.difference, worst.blind) == (0.0, -1)
    after = before.clone()
    after[0, 3, 0] += 2.0**-20
    worst.compare(before, after, numbers, torch.tensor([False, True]))  # it was changed, so it may differ
    assert (worst.difference, worst.blind) == (0.0, -1)
    worst.compare(before, after, numbers, torch.tensor([True, False]))
    assert worst.difference == pytest.approx(2.0**-21)
    assert (worst.sequence, worst.blind) == (1, 0)
    worst.compare(before, before * float("nan"), numbers, torch.tensor([False, False]))
    assert worst.difference == float("inf")


def test_flash_attention_gets_one_row_and_its_borders():
    batch = {**_batch(), "labels": torch.zeros(2, 40), "row": torch.zeros(2), "counts": torch.zeros(4)}
    inputs = model_inputs(batch, "flash_attention_2")
    assert {name: inputs[name].shape for name in ("input_ids", "labels", "position_ids")} == dict.fromkeys(
        ("input_ids", "labels", "position_ids"), (1, 80)
    )
    assert inputs["cu_seq_lens_q"] is inputs["cu_seq_lens_k"] is batch["cu_seq_lens"]
    assert inputs["max_length_q"] == inputs["max_length_k"] == 32
    assert set(model_inputs(batch, "sdpa")) == {"input_ids", "labels", "position_ids"}
    del batch["cu_seq_lens"]
    assert set(model_inputs(batch, "flash_attention_2")) == {"input_ids", "labels", "position_ids"}  # padded


_LONG = bool(os.environ.get("LIT_FSDP_LONG"))
SEPARATE = ("llama", "mistral", "gemma3_text", "gpt2", "mixtral")
MORE = ("qwen3", "olmo2", "gemma2", "phi3", "gpt_neox", "cohere2", "starcoder2", "qwen2_moe", "llama4_text")
LEAKING, MORE_LEAKING = ("bloom", "falcon"), ("mamba", "recurrent_gemma", "mpt")


def _model(family: str) -> Any:
    config = tiny(family)
    config.use_cache = False
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    for param in model.parameters():
        if param.ndim > 1:  # else attention is nearly uniform, and nothing much depends on anything
            torch.nn.init.normal_(param, std=0.15)
    return model


def _worst(model: Any, batch: dict[str, Any]) -> Worst:
    numbers, worst = sequence_numbers(batch["position_ids"]), Worst()
    before = last_hidden_states(model, batch, "sdpa")
    for changed in changed_in(10, num_rounds(10)):
        ids = torch.where(changed[numbers], other_ids(batch["input_ids"]), batch["input_ids"])
        worst.compare(before, last_hidden_states(model, {**batch, "input_ids": ids}, "sdpa"), numbers, changed)
    return worst


@pytest.mark.parametrize("family", SEPARATE + MORE * _LONG)
def test_packed_is_as_alone_in_fp32(family: str):
    model, batch = _model(family), _batch()
    assert takes_positions(model)
    worst = _worst(model, batch)
    # experts take all tokens together: other shapes, other kernels
    assert worst.difference <= (1e-5 if any("experts" in name for name, _ in model.named_modules()) else 0.0)
    assert worst.blind == -1
    packed = last_hidden_states(model, batch, "sdpa")
    numbers = sequence_numbers(batch["position_ids"])
    for number in range(10):
        ids = batch["input_ids"][numbers == number][None]
        alone = {"input_ids": ids, "position_ids": torch.arange(ids.shape[1])[None]}
        found, wanted = packed[numbers == number], last_hidden_states(model, alone, "sdpa")[0]
        assert (found - wanted).norm() / wanted.norm() <= 5e-6


@pytest.mark.parametrize("family", LEAKING + MORE_LEAKING * _LONG)
@pytest.mark.filterwarnings("ignore")
def test_families_that_leak_are_found(family: str):
    """None of these looks at where positions start anew: mask from elsewhere, or a state that is carried on."""
    assert _worst(_model(family), _batch()).difference > 0.01


def test_a_two_dimensional_mask_makes_samples_see_each_other():
    """Why a packed batch has none: transformers would not look for packs."""
    model, batch = _model("llama"), _batch()
    assert _worst(model, batch).difference == 0.0
    assert _worst(model, {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}).difference > 0.01


def test_every_pair_is_told_apart():
    """For any two sequences there is a round that changes the first and leaves the second."""
    for count in (1, 2, 7, 11):
        changed = changed_in(count, num_rounds(count))
        for one, other in permutations(range(count), 2):
            assert (changed[:, one] & ~changed[:, other]).any()
    ids = torch.tensor([[3, 5, 9, 11, 100, 101, 102, 100]])  # tokens just added have one and the same embedding
    assert (other_ids(ids) != ids).all()
    assert (other_ids(ids)[ids >= 100] < 100).all()
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 3, 4]])
    assert sequence_numbers(positions).tolist() == [[0, 0, 0, 1, 1, 2], [3, 4, 4, 4, 4, 4]]
    assert moved(positions).tolist() == [[3, 4, 0, 1, 2, 5], [1, 2, 3, 4, 5, 0]]
    cut = recut({"input_ids": torch.zeros(2, 3), "cu_seq_lens": torch.tensor([0, 3, 6], dtype=torch.int32)})
    assert cut["position_ids"].tolist() == [[0, 0, 1], [0, 0, 1]]
