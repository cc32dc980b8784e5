"""Attention sample by sample: SDPA's results, for packs and for padded rows, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from lit_fsdp.models import by_sample

LENGTH = 24
_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "use_cache": False,
    "pad_token_id": 0,
}


@pytest.fixture
def model() -> Any:
    by_sample.register()
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**_SIZES)).train()


def packed() -> dict[str, torch.Tensor]:
    """Two packs: samples of 10, 1 and 9 tokens with four of padding, and one sample."""
    ids = torch.randint(1, 64, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(10), torch.arange(1), torch.arange(9), torch.arange(4), torch.arange(LENGTH)])
    return {"input_ids": ids, "position_ids": positions.view(2, LENGTH)}


BORDERS = torch.tensor([0, 10, 11, 20, 24, 48], dtype=torch.int32)


def padded() -> dict[str, torch.Tensor]:
    mask = torch.zeros(3, LENGTH, dtype=torch.int64)
    for row, length in enumerate((24, 5, 17)):
        mask[row, :length] = 1
    ids = torch.randint(1, 64, (3, LENGTH), generator=torch.Generator().manual_seed(2))
    return {"input_ids": ids * mask, "attention_mask": mask}


def outputs(model: Any, name: str, inputs: dict[str, Any], places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits at some places, and the gradient of all weights."""
    model.set_attn_implementation(name)
    model.zero_grad()
    logits = model(**inputs).logits[places]
    logits.logsumexp(dim=-1).sum().backward()
    return logits.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("kind", ["packed", "padded"])
@pytest.mark.parametrize("longest", [1024, 8])
def test_as_sdpa(model: Any, kind: str, longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_sample, "LONGEST", longest)
    inputs = packed() if kind == "packed" else padded()
    real = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    ours = by_sample.with_borders(inputs, BORDERS if kind == "packed" else None)
    logits, grads = outputs(model, by_sample.NAME, ours, real)
    wanted, wanted_grads = outputs(model, "sdpa", inputs, real)
    assert torch.allclose(logits, wanted, atol=1e-5)
    assert (grads - wanted_grads).norm() <= 1e-5 * wanted_grads.norm()


def test_borders_of_padded_rows() -> None:
    assert by_sample.with_borders(padded(), None)["cu_seq_lens_q"].tolist() == [0, 24, 29, 48, 65, 72]
    left = {"input_ids": torch.ones(1, 3), "attention_mask": torch.tensor([[0, 1, 1]])}
    with pytest.raises(AssertionError, match="on the right"):
        by_sample.with_borders(left, None)


def test_masks_of_long_samples_do_not_pile_up() -> None:
    kinds = (1, torch.bool, torch.device("cpu"))
    for length in range(by_sample._SHORT + 1, by_sample._SHORT + 41):
        assert by_sample._later_keys(length, *kinds).shape == (1, length, length)
    assert by_sample._long_mask.cache_info().currsize <= 16


def test_other_samples_change_no_bit(model: Any) -> None:
    model.set_attn_implementation(by_sample.NAME)
    inputs = packed()
    before = model(**inputs, cu_seq_lens_q=BORDERS).logits
    inputs["input_ids"][0, :10] = 7
    after = model(**inputs, cu_seq_lens_q=BORDERS).logits
    assert torch.equal(before[0, 10:], after[0, 10:])
    assert torch.equal(before[1], after[1])
    assert not torch.equal(before[0, :10], after[0, :10])


def test_windows_are_left_to_sdpa() -> None:
    by_sample.register()
    torch.manual_seed(0)
    model = Gemma3ForCausalLM(Gemma3TextConfig(**_SIZES, head_dim=8, sliding_window=4)).train()
    everywhere = torch.ones(2, LENGTH, dtype=torch.bool)
    ours, grads = outputs(model, by_sample.NAME, {**packed(), "cu_seq_lens_q": BORDERS}, everywhere)
    wanted, wanted_grads = outputs(model, "sdpa", packed(), everywhere)
    assert torch.allclose(ours, wanted, atol=1e-5)
    assert (grads - wanted_grads).norm() <= 1e-5 * wanted_grads.norm()


def test_without_borders_it_is_sdpa(model: Any) -> None:
    inputs = padded()
    everywhere = inputs["attention_mask"].bool()
    assert torch.equal(
        outputs(model, by_sample.NAME, inputs, everywhere)[0], outputs(model, "sdpa", inputs, everywhere)[0]
    )
