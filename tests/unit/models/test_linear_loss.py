"""One chunk after another against a formula written out, in every term, dtype and size of chunk."""

from __future__ import annotations

import math
import weakref

import pytest
import torch

from lit_fsdp.models.linear_loss import AnyHead, LinearHead, chunk_rows, head_loss
from lit_fsdp.models.token_scores import LossTerms, Workspace, score_logits

TERMS = {
    "plain": {},
    "z": {"z_loss": 0.02},
    "smoothed": {"label_smoothing": 0.2},
    "scaled": {"scale": 0.3},
    "capped": {"cap": 1.5},
    "all": {"z_loss": 0.02, "label_smoothing": 0.2, "scale": 1.7, "cap": 1.5},
}


def _written_out(hidden, weight, bias, targets, terms):
    """The formula of ``LossTerms``, word by word."""
    logits = hidden @ weight.T + (0 if bias is None else bias)
    z = logits * terms.scale
    if terms.cap is not None:
        z = terms.cap * torch.tanh(z / terms.cap)
    log_p = z - z.exp().sum(-1, keepdim=True).log()
    nll = -log_p[torch.arange(len(targets)), targets]
    smooth = -log_p.mean(-1)
    loss = (1 - terms.label_smoothing) * nll + terms.label_smoothing * smooth
    loss = loss + terms.z_loss * z.exp().sum(-1).log() ** 2
    return loss, nll, -(log_p.exp() * log_p).sum(-1), z.argmax(-1) == targets


def _tensors(dtype=torch.float64, bias=True):
    generator = torch.Generator().manual_seed(0)
    shapes = [(11, 6), (23, 6), (23,)]
    hidden, weight, offset = (torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)
    targets = torch.randint(0, 23, (11,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), offset.requires_grad_() if bias else None, targets


def _kinds(hidden, weight, bias, kind):
    if kind == "linear":
        return LinearHead(weight, bias, weight.dtype)
    head = torch.nn.Linear(6, 23, bias=bias is not None)
    head.weight = torch.nn.Parameter(weight)  # the very tensors
    head._parameters["weight"] = weight
    if bias is not None:
        head._parameters["bias"] = bias
    return AnyHead(head, head.forward)


@pytest.mark.parametrize("kind", ["linear", "any"])
@pytest.mark.parametrize("num_rows", [1, 4, 11, 100])
@pytest.mark.parametrize("terms", TERMS)
def test_loss_and_gradients_are_those_of_the_formula(terms, num_rows, kind):
    hidden, weight, bias, targets = _tensors()
    made = LossTerms(**TERMS[terms])
    loss, nll, entropy, correct = _written_out(hidden, weight, bias, targets, made)
    wanted = torch.autograd.grad(loss.sum(), [hidden, weight, bias])
    found, scores = head_loss(_kinds(hidden, weight, bias, kind), hidden, targets, made, num_rows)
    assert found.shape == (1, 1, 1)
    assert found._base is None  # FSDP2 warns of views
    assert torch.allclose(found.sum(), loss.sum(), rtol=1e-12)
    for mine, theirs in zip(
        scores, (nll, loss, made.z_loss * _lse(hidden, weight, bias, made) ** 2, entropy), strict=False
    ):
        assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-12)
    assert torch.equal(scores.correct, correct)
    grads = torch.autograd.grad(3 * found.sum(), [hidden, weight, bias])
    for mine, theirs in zip(grads, wanted, strict=True):
        assert torch.allclose(mine, 3 * theirs, rtol=1e-9, atol=1e-12)


def _lse(hidden, weight, bias, terms):
    z = (hidden @ weight.T + bias) * terms.scale
    return (z if terms.cap is None else terms.cap * torch.tanh(z / terms.cap)).logsumexp(-1)


@pytest.mark.parametrize("kind", ["linear", "any"])
def test_no_tokens_give_zeros_with_a_graph(kind):
    hidden, weight, bias, targets = _tensors()
    loss, scores = head_loss(_kinds(hidden, weight, bias, kind), hidden[:0], targets[:0], LossTerms(z_loss=1.0), 4)
    grads = torch.autograd.grad(loss.sum(), [hidden, weight, bias])
    assert loss.item() == 0
    assert [len(s) for s in scores] == [0] * 5
    assert not any(grad.any() for grad in grads)


