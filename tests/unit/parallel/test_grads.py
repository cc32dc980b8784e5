"""Loss scale, the policy on gradients that are not finite, and the order of things in a step."""

from __future__ import annotations

import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.demos.boring_classes import BoringModel

from lit_fsdp.errors import ConfigError, NonFiniteGradientError
from lit_fsdp.parallel import grads
from lit_fsdp.parallel.grads import GuardedSteps
from lit_fsdp.strategy import fsdp_strategy


def plugin_of(policy: Any, is_fp16: bool = False) -> GuardedSteps:
    """Without a Trainer."""
    nothing = {"shard_group": None, "has_copies": False, "root_device": torch.device("cpu"), "reshard": lambda: None}
    strategy = SimpleNamespace(**nothing, world_size=1, used_params=lambda optimizer: ([], torch.empty(0)))
    plugin = GuardedSteps(policy, is_fp16, strategy)
    plugin._after_closure = lambda model, optimizer: None  # type: ignore[method-assign]
    return plugin


def step(plugin: GuardedSteps, weight: torch.nn.Parameter, gradient: list[float]) -> None:
    """One SGD step in which the loss has this gradient."""
    optimizer = torch.optim.SGD([weight], lr=1.0)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (weight * torch.tensor(gradient)).sum()
        plugin.pre_backward(loss, mock.MagicMock()).backward()
        return loss.detach()

    plugin.optimizer_step(optimizer, None, closure)


def test_the_loss_scale_cancels_halves_on_overflow_and_doubles_after_good_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grads, "_GROWTH_INTERVAL", 2)
    plugin, weight = plugin_of("error", is_fp16=True), torch.nn.Parameter(torch.zeros(2))
    plugin.loss_scale = 4.0
    step(plugin, weight, [3.0, 4.0])
    assert weight.tolist() == [-3.0, -4.0]
    step(plugin, weight, [math.inf, 0.0])  # skipped, although the policy is error: the scale can fall
    assert (plugin.loss_scale, plugin.num_overflow_steps, plugin.num_skipped_steps) == (2.0, 1, 0)
    assert weight.tolist() == [-3.0, -4.0]
    for gradient, scale in ((0.0, 2.0), (0.0, 4.0), (math.inf, 2.0), (math.inf, 1.0)):
        step(plugin, weight, [gradient, 0.0])
        assert plugin.loss_scale == scale
    with pytest.raises(NonFiniteGradientError):
        step(plugin, weight, [math.inf, 0.0])  # it is not the scale


def test_scale_and_counters_survive_a_checkpoint() -> None:
    plugin, again, without = plugin_of("skip", is_fp16=True), plugin_of("skip", is_fp16=True), plugin_of("skip")
    plugin.allows(math.inf)
    plugin.allows(1.0)
    for other in (again, without):
        other.load_state_dict(plugin.state_dict())
    assert again.state_dict() == plugin.state_dict()
    assert again.loss_scale == 2.0**15
    assert (without.loss_scale, without.num_overflow_steps) == (None, 1)  # resumed in another precision


def test_one_norm_of_all_in_fp32():
    plugin, weight = plugin_of("error"), torch.nn.Parameter(torch.zeros(10_000, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    plugin.clip_grad_by_norm(torch.optim.SGD([weight]), 1.0)
    assert float(plugin.last_grad_norm) == pytest.approx(100.0, rel=1e-6)
    weight.grad = torch.ones_like(weight)
    plugin.clip_grad_by_norm(torch.optim.SGD([weight]), 150.0)
    assert bool((weight.grad == 1).all())  # what is below the limit is left as it is


@pytest.mark.filterwarnings("ignore:.*GPU available but not used")
def test_fsdp1_accumulates_nothing_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """On accelerators, from which alone it offloads, it would keep the gradient of the last micro-batch."""
    later: dict[str, Any] = {"callbacks": [GradientAccumulationScheduler({3: 2})]}
    for engine, options, is_right in (
        ("fsdp1", {"accumulate_grad_batches": 2}, False),
        ("fsdp1", later, False),
        ("fsdp1", {}, True),
        ("fsdp2", later, True),
    ):
        strategy: Any = fsdp_strategy(engine=engine, cpu_offload=True)
        trainer = Trainer(accelerator="cpu", devices=1, logger=False, strategy=strategy, **options)
        module = BoringModel()
        monkeypatch.setattr(type(strategy), "root_device", torch.device("cuda", 0))
        strategy.check_environment(trainer, module, "validate")
        refused = pytest.raises(ConfigError, match="fsdp1 with cpu_offload and 2 micro-batches per optimizer step")
        with nullcontext() if is_right else refused:
            strategy.check_environment(trainer, module, "fit")
        trainer.accumulate_grad_batches, module.trainer = 2, trainer  # by a callback, while it trains
        strategy._lightning_module, strategy._root = module, mock.MagicMock()
        with refused if engine == "fsdp1" else nullcontext():
            strategy.block_backward_sync()
