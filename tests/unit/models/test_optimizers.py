"""The optimizer of a recipe: its class and arguments, and what it keeps, by what it really keeps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lit_fsdp.config.model import OptimConfig
from lit_fsdp.errors import ConfigError
from lit_fsdp.models.optimizers import optimizer_class, state_bytes


def test_what_is_refused_in_one_sentence():
    for path, args, field, said, fix in (
        ("torch.optim.AdamW", {"fusd": True}, "init_args.fusd", "no argument of torch.optim.AdamW", "write fused"),
        ("lit_fsdp.MuonWithAdamW", {"momentun": 0.9}, "init_args.momentun", "no argument", "write momentum"),
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


def test_bytes_are_those_of_the_live_state():
    for path, args, known in (
        ("torch.optim.AdamW", {}, True),
        ("torch.optim.AdamW", {"amsgrad": True}, True),
        ("torch.optim.SGD", {}, True),
        ("torch.optim.SGD", {"momentum": 0.9}, True),
        ("torch.optim.Adafactor", {}, False),
    ):
        optim = OptimConfig(optimizer=path, optimizer_args=args)
        param = nn.Parameter(torch.ones(8, 4))
        live = optimizer_class(optim)([param], lr=0.1, **args)
        param.grad = torch.ones_like(param)
        live.step()
        kept = sum(v.numel() * 4 for v in live.state[param].values() if torch.is_tensor(v) and v.dim())
        found, of = state_bytes(optim, nn.Module(), 4)
        assert (of == path) is known
        assert found(param, param.numel()) == (kept if known else 2 * 32 * 4)
