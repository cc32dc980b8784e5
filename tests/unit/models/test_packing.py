"""What is noticed when samples see each other, and which families keep packed samples apart."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig, masking_utils

from lit_fsdp.config.model import WITHOUT_SDPA
from lit_fsdp.data.batches import collate, collate_packs
from lit_fsdp.models import attention
from lit_fsdp.models.attention import by_sample
from lit_fsdp.models.loss import causal_lm_forward, plan_loss, sample_losses
from lit_fsdp.models.packing import (
    Isolation,
    last_hidden_states,
    measure_isolation,
    model_inputs,
    tokens_of_one_frequency,
    tokens_of_one_scale,
)
from tests.unit.models.families import FAMILIES as FAMILIES_OF_ALL
from tests.unit.models.families import FEW, random_model, tiny

LENGTHS = [[5, 17, 9, 3], [14, 2, 8, 12]]  # of 40 tokens: padding at the end of both packs


def _batch() -> dict[str, Any]:
    rows = [torch.cat([torch.arange(n) for n in (*row, 40 - sum(row))]) for row in LENGTHS]
    borders = torch.tensor([0, *(n for row in LENGTHS for n in (*row, 40 - sum(row)))]).cumsum(0).int()
    ids = torch.randint(3, 128, (2, 40), generator=torch.Generator().manual_seed(0))
    return {
        "input_ids": ids,
        "position_ids": torch.stack(rows),
        "cu_seq_lens": borders,
        "longest": 32,
        "counts": torch.zeros(4),
    }


def test_states_that_are_nan_or_tell_nothing_are_noticed():
    ids = torch.tensor([[3, 5, 9, 11], [4, 4, 7, 8]])
    nan = measure_isolation(lambda batch: batch["input_ids"][..., None] * float("nan"), ids)
    assert nan.change == float("inf")
    assert measure_isolation(lambda batch: torch.ones(*batch["input_ids"].shape, 1), ids).is_blind


def test_flash_attention_gets_one_row_and_its_borders():
    batch = {**_batch(), "labels": torch.zeros(2, 40), "row": torch.zeros(2), "counts": torch.zeros(4)}
    inputs = model_inputs(batch, "flash_attention_2")
    assert inputs["input_ids"].shape == inputs["labels"].shape == inputs["position_ids"].shape == (1, 80)
    assert inputs["cu_seq_lens_q"] is inputs["cu_seq_lens_k"] is batch["cu_seq_lens"]
    assert inputs["max_length_q"] == inputs["max_length_k"] == 32
    assert set(model_inputs(batch, "sdpa")) == {"input_ids", "labels", "position_ids"}
    del batch["cu_seq_lens"]
    assert set(model_inputs(batch, "flash_attention_2")) == {"input_ids", "labels", "position_ids"}  # padded


def _isolation(model: Any) -> Isolation:
    attention = model.config._attn_implementation
    return measure_isolation(lambda batch: last_hidden_states(model, batch, attention), _batch()["input_ids"])


def test_a_state_that_is_carried_over_is_told_from_the_rounding_of_experts():
    """Initial weights may be so small that it is no more than what experts may round."""
    for family, carries in {"jamba": True, "minimax": True, "mixtral": False, "deepseek_v32": False}.items():
        if family not in FAMILIES_OF_ALL:  # a newer release of transformers
            continue
        config = tiny(family)
        config.update({"use_cache": False, "initializer_range": 0.005})
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()
        isolation = _isolation(model)
        assert (isolation.exchanged > 0) == carries, (family, isolation)
        assert isolation.change < 0.05, (family, isolation)


_WINDOW = {"sliding_window": 6}
FAMILIES: dict[str, dict[str, Any]] = {
    **{
        family: {}
        for family in ("llama", "mistral", "gpt2", "mixtral", "modernbert-decoder", "phi", "cohere", "gpt_neox")
    },
    **dict.fromkeys(("gemma3_text", "cohere2", "olmo3", "exaone4"), _WINDOW),
    "qwen2": {**_WINDOW, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]},
    "llama4_text": {"attention_chunk_size": 6},
}
if not hasattr(masking_utils, "remap_positions_for_packed_sequence"):  # chunks begin where they would in one text
    del FAMILIES["llama4_text"]


def test_packed_is_as_alone_in_fp32():
    """By a mask over the pack and sample by sample, with windows and chunks that are shorter than samples too."""
    for family, changes in FAMILIES.items():
        for is_split in (False, True):
            model, batch = random_model(family, is_split, **changes), _batch()
            attention, isolation = model.config._attn_implementation, _isolation(model)
            assert attention == ("sdpa_by_sample" if is_split else "sdpa"), family
            # experts take all tokens together: other shapes, other kernels
            assert isolation.change <= (1e-5 if family in ("mixtral", "llama4_text") else 0.0), family
            assert isolation.moved <= 1e-5, family
            assert not isolation.is_blind
            packed = last_hidden_states(model, batch, attention).flatten(0, 1)
            for begin, end in pairwise(batch["cu_seq_lens"].tolist()):
                ids = batch["input_ids"].flatten()[None, begin:end]
                alone = {"input_ids": ids, "position_ids": torch.arange(end - begin)[None]}
                found, wanted = packed[begin:end], last_hidden_states(model, alone, "sdpa")[0]
                assert (found - wanted).norm() / wanted.norm() <= 5e-6, (family, is_split)


@pytest.mark.skipif("minimax_m3_vl_text" not in FAMILIES_OF_ALL, reason="a family of newer releases of transformers")
def test_a_family_that_picks_keys_by_blocks_keeps_doing_so():
    sparse = {"layer_types": ["full_attention", "minimax_m3_sparse"], "index_block_size": 4, "index_topk_blocks": 2}
    ids = torch.randint(3, 100, (1, 40), generator=torch.Generator().manual_seed(0))
    plain, ours = (random_model("minimax_m3_vl_text", is_split, **sparse) for is_split in (False, True))
    with torch.no_grad():
        assert torch.equal(ours(input_ids=ids).logits, plain(input_ids=ids).logits)
    assert ours.config._attn_implementation == "sdpa"


def test_positions_that_a_model_counts_from_another_number_are_noticed():
    """RoBERTa counts them from the number after its padding token, unless it gets them."""
    model = random_model("roberta", False, is_decoder=True, pad_token_id=1, max_position_embeddings=64)
    assert _isolation(model).moved > 1e-3


def test_llama_4_scales_queries_by_their_position_in_the_row():
    """From ``floor_scale`` tokens on, in layers without rotary embeddings, so that longer rows are refused."""
    changes = {"no_rope_layers": [1, 0], "layer_types": ["chunked_attention", "full_attention"], "attn_scale": 0.5}
    for floor_scale, leaks in ((8, True), (8192, False)):
        model = random_model("llama4_text", True, **changes, floor_scale=floor_scale)
        assert tokens_of_one_scale(model) == floor_scale
        assert (_isolation(model).moved > 1e-3) is leaks
    assert tokens_of_one_scale(random_model("llama4_text", True)) == math.inf


def test_samples_beyond_the_original_length_set_the_frequencies_of_others():
    rope = {"rope_theta": 1e4, "factor": 4.0}
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 24}
    original = {"original_max_position_embeddings": 24}  # which dynamic does not read
    for kind, more, reach in (("dynamic", original, 32), ("longrope", factors, 24), ("linear", {}, math.inf)):
        config = LlamaConfig(
            **{"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1},
            **{"intermediate_size": 32, "max_position_embeddings": 32},
            rope_parameters={"rope_type": kind, **rope, **more},
        )
        assert tokens_of_one_frequency(AutoModelForCausalLM.from_config(config)) == reach


@pytest.mark.parametrize("family", [family for family in WITHOUT_SDPA if family in FAMILIES_OF_ALL])
def test_caps_and_sinks_are_those_of_each_sample_alone(family: str):
    """As transformers' own attention has them: states, every gradient, and what is generated."""
    model, batch = random_model(family, True, **_WINDOW), _batch()
    assert (model.config._attn_implementation, _isolation(model).change <= 1e-5) == ("sdpa_by_sample", True)
    for name, param in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(param)
    states = model.model(**model_inputs(batch, "sdpa_by_sample")).last_hidden_state[0]
    weights = torch.linspace(-1, 1, states.numel()).view_as(states)
    (states * weights).sum().backward()
    found = {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
    asked = {"input_ids": batch["input_ids"][:, :9], "attention_mask": torch.ones(2, 9, dtype=torch.long)}
    asked["attention_mask"][0, :4] = 0  # padded on the left
    words = model.generate(**asked, max_new_tokens=12, do_sample=False)
    by_sample(model, False)
    assert model.config._attn_implementation == "eager"
    assert torch.equal(words, model.generate(**asked, max_new_tokens=12, do_sample=False))
    model.zero_grad()
    for begin, end in pairwise(batch["cu_seq_lens"].tolist()):
        alone = {"input_ids": batch["input_ids"].flatten()[None, begin:end]}
        wanted = model.model(**alone).last_hidden_state[0]
        assert (states[begin:end] - wanted).norm() / wanted.norm() <= 5e-6
        (wanted * weights[begin:end]).sum().backward()
    for name, param in model.named_parameters():
        if param.grad is not None:
            assert (found[name] - param.grad).norm() <= 1e-4 * param.grad.norm(), name


class _Largest(TorchDispatchMode):
    """The most elements that a tensor of this many positions twice over has, beside those that all have."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self.num_tokens, self.found = num_tokens, set[str]()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if torch.is_tensor(tensor) and sum(size >= self.num_tokens for size in tensor.shape) > 1:
                self.found.add(f"{op} {tuple(tensor.shape)}")
        return out


def test_nothing_grows_with_the_square_of_a_pack_or_row():
    """Forward and backward, windows too; and the gradients are those of one mask over all."""
    tokens = 512
    lengths = [200, 100, 150, 62]
    rows = [(torch.arange(n).numpy() % 90 + 3, torch.ones(n, dtype=torch.bool).numpy()) for n in lengths]
    packed = collate_packs([rows], tokens, 0)
    padded = collate([(torch.arange(n).numpy() % 90 + 3, torch.ones(n).bool().numpy()) for n in (tokens, 400)], 0)
    for family, changes in (
        ("llama", {}),
        ("mistral", {"sliding_window": 64}),
        ("gemma3_text", {"sliding_window": 64}),
    ):
        for batch in (packed, padded):
            grads = []
            for is_split in (True, False):
                model = random_model(family, is_split, max_position_embeddings=tokens, **changes)
                attention = model.config._attn_implementation
                with _Largest(tokens) as largest:
                    inputs = model_inputs(batch, attention)
                    if not is_split and "padding" in inputs:
                        inputs["attention_mask"] = inputs.pop("padding")
                    causal_lm_forward(model, inputs).loss_sum.backward()
                assert bool(largest.found) != is_split, (family, largest.found)
                grads.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
            assert (grads[0] - grads[1]).norm() / grads[1].norm() <= 1e-5, family


@pytest.mark.parametrize(
    "families", [FEW, pytest.param(FAMILIES_OF_ALL, marks=pytest.mark.long("each of 150 families"))]
)
def test_rows_without_a_mask_and_packs_by_sample_are_as_with_a_mask(families: tuple[str, ...]):
    """Losses of padded rows; and packs, of families that keep them apart by a mask, sample by sample."""
    rows = [(torch.arange(n).numpy() % 50 + 3, torch.ones(n, dtype=torch.bool).numpy()) for n in (14, 9, 30)]
    padded, packed, num_split = collate(rows, 0), collate_packs([rows[:2], rows[2:]], 32, 0), 0
    for family in families:
        try:
            model = random_model(family)
            plan, masked = plan_loss(model), {name: padded[name] for name in ("input_ids", "labels", "attention_mask")}
            wanted = sample_losses(model, masked, plan)[0]
        except Exception:  # plain transformers cannot, of this size
            assert families is not FEW
            continue
        by_sample(model, True)
        attention = model.config._attn_implementation
        found = sample_losses(model, model_inputs(padded, attention), plan)[0]
        assert torch.allclose(found, wanted, rtol=1e-5), family
        if attention == "sdpa_by_sample":
            states = last_hidden_states(model, packed, attention)
            by_sample(model, False)
            by_mask, isolation = last_hidden_states(model, packed, "sdpa"), _isolation(model)
            if isolation.change <= 1e-5:  # others carry a state on; the proof before training refuses them
                num_split += 1
                assert (states - by_mask)[:, :23].norm() <= 1e-5 * by_mask[:, :23].norm(), family
    assert num_split >= (3 if families is FEW else 80)


def test_packs_of_somebody_else_are_told_apart_by_their_positions():
    """Without their lengths, as from a collator of one's own."""
    model, batch = random_model("llama", True), _batch()
    with torch.no_grad():
        plain = {name: batch[name] for name in ("input_ids", "position_ids")}
        found, wanted = model(**plain).logits, last_hidden_states(model, batch, "sdpa_by_sample")
        by_mask = random_model("llama")(**plain).logits
    assert torch.allclose(found, by_mask, atol=1e-5)
    assert wanted.shape[:2] == found.shape[:2]


@pytest.mark.filterwarnings("ignore")
def test_families_that_leak_are_found():
    """None of these looks at where positions start anew: mask from elsewhere, or a state that is carried on."""
    for family in ("bloom", "opt"):
        assert _isolation(random_model(family)).change > 0.01, family
    assert _isolation(random_model("opt", True)).change == 0  # which only takes a mask over the pack in another way


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bf16_on_a_cpu_has_fp32_gradients_and_few_lengths(dtype, monkeypatch):
    """Also of fp32 heads under autocast. Gradients of short samples are closer to exact ones than those of torch."""
    seen, flash, sdpa = [], attention._flash, torch.nn.functional.scaled_dot_product_attention

    def watched(kernel):
        return lambda *args, **options: (seen.append(args[0].shape[2]), kernel(*args, **options))[1]

    monkeypatch.setattr(attention, "_flash", watched(flash))
    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", watched(sdpa))
    lengths = [1, 70, 200, 1100]
    tensors = [torch.randn(1, heads, sum(lengths), 64, dtype=torch.bfloat16) for heads in (4, 2, 2)]
    given = [x.to(dtype).requires_grad_() for x in tensors]
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
        out, _ = AttentionInterface()["sdpa_by_sample"](torch.nn.Module(), *given, None, sample_lengths=lengths)
    assert (seen, out.dtype) == ([64, 128, 256, 1152], torch.bfloat16)
    grad = torch.randn_like(out)
    out.backward(grad)

    def split(x):
        return x.split(lengths, dim=2)

    for i, part in enumerate(zip(*map(split, tensors), strict=True)):
        errors = []
        exact = _with_gradients(sdpa, [x.double() for x in part], split(grad.transpose(1, 2))[i])
        ours = [split(out.detach().transpose(1, 2))[i], *(split(x.grad)[i] for x in given)]
        of_torch = _with_gradients(sdpa, part, split(grad.transpose(1, 2))[i])
        for found in (ours, of_torch):
            errors.append([float((x - y).norm() / y.norm().clamp(min=1)) for x, y in zip(found, exact, strict=True)])
        assert max(errors[0]) < 0.01
        assert sum(errors[0]) <= 1.01 * sum(errors[1]), (lengths[i], errors)


def _with_gradients(attend, tensors, grad):
    """The output of causal attention, and the gradients of its inputs."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = attend(*leaves, is_causal=True, enable_gqa=True)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]
