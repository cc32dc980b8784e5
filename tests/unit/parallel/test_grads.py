"""Loss scale, the policy on gradients that are not finite, and the order of things in a step."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from lit_fsdp.errors import NonFiniteGradientError
from lit_fsdp.parallel.grads import GuardedSteps, LossScale, StepGuard


class Plugin(GuardedSteps):
    """Without a Trainer."""

    clip: Any = None

    def __init__(self, guard: StepGuard) -> None:
        nothing = {
            "shard_group": None,
            "has_copies": False,
            "root_device": torch.device("cpu"),
            "reshard": lambda: None,
        }
        super().__init__(guard, SimpleNamespace(**nothing, used_params=lambda optimizer: ([], torch.empty(0))))

    def _after_closure(self, model: Any, optimizer: Any) -> None:
        if self.clip is not None:
            self.clip(optimizer)


def step(plugin: Plugin, weight: torch.nn.Parameter, gradient: list[float]) -> torch.Tensor:
    """One SGD step in which the loss has this gradient."""
    optimizer = torch.optim.SGD([weight], lr=1.0)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (weight * torch.tensor(gradient)).sum()
        plugin.pre_backward(loss, mock.MagicMock()).backward()
        return loss.detach()

    plugin.optimizer_step(optimizer, None, closure)
    return weight.detach().clone()


def test_the_loss_scale_cancels_halves_on_overflow_and_doubles_after_good_steps() -> None:
    guard = StepGuard("error", 3, LossScale(initial=4.0, growth_interval=2))
    plugin, weight = Plugin(guard), torch.nn.Parameter(torch.zeros(2))
    assert step(plugin, weight, [3.0, 4.0]).tolist() == [-3.0, -4.0]
    assert guard.loss_scale is not None
    step(plugin, weight, [math.inf, 0.0])  # skipped, although the policy is error: the scale can fall
    assert (guard.loss_scale.value, guard.num_overflow_steps, guard.num_skipped_steps) == (2.0, 1, 0)
    assert weight.tolist() == [-3.0, -4.0]
    for _ in range(2):
        step(plugin, weight, [0.0, 0.0])
    assert guard.loss_scale.value == 4.0
    for _ in range(2):
        step(plugin, weight, [math.inf, 0.0])
    assert guard.loss_scale.value == 1.0
    with pytest.raises(NonFiniteGradientError):
        step(plugin, weight, [math.inf, 0.0])  # it is not the scale


def test_scale_and_counters_survive_a_checkpoint() -> None:
    guard = StepGuard("skip", 5, LossScale(initial=8.0))
    guard.allows(math.inf)
    guard.allows(1.0)
    again = StepGuard("skip", 5, LossScale())
    again.load_state_dict(guard.state_dict())
    assert again.state_dict() == guard.state_dict()
    assert again.state_dict()["loss_scale"] == 4.0
    without = StepGuard("skip", 5)
    without.load_state_dict(guard.state_dict())  # resumed in another precision
    assert without.loss_scale is None
    assert without.num_overflow_steps == 1


def test_one_norm_of_all_in_fp32():
    plugin = Plugin(StepGuard("error", 1))
    for grads, wanted in (
        ([torch.full((1000,), 1.0, dtype=torch.bfloat16) for _ in range(10)], 100.0),
        ([torch.empty(0, 4)], 0.0),  # a rank that holds nothing
    ):
        params = [torch.nn.Parameter(torch.empty_like(grad)) for grad in grads]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        plugin.clip_grad_by_norm(torch.optim.SGD(params), 1.0)
        assert plugin.last_grad_norm is not None
        assert plugin.last_grad_norm.dtype == torch.float32
        assert plugin.last_grad_norm.item() == pytest.approx(wanted, rel=1e-6)
