"""The optimizer of a recipe, its class and arguments, and noise on embeddings."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from lit_fsdp.config.model import OptimConfig
from lit_fsdp.data.batches import collate, collate_packs
from lit_fsdp.errors import ConfigError
from lit_fsdp.models.build import build_on_meta
from lit_fsdp.models.neftune import embedding_noise
from lit_fsdp.models.optimizers import MuonWithAdamW, hidden_matrices, is_decayed, optimizer_class
from lit_fsdp.models.preference import evaluating


def test_what_is_refused_in_one_sentence():
    for path, args, field, said, fix in (
        ("torch.optim.AdamW", {"fusd": True}, "init_args.fusd", "no argument of torch.optim.AdamW", "write fused"),
        ("torch.optim.SGD", {"zzz": 1}, "init_args.zzz", "no argument", "drop zzz"),
        ("torch.optim.Nope", {}, "class_path", "torch.optim.Nope", ""),
        ("torch.nn.Linear", {}, "class_path", "torch.nn.Linear", ""),
    ):
        with pytest.raises(ConfigError) as caught:
            optimizer_class(OptimConfig(optimizer=path, optimizer_args=args))
        assert caught.value.field == f"model.optim.{field}"
        assert said in caught.value.given
        assert caught.value.fix == fix
    assert optimizer_class(OptimConfig(optimizer_args={"fused": True})) is torch.optim.AdamW


def test_muon_in_bf16_is_torchs():
    for shape, options in (((6, 4), {}), ((3, 5), {"nesterov": False, "adjust_lr_fn": "match_rms_adamw"})):
        ours, theirs = (nn.Parameter(torch.ones(shape)) for _ in range(2))
        mixed = MuonWithAdamW([{"params": [ours], "use_muon": True}], lr=0.1, weight_decay=0.2, **options)
        plain = torch.optim.Muon([theirs], lr=0.1, weight_decay=0.2, **options)
        for seed in range(3):
            for param, optimizer in ((ours, mixed), (theirs, plain)):
                param.grad = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
                optimizer.step()
        assert torch.equal(ours, theirs)


def test_what_muon_leaves_takes_adamws_steps(tiny):
    names = hidden_matrices(build_on_meta(tiny("qwen2_moe")))
    assert "model.layers.0.self_attn.q_proj.weight" in names
    assert not [name for name in names if "shared_expert_gate" in name or "embed" in name or "lm_head" in name]
    stacked = build_on_meta(tiny("gpt_oss"))  # the biases of a layer's experts are one tensor of two dimensions
    biases = {name: param for name, param in stacked.named_parameters() if name.endswith("_proj_bias")}
    assert {param.ndim for param in biases.values()} == {2}
    assert not any(is_decayed(*one) for one in biases.items())
    assert hidden_matrices(stacked).isdisjoint(biases)
    assert is_decayed("experts.down_proj", stacked.get_parameter("model.layers.0.mlp.experts.down_proj"))
    ours, theirs = (nn.Parameter(torch.ones(3)) for _ in range(2))
    mixed = MuonWithAdamW([{"params": [ours], "use_muon": False}], adamw_lr=0.1, betas=(0.5, 0.6))
    plain = torch.optim.AdamW([theirs], lr=0.1, betas=(0.5, 0.6), weight_decay=0.0)
    for scale in (1.0, -3.0):
        for param, optimizer in ((ours, mixed), (theirs, plain)):
            param.grad = scale * torch.arange(3.0)
            optimizer.step()
    assert torch.equal(ours, theirs)


ALPHA = 5.0


@pytest.fixture
def embedded(tiny):
    """A function that gives the noise on what is embedded of a batch."""
    model = AutoModelForCausalLM.from_config(tiny("llama", vocab_size=99)).train()
    embed = model.get_input_embeddings()

    def noise(batch, seed=0, rank=0, around=nullcontext):
        torch.manual_seed(seed)
        with embedding_noise(model, ALPHA, batch, rank), around(model):
            noisy = embed(batch["input_ids"])
        return (noisy - embed(batch["input_ids"])).detach()

    return noise


def samples(*lengths):
    return [(torch.arange(1, n + 1).numpy(), torch.ones(n).bool().numpy()) for n in lengths]


def test_a_samples_noise_has_the_norm_of_the_paper(embedded):
    """Uniform in ± alpha / sqrt(L * D): its norm is near alpha / sqrt(3) of so many numbers; in a pack too."""
    padded, packed = embedded(collate(samples(40, 7), 0)), embedded(collate_packs([samples(40, 7)], 60, 0))[0]
    assert (padded[1, 7:] == 0).all()
    for part, length in ((padded[0], 40), (padded[1], 7), (packed[:40], 40), (packed[40:47], 7)):
        bound = ALPHA / (length * padded.shape[-1]) ** 0.5
        assert 0.9 * bound < part.abs().max() <= bound
        assert part.norm() == pytest.approx(ALPHA / 3**0.5, rel=0.15)


def test_it_follows_the_seed_differs_between_ranks_and_spares_references(embedded):
    batch = collate(samples(9, 5), 0)
    assert torch.equal(embedded(batch, seed=3), embedded(batch, seed=3))
    assert not torch.equal(embedded(batch, seed=3), embedded(batch, seed=4))
    assert not torch.equal(embedded(batch, seed=3, rank=1), embedded(batch, seed=3))
    assert not embedded(batch, around=evaluating).any()
