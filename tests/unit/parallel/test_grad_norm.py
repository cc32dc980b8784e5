"""Norms and clipping on plain tensors, against torch's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lit_fsdp.parallel.grad_norm import clip_by_norm, clip_by_value, total_norm


def params(*grads: torch.Tensor | None) -> list[nn.Parameter]:
    made = []
    for grad in grads:
        param = nn.Parameter(torch.zeros(3 if grad is None else grad.shape))
        param.grad = grad
        made.append(param)
    return made


def test_the_norm_of_all_together():
    assert total_norm([torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])], None).item() == 5.0


def test_the_norm_is_accumulated_in_fp32():
    grads = [torch.full((1000,), 1.0, dtype=torch.bfloat16) for _ in range(10)]
    norm = total_norm(grads, None)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(100.0, rel=1e-6)


@pytest.mark.parametrize("grads", [[], [torch.empty(0, 4)]])
def test_a_rank_that_holds_nothing_has_norm_zero(grads: list[torch.Tensor]):
    assert clip_by_norm(grads, 1.0, None).item() == 0.0


def test_clipping_equals_torchs():
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(shape, generator=generator) for shape in ((5, 7), (11,), (2, 3, 4))]
    wanted = params(*(grad.clone() for grad in grads))
    norm = torch.nn.utils.clip_grad_norm_(wanted, 0.7)
    assert clip_by_norm(grads, 0.7, None) == pytest.approx(norm.item(), rel=1e-6)
    for mine, theirs in zip(grads, wanted, strict=True):
        torch.testing.assert_close(mine, theirs.grad, rtol=1e-6, atol=0)
    assert total_norm(grads, None).item() == pytest.approx(0.7, rel=1e-5)


def test_a_small_norm_is_left_alone_bit_for_bit():
    grad = torch.tensor([0.1, 0.2, 0.3])
    before = grad.clone()
    clip_by_norm([grad], 1.0, None)
    assert torch.equal(grad, before)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_norm_that_is_no_number_shows_everywhere(bad: float):
    grads = [torch.tensor([bad]), torch.tensor([1.0])]
    assert not clip_by_norm(grads, 1.0, None).isfinite()
    assert not grads[0].isfinite().any()
    assert grads[1].item() == 0.0 if bad == float("inf") else grads[1].isnan().all()


def test_clipping_by_value():
    grad = torch.tensor([-3.0, -0.5, 0.5, 3.0])
    clip_by_value([grad], 1.0)
    assert grad.tolist() == [-1.0, -0.5, 0.5, 1.0]
