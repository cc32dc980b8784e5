"""The load of experts is that of the router's choices, between two logged steps, whatever is around the experts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from lit_fsdp.callbacks.expert_load import ExpertLoad
from lit_fsdp.config.model import LoraConfig
from lit_fsdp.data.batches import collate, collate_packs
from lit_fsdp.models.experts import grouped_experts, prepare_experts
from lit_fsdp.models.lora import apply_lora
from lit_fsdp.models.loss import ONE_ROW
from lit_fsdp.models.packing import real_tokens
from lit_fsdp.models.parts import RowParts
from tests.unit.models.families import tiny

_ALL = {"target_modules": "all-linear"}
_COPIED = {"target_modules": "attention-only", "modules_to_save": ["experts"]}


@pytest.mark.parametrize(
    ("family", "lora"), [("mixtral", {}), ("mixtral", _ALL), ("gpt_oss", {}), ("qwen3_moe", _COPIED)]
)
def test_what_is_logged_is_what_the_router_chose(family: str, lora: dict[str, Any]):
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(tiny(family)).train()
    for experts in () if lora else grouped_experts(model).values():  # as if two ranks divided them
        experts.expert_group = SimpleNamespace(held=[[0, 2], [1, 3]], degree=2)
    if lora:
        apply_lora(model, LoraConfig(**lora))
        prepare_experts(model)
        for name, param in list(model.named_parameters()):
            if param.is_meta:
                owner = model.get_submodule(name.rpartition(".")[0])
                owner.weight = nn.Parameter(torch.zeros(param.shape))
    logged: list[dict[str, torch.Tensor]] = []
    strategy = SimpleNamespace(root_device=torch.device("cpu"), reduce=lambda x, reduce_op: 2 * x)  # two ranks
    trainer: Any = SimpleNamespace(strategy=strategy, global_step=0, log_every_n_steps=2)
    holder: Any = nn.Module()
    holder.model, holder.log_dict = model, logged.append
    load, chosen = ExpertLoad(), []
    load.on_train_start(trainer, holder)
    gates = [module for name, module in model.named_modules() if name.endswith(("mlp.gate", "mlp.router"))]
    for gate in gates:
        gate.register_forward_hook(lambda gate, args, out: chosen.append(out[-1]))
    for step in range(1, 3):
        ids = torch.full((1, 9), 7) if step == 2 else torch.arange(3, 43).reshape(2, 20)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if step == 1:
            batch["attention_mask"][1, 5:] = 0
        load.on_train_batch_start(trainer, holder, batch, 0)
        model(input_ids=ids, use_cache=False)
        if step == 1:
            chosen[-len(gates) :] = [of_gate[:25] for of_gate in chosen[-len(gates) :]]  # padding does not count
        with torch.no_grad():
            model.eval()(input_ids=ids, use_cache=False)  # validation does not count
            chosen[-len(gates) :] = []
        model.train()
        trainer.global_step = step
        load.on_train_batch_end(trainer, holder, None, None, 0)
    layers = [
        torch.cat([c.flatten() for c in chosen[i :: len(gates)]]).bincount(minlength=4) for i in range(len(gates))
    ]
    shares = [layer / layer.sum() for layer in layers]
    (found,) = logged
    assert found["expert_largest_share"] == pytest.approx(max(float(share.max()) for share in shares))
    loads = [max(float(share[[0, 2]].sum()), float(share[[1, 3]].sum())) * 2 for share in shares]
    assert found.get("expert_rank_load") == (None if lora else pytest.approx(max(loads)))
    assert found["experts_unused"] == sum(int((layer == 0).sum()) for layer in layers)
    entropies = [torch.distributions.Categorical(share).entropy() / torch.tensor(4.0).log() for share in shares]
    assert found["expert_entropy"] == pytest.approx(float(torch.stack(entropies).mean()), rel=1e-5)
    trainer.global_step = 3
    load.on_train_batch_end(trainer, holder, None, None, 0)
    assert len(logged) == 1
    load.on_train_end(trainer, holder)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_padding_is_known_in_rows_packs_and_parts_of_a_row():
    samples = [(np.arange(1, n + 1), np.ones(n, bool)) for n in (5, 2, 4)]
    rows, packs = collate(samples, 0), collate_packs([samples[:2], samples[2:]], 8, 0)
    assert real_tokens(rows).view(3, 5).sum(dim=1).tolist() == [5, 2, 4]
    assert real_tokens(packs).tolist() == [True] * 7 + [False] + [True] * 4 + [False] * 4
    for batch in (rows, packs):
        parts = []
        for rank in range(3):
            group = RowParts.__new__(RowParts)
            group.group, group.method, group.degree, group.rank = None, "all_gather", 3, rank
            cut = group.cut(batch)
            ids, is_real = cut[ONE_ROW]["input_ids"][0], real_tokens(cut)
            assert len(ids) == len(is_real)
            parts += ids[is_real].tolist()
        assert sorted(parts) == sorted(token for sample, _ in samples for token in sample)
    assert real_tokens({"input_ids": rows["input_ids"]}) is None


def test_a_model_without_experts_logs_nothing():
    holder: Any = nn.Module()
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    holder.model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=8, **sizes))
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    trainer: Any = SimpleNamespace(strategy=strategy, global_step=0, log_every_n_steps=1)
    load = ExpertLoad()
    load.on_train_start(trainer, holder)
    trainer.global_step = 1
    load.on_train_batch_end(trainer, holder, None, None, 0)  # would need log_dict
    assert not any(module._forward_pre_hooks for module in holder.modules())
