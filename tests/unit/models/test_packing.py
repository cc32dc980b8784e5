"""What is changed in which round, what is noticed, and which families keep packed samples apart."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

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


COMMON = {
    **{"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
GPT = {"vocab_size": 128, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
WINDOW = {**COMMON, "sliding_window": 6}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "sdpa", COMMON),
    ("mistral", "sdpa", WINDOW),
    ("gemma3_text", "sdpa", {**WINDOW, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]}),
    ("gpt2", "sdpa", GPT),
    ("mixtral", "sdpa", {**WINDOW, "num_local_experts": 4}),
]
LEAKING = [
    ("bloom", "eager", {"vocab_size": 128, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    ("falcon", "sdpa", {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}),
]


def _model(kind: str, attention: str, values: dict[str, Any]) -> torch.nn.Module:
    config = AutoConfig.for_model(kind, **values)
    config.use_cache = False
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    for param in model.parameters():
        if param.ndim > 1:  # else attention is nearly uniform, and nothing much depends on anything
            torch.nn.init.normal_(param, std=0.15)
    return model


def _worst(model: torch.nn.Module, attention: str, batch: dict[str, Any]) -> Worst:
    numbers, worst = sequence_numbers(batch["position_ids"]), Worst()
    before = last_hidden_states(model, batch, attention)
    for changed in changed_in(10, num_rounds(10)):
        ids = torch.where(changed[numbers], other_ids(batch["input_ids"]), batch["input_ids"])
        worst.compare(before, last_hidden_states(model, {**batch, "input_ids": ids}, attention), numbers, changed)
    return worst


@pytest.mark.parametrize(("kind", "attention", "values"), FAMILIES, ids=lambda v: v if v is str else "")
def test_packed_is_as_alone_in_fp32(kind: str, attention: str, values: dict[str, Any]):
    model, batch = _model(kind, attention, values), _batch()
    assert takes_positions(model)
    worst = _worst(model, attention, batch)
    has_experts = any(
        "experts" in name for name in values
    )  # which take all tokens together: other shapes, other kernels
    assert worst.difference <= (1e-5 if has_experts else 0.0)
    assert worst.blind == -1
    packed = last_hidden_states(model, batch, attention)
    numbers = sequence_numbers(batch["position_ids"])
    for number in range(10):
        ids = batch["input_ids"][numbers == number][None]
        alone = {"input_ids": ids, "position_ids": torch.arange(ids.shape[1])[None]}
        found, wanted = packed[numbers == number], last_hidden_states(model, alone, attention)[0]
        assert (found - wanted).norm() / wanted.norm() <= 5e-6


@pytest.mark.parametrize(("kind", "attention", "values"), LEAKING, ids=lambda v: "")
@pytest.mark.filterwarnings("ignore")
def test_families_that_leak_are_found(kind: str, attention: str, values: dict[str, Any]):
    """None of these looks at where positions start anew: mask from elsewhere, or a state that is carried on."""
    model = _model(kind, attention, values)
    assert _worst(model, attention, _batch()).difference > 0.01


def test_a_two_dimensional_mask_makes_samples_see_each_other():
    """Why a packed batch has none: transformers would not look for packs."""
    model, batch = _model("llama", "sdpa", COMMON), _batch()
    masked = {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}
    assert _worst(model, "sdpa", batch).difference == 0.0
    assert _worst(model, "sdpa", masked).difference > 0.01


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
