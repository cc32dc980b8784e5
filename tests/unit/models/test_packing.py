"""What is noticed when samples see each other, and which families keep packed samples apart."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lit_fsdp.models.packing import Isolation, last_hidden_states, measure_isolation, model_inputs
from tests.unit.models.families import tiny

LENGTHS = [[5, 17, 9, 3], [14, 2, 8, 12]]  # of 40 tokens: padding at the end of both packs


def _batch() -> dict[str, Any]:
    rows = [torch.cat([torch.arange(n) for n in (*row, 40 - sum(row))]) for row in LENGTHS]
    borders = torch.tensor([0, *(n for row in LENGTHS for n in (*row, 40 - sum(row)))]).cumsum(0).int()
    ids = torch.randint(3, 128, (2, 40), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "position_ids": torch.stack(rows), "cu_seq_lens": borders, "longest": 32}


def test_states_that_are_nan_or_tell_nothing_are_noticed():
    ids = torch.tensor([[3, 5, 9, 11], [4, 4, 7, 8]])
    nan = measure_isolation(lambda batch: batch["position_ids"][..., None] * float("nan"), ids)
    assert nan.change == float("inf")
    assert measure_isolation(lambda batch: torch.ones(2, 32, 1), ids).is_blind


def test_flash_attention_gets_one_row_and_its_borders():
    batch = {**_batch(), "labels": torch.zeros(2, 40), "row": torch.zeros(2), "counts": torch.zeros(4)}
    inputs = model_inputs(batch, "flash_attention_2")
    assert inputs["input_ids"].shape == inputs["labels"].shape == inputs["position_ids"].shape == (1, 80)
    assert inputs["cu_seq_lens_q"] is inputs["cu_seq_lens_k"] is batch["cu_seq_lens"]
    assert inputs["max_length_q"] == inputs["max_length_k"] == 32
    assert set(model_inputs(batch, "sdpa")) == {"input_ids", "labels", "position_ids"}
    del batch["cu_seq_lens"]
    assert set(model_inputs(batch, "flash_attention_2")) == {"input_ids", "labels", "position_ids"}  # padded


def _model(family: str) -> Any:
    config = tiny(family)
    config.use_cache = False
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    for param in model.parameters():
        if param.ndim > 1:  # else attention is nearly uniform, and nothing much depends on anything
            torch.nn.init.normal_(param, std=0.15)
    return model


def _isolation(model: Any) -> Isolation:
    return measure_isolation(lambda batch: last_hidden_states(model, batch, "sdpa"), _batch()["input_ids"])


def test_packed_is_as_alone_in_fp32():
    for family in ("llama", "mistral", "gemma3_text", "gpt2", "mixtral", "modernbert-decoder"):
        model, batch = _model(family), _batch()
        isolation = _isolation(model)
        # experts take all tokens together: other shapes, other kernels
        assert isolation.change <= (1e-5 if family == "mixtral" else 0.0), family
        assert isolation.moved <= 1e-5, family
        assert not isolation.is_blind
        packed = last_hidden_states(model, batch, "sdpa").flatten(0, 1)
        for begin, end in pairwise(batch["cu_seq_lens"].tolist()):
            ids = batch["input_ids"].flatten()[None, begin:end]
            alone = {"input_ids": ids, "position_ids": torch.arange(end - begin)[None]}
            found, wanted = packed[begin:end], last_hidden_states(model, alone, "sdpa")[0]
            assert (found - wanted).norm() / wanted.norm() <= 5e-6, family


@pytest.mark.filterwarnings("ignore")
def test_families_that_leak_are_found():
    """None of these looks at where positions start anew: mask from elsewhere, or a state that is carried on."""
    for family in ("bloom", "opt"):
        assert _isolation(_model(family)).change > 0.01, family
