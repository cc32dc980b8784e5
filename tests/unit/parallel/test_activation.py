"""Activation checkpointing: one more forward of the blocks, by FLOP count, and the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lit_fsdp.config.activation import ActivationConfig
from lit_fsdp.parallel.activation import apply_activation_checkpointing, is_checkpointed

WIDTH, ROWS, BLOCKS = 16, 4, 3
FORWARD = 2 * ROWS * WIDTH * WIDTH  # of one linear layer; its backward costs twice that


class Net(nn.Module):
    """Blocks of two linear layers and dropout, and a head outside the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3))
            for _ in range(BLOCKS)
        )
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One number."""
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).square().mean()


def step(mode: str) -> tuple[int, float, list[torch.Tensor]]:
    """FLOPs, loss and gradients of one step."""
    torch.manual_seed(0)
    net = Net()
    apply_activation_checkpointing(net.blocks, ActivationConfig(mode=mode))
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        loss = net(x)
        loss.backward()
    return counter.get_total_flops(), float(loss.detach()), [p.grad for p in net.parameters()]


def test_full_costs_one_more_forward_of_the_blocks():
    assert step("none")[0] == 3 * (2 * BLOCKS + 1) * FORWARD
    assert step("full")[0] - step("none")[0] == 2 * BLOCKS * FORWARD


def test_loss_and_gradients_are_bit_equal_with_dropout():
    (_, kept, grads), (_, recomputed, again) = step("none"), step("full")
    assert recomputed == kept
    assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))


def test_only_the_inputs_of_the_blocks_are_kept():
    def saved_elements(mode: str) -> int:
        net = Net()
        apply_activation_checkpointing(net.blocks, ActivationConfig(mode=mode))
        own = {p.untyped_storage().data_ptr() for p in net.parameters()}
        sizes: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.untyped_storage().data_ptr() not in own:
                sizes[tensor.untyped_storage().data_ptr()] = tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = net.train()(torch.randn(ROWS, WIDTH, requires_grad=True))
        assert loss.requires_grad
        return sum(sizes.values())

    assert saved_elements("full") == (BLOCKS + 2) * ROWS * WIDTH  # and the head's input and output
    assert saved_elements("none") >= (4 * BLOCKS + 2) * ROWS * WIDTH  # input, linear, GELU and mask of each block


def test_evaluation_recomputes_nothing():
    net = Net()
    apply_activation_checkpointing(net.blocks, ActivationConfig(mode="full"))
    net.eval()
    with FlopCounterMode(display=False) as counter:
        net(torch.randn(ROWS, WIDTH, requires_grad=True)).backward()
    assert counter.get_total_flops() == 3 * (2 * BLOCKS + 1) * FORWARD


def test_names_stay_and_twice_is_once():
    net = Net()
    names = [name for name, _ in net.named_parameters()]
    for _ in range(2):
        apply_activation_checkpointing(net.blocks, ActivationConfig(mode="full"))
    assert [name for name, _ in net.named_parameters()] == names
    assert all(is_checkpointed(block) for block in net.blocks)
    assert not hasattr(net.blocks[0].forward.__wrapped__, "__wrapped__")
    assert not is_checkpointed(net.head)


@pytest.mark.parametrize("mode", ["none"])
def test_none_changes_nothing(mode: str):
    net = Net()
    apply_activation_checkpointing(net.blocks, ActivationConfig(mode=mode))
    assert not any(is_checkpointed(block) for block in net.blocks)
