"""Blocks under ``torch.compile``: one compilation for equal blocks, the same gradients, a budget that is kept."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from lit_fsdp.config.strategy import ActivationConfig
from lit_fsdp.parallel.activation import prepare_blocks, recomputes

ROWS, WIDTH, BLOCKS = 8, 16, 10  # more blocks than torch compiles versions of one function
MODES = [
    {},
    {"mode": "full"},
    {"mode": "selective"},
    {"mode": "memory_budget", "memory_budget": 0.5},
    {"mode": "full", "offload_activations": True},
    {"offload_activations": True},
]


class Block(nn.Module):
    """Two linear layers around a chain of cheap ops; no dropout, whose numbers the compiler draws in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Residual."""
        return x + self.second(self.first(x).sin().exp().tanh())


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The compiler's front and its split of forward and backward, without C++ code."""
    monkeypatch.setattr("lit_fsdp.parallel.activation.BACKEND", "aot_eager")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def step(options: dict, compile: bool, blocks: int = BLOCKS) -> tuple[float, list[torch.Tensor], int]:
    """Loss, gradients, and bytes saved for the backward pass without parameters."""
    torch.manual_seed(0)
    net = nn.Sequential(*(Block() for _ in range(blocks)))
    prepare_blocks(net, ActivationConfig(**options), compile)
    own = {p.untyped_storage().data_ptr() for p in net.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = net(torch.randn(ROWS, WIDTH, requires_grad=True)).square().mean()
    loss.backward()
    num_bytes = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    return float(loss.detach()), [p.grad for p in net.parameters()], num_bytes


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # torch about itself
@pytest.mark.parametrize("options", MODES, ids=lambda options: "-".join(options) or "none")
def test_equal_blocks_compile_once_and_gradients_agree(options: dict):
    from torch._dynamo.utils import counters

    loss, grads, _ = step({}, compile=False)
    counters.clear()
    compiled_loss, compiled_grads, _ = step(options, compile=True)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert compiled_loss == pytest.approx(loss, rel=1e-5)
    for wanted, found in zip(grads, compiled_grads, strict=True):
        assert (found - wanted).norm() <= 1e-5 * wanted.norm()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_smaller_budget_saves_less():
    import torch._functorch.config as functorch_config

    saved = {}
    for budget in (0.0, 1.0):
        torch._dynamo.reset()
        saved[budget] = step({"mode": "memory_budget", "memory_budget": budget}, compile=True, blocks=2)[2]
    activation = ROWS * WIDTH * 4
    # budget 0: inputs of both blocks and the last output; budget 1: results of the linear layers too
    assert saved[0.0] == 3 * activation
    assert saved[1.0] >= 5 * activation
    assert functorch_config.activation_memory_budget == 1.0  # only while a block is compiled


def test_what_a_budgeted_block_says_it_does():
    block = Block()
    prepare_blocks([block], ActivationConfig(mode="memory_budget", memory_budget=0.5), compile=True)
    assert recomputes(block) == "budget 0.5"
    plain = Block()
    prepare_blocks([plain], ActivationConfig(), compile=True)
    assert recomputes(plain) == "no"
    assert plain.forward.__wrapped__.__func__ is Block.forward


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler (g++) for torch.compile on this machine")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_default_backend_agrees_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lit_fsdp.parallel.activation.BACKEND", "inductor")
    loss, grads, _ = step({}, compile=False, blocks=2)
    compiled_loss, compiled_grads, _ = step({"mode": "selective"}, compile=True, blocks=2)
    assert compiled_loss == pytest.approx(loss, rel=1e-5)
    for wanted, found in zip(grads, compiled_grads, strict=True):
        assert (found - wanted).norm() <= 1e-5 * wanted.norm()
