"""Activations in host memory: what moves, what stays, and that strides survive."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lit_fsdp.parallel.host_copies import HostCopy, OffloadedForward, to_host

WIDTH = 16


def test_views_of_a_flat_parameter_stay():
    flat = nn.Parameter(torch.randn(WIDTH * WIDTH))
    module = nn.Module()
    forward = OffloadedForward(module, lambda x: x @ flat.view(WIDTH, WIDTH).t())
    forward(torch.randn(3, WIDTH, requires_grad=True)).sum().backward()
    assert forward.num_bytes == 3 * WIDTH * 4
    assert flat.grad is not None


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(4, 6),
        torch.randn(4, 6).t(),
        torch.randn(4, 6)[:, 2:4],
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.tensor(1.5),
        torch.empty(0, 3),
        torch.arange(6).bool(),
    ],
)
def test_a_copy_comes_back_with_its_strides(tensor: torch.Tensor):
    copy = to_host(tensor)
    assert isinstance(copy, HostCopy)
    back = copy.restore()
    assert torch.equal(back, tensor)
    assert back.stride() == tensor.stride()
    assert copy.num_bytes == tensor.numel() * tensor.element_size()


def test_expanded_and_sparse_tensors_stay():
    for tensor in (torch.randn(1, 3).expand(4, 3), torch.eye(3).to_sparse()):
        assert to_host(tensor) is tensor