def test_only_what_is_trained_gets_a_gradient():
    hidden, weight, bias, targets = _tensors()
    frozen = LinearHead(weight.detach(), bias.detach(), weight.dtype)
    loss, _ = head_loss(frozen, hidden, targets, LossTerms(), 4)
    (grad,) = torch.autograd.grad(loss.sum(), [hidden])
    assert frozen.tensors == []
    assert frozen._grads == {}
    wanted = torch.autograd.grad(_written_out(hidden, weight, bias, targets, LossTerms())[0].sum(), [hidden])[0]
    assert torch.allclose(grad, wanted)
    with torch.no_grad():
        assert not head_loss(LinearHead(weight, bias, weight.dtype), hidden, targets, LossTerms(), 4)[0].requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_the_head_are_summed_in_fp32(dtype):
    """Many small chunks lose no more than one product of all rows."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(512, 16, generator=generator).to(dtype)
    weight = torch.randn(40, 16, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, 40, (512,), generator=generator)
    exact = weight.detach().double().requires_grad_()
    (wanted,) = torch.autograd.grad(
        torch.nn.functional.cross_entropy(hidden.double() @ exact.T, targets, reduction="sum"), [exact]
    )

    def error(num_rows):
        loss, _ = head_loss(LinearHead(weight, None, dtype), hidden, targets, LossTerms(), num_rows)
        (grad,) = torch.autograd.grad(loss.sum(), [weight])
        return float((grad.double() - wanted).norm() / wanted.norm())

    assert error(2) < 1.5 * error(512)
    assert error(2) < {torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]


def test_a_tiny_probability_of_the_right_token_is_no_infinity():
    logits = torch.zeros(1, 5)
    logits[0, 0] = 300.0
    scores, grad = score_logits(logits.clone(), torch.tensor([3]), LossTerms(), with_grad=True)
    assert scores.nll.item() == pytest.approx(300.0)
    assert grad.tolist() == [[1.0, 0.0, 0.0, -1.0, 0.0]]
    assert scores.entropy.item() == pytest.approx(0.0, abs=1e-4)


def test_buffers_are_written_into_again():
    space = Workspace()
    like = torch.zeros(4, 3)
    first = space.take("a", like, torch.float32)
    assert space.take("a", like[:2], torch.float32).data_ptr() == first.data_ptr()
    assert space.take("b", like, torch.float32).data_ptr() != first.data_ptr()
    for other in (space.take("a", like, torch.bfloat16), space.take("a", like[:2], torch.float64, (5, 7))):
        assert other.data_ptr() != first.data_ptr()
    assert (other.shape, other.dtype) == ((5, 7), torch.float64)


def test_buffers_of_another_batch_change_nothing():
    """Batches of different lengths, validation before and between, another dtype, one batch forward before backward."""
    space = Workspace()
    cases = ((9, "float64", True), (12, "float64", False), (5, "float32", False), (11, "bfloat16", False))
    for rows, dtype, inference in cases:
        hidden, weight, bias, targets = _tensors()
        hidden, targets = hidden[:rows], targets[:rows]
        if inference:
            with torch.inference_mode():
                head_loss(LinearHead(weight, bias, weight.dtype, space), hidden, targets, LossTerms(), 4)
            continue
        found = []
        for used in (None, space):
            leaves = [t.detach().to(getattr(torch, dtype)).requires_grad_() for t in (hidden, weight, bias)]
            loss, scores = head_loss(LinearHead(*leaves[1:], leaves[1].dtype, used), leaves[0], targets, LossTerms(), 4)
            head_loss(LinearHead(*leaves[1:], leaves[1].dtype, used), leaves[0] * 3, targets, LossTerms(), 3)
            loss.sum().backward()
            found.append([loss.detach(), *scores, *(leaf.grad for leaf in leaves)])
        assert all(torch.equal(plain, kept) for plain, kept in zip(*found, strict=True))


def test_gradients_are_given_away_once():
    hidden, weight, bias, targets = _tensors()
    loss, _ = head_loss(LinearHead(weight, bias, weight.dtype), hidden, targets, LossTerms(), 4)
    loss.sum().backward(retain_graph=True)
    with pytest.raises(AssertionError, match="given away once"):
        loss.sum().backward()


def test_all_logits_never_exist():
    """Nothing of (N, V) is made: with 64 chunks the largest tensor is a chunk's, or the head's gradient."""
    hidden, weight = torch.randn(512, 8, requires_grad=True), torch.randn(1000, 8, requires_grad=True)
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(t.numel() for t in (out if isinstance(out, (tuple, list)) else [out]) if torch.is_tensor(t))
            return out

    with Watch():
        loss, _ = head_loss(
            LinearHead(weight, None, weight.dtype), hidden, torch.randint(0, 1000, (512,)), LossTerms(), 8
        )
        loss.sum().backward()
    assert max(sizes) == 8 * 1000 == weight.numel()


def test_the_gradient_is_freed_by_backward():
    hidden, weight, _, targets = _tensors(bias=False)
    loss, _ = head_loss(LinearHead(weight, None, weight.dtype), hidden, targets, LossTerms(), 4)
    kept = weakref.ref(loss.grad_fn.gradients[0])
    loss.sum().backward()
    hidden.grad = None
    assert loss.grad_fn.gradients is None
    assert kept() is None


@pytest.mark.parametrize(("vocab", "width", "rows"), [(49152, 576, 512), (128256, 4096, 1024), (10**9, 8, 2)])
def test_default_size_of_a_chunk(vocab, width, rows):
    assert chunk_rows(vocab, width) == rows
    assert math.prod((vocab, rows, 4)) <= max(96 * 2**20, vocab * width) or rows == 2


def test_a_sum_too_large_for_fp16_fits_once_it_is_scaled():
    """A loss scale that falls helps only if nothing has overflowed before it is known."""
    weight = torch.zeros(8, 4, dtype=torch.float16, requires_grad=True)
    hidden = torch.full((20_000, 4), 8.0, dtype=torch.float16, requires_grad=True)
    loss, _ = head_loss(LinearHead(weight, None, torch.float16), hidden, torch.full((20_000,), 3), LossTerms(), 100)
    (loss.sum() / 1024).backward()
    assert float(weight.grad[3, 0]) == pytest.approx(-20_000 * 8 * 7 / 8 / 1024, rel=2e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_third_of_a_loss_has_a_third_of_the_gradients(dtype):
    """Three micro-batches to a step: rounded to bf16 first, the factor would make all gradients 0.2 % larger."""

    def gradients(factor):
        hidden, weight, _, targets = _tensors(bias=False)
        leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in (hidden, weight)]
        loss, _ = head_loss(LinearHead(leaves[1], None, dtype), leaves[0], targets, LossTerms(), 4)
        (loss.sum() * factor).backward()
        return [leaf.grad.double() for leaf in leaves]

    for whole, third in zip(gradients(1.0), gradients(1 / 3), strict=True):
        share = float((third * whole).sum() / whole.square().sum())
        assert share == pytest.approx(1 / 3, rel=1e-3 if dtype != torch.float32 else 1e-6)
