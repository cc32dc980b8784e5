"""Activation checkpointing: what is computed again, by FLOP count; what is kept; and always the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from lit_fsdp.config.strategy import ActivationConfig
from lit_fsdp.parallel.activation import prepare_blocks, recomputes

WIDTH, ROWS, TOKENS, BLOCKS = 16, 2, 4, 5
LINEAR = 2 * ROWS * TOKENS * WIDTH * WIDTH  # FLOPs of one linear layer forward; its backward costs twice that
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default  # torch counts no FLOPs for it
ACTIVATION_BYTES = ROWS * TOKENS * WIDTH * 4
MODES = {
    "none": {},
    "full": {"mode": "full"},
    "every_n": {"mode": "every_n", "n": 2},
    "selective": {"mode": "selective"},
    "offload": {"offload_activations": True},
    "full_offload": {"mode": "full", "offload_activations": True},
    "selective_offload": {"mode": "selective", "offload_activations": True},
}


class Calls(TorchDispatchMode):
    """How often an op runs."""

    def __init__(self, op: object) -> None:
        super().__init__()
        self.op, self.number = op, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += func is self.op
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    """Attention and one linear layer on each side, with dropout."""

    gradient_checkpointing = False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Residual."""
        heads = F.gelu(self.first(x)).unsqueeze(1) * scale
        mixed = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).squeeze(1)
        return x + self.drop(self.second(mixed))


class Net(nn.Module):
    """Blocks, and a head outside them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One number."""
        scale = torch.linspace(0.5, 1.5, WIDTH)
        for block in self.blocks:
            x = block(x, scale=scale)
        return self.head(x).square().mean()


def step(options: dict) -> tuple[tuple[int, int], float, list[torch.Tensor], Net]:
    """FLOPs and calls of attention, loss and gradients of one step."""
    torch.manual_seed(0)
    net = Net()
    prepare_blocks(net.blocks, ActivationConfig(**options))
    x = torch.randn(ROWS, TOKENS, WIDTH, requires_grad=True)
    with FlopCounterMode(display=False) as counter, Calls(ATTENTION) as calls:
        loss = net(x)
        loss.backward()
    return (counter.get_total_flops(), calls.number), float(loss.detach()), [p.grad for p in net.parameters()], net


@pytest.fixture(scope="module")
def plain() -> tuple[tuple[int, int], float, list[torch.Tensor], Net]:
    return step({})


def test_recomputed_ops_and_equal_bits_with_dropout(plain):
    assert plain[0] == (3 * (2 * BLOCKS + 1) * LINEAR, BLOCKS)
    for name, linears, attentions in (
        ("full", 2 * BLOCKS, BLOCKS),
        ("every_n", 2 * 3, 3),  # blocks 0, 2 and 4
        ("selective", 0, 0),
        ("offload", 0, 0),
        ("full_offload", 2 * BLOCKS, BLOCKS),
        ("selective_offload", 0, 0),
    ):
        (flops, calls), loss, grads, _ = step(MODES[name])
        assert (flops - plain[0][0], calls - plain[0][1]) == (linears * LINEAR, attentions), name
        assert loss == plain[1], name
        assert all(torch.equal(a, b) for a, b in zip(grads, plain[2], strict=True)), name


def saved_bytes(options: dict, compile: bool = False) -> int:
    """Bytes of distinct storages saved between forward and backward, without parameters."""
    net = Net()
    for block in net.blocks:
        block.drop = nn.Identity()  # whose numbers the compiler draws in its own way
    prepare_blocks(net.blocks, ActivationConfig(**options), compile)
    own = {p.untyped_storage().data_ptr() for p in net.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = net.train()(torch.randn(ROWS, TOKENS, WIDTH, requires_grad=True))
    assert loss.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def test_full_keeps_only_the_inputs_of_the_blocks():
    assert saved_bytes({"mode": "full"}) == (BLOCKS + 2) * ACTIVATION_BYTES  # and the head's input and output
    assert saved_bytes({}) > 4 * BLOCKS * ACTIVATION_BYTES
    assert saved_bytes({"mode": "full"}) < saved_bytes({"mode": "every_n"}) < saved_bytes({})


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # torch about itself
def test_a_smaller_budget_saves_less(monkeypatch: pytest.MonkeyPatch):
    """With the compiler's front and its split of forward and backward, without C++ code."""
    import torch._functorch.config as functorch_config

    monkeypatch.setattr("lit_fsdp.parallel.activation.BACKEND", "aot_eager")
    saved = []
    for budget in (0.0, 1.0):
        torch._dynamo.reset()
        saved.append(saved_bytes({"mode": "memory_budget", "memory_budget": budget}, compile=True))
    torch._dynamo.reset()
    assert saved[0] < saved[1] / 2
    assert functorch_config.activation_memory_budget == 1.0  # only while a block is compiled


def test_names_stay_and_the_last_mode_holds(plain):
    """As of a second Trainer on the same module: blocks are never recomputed twice, nor in the mode of before."""
    torch.manual_seed(0)
    net = Net()
    names = [name for name, _ in net.named_parameters()]
    for options, wanted in (
        (MODES["full"], ["full"] * 5),
        (MODES["selective"], ["selective"] * 5),
        (MODES["offload"], ["no, offloaded"] * 5),
        (MODES["full_offload"], ["full, offloaded"] * 5),
        (MODES["every_n"], ["full", "no", "full", "no", "full"]),  # the first one always
        ({"mode": "every_n", "n": 3}, ["full", "no", "no", "full", "no"]),
        (MODES["none"], ["no"] * 5),
    ):
        prepare_blocks(net.blocks, ActivationConfig(**options))
        assert [recomputes(block) for block in net.blocks] == wanted
    assert [name for name, _ in net.named_parameters()] == names
    with FlopCounterMode(display=False) as counter:
        net(torch.randn(ROWS, TOKENS, WIDTH, requires_grad=True)).backward()
    assert counter.get_total_flops() == plain[0][0]


def test_activations_move_and_parameters_stay(monkeypatch: pytest.MonkeyPatch):
    moved: list[tuple[int, ...]] = []
    cpu = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda t: (moved.append(tuple(t.shape)), cpu(t))[1])
    step(MODES["full_offload"])
    assert moved.count((ROWS, TOKENS, WIDTH)) == BLOCKS  # the input of each block
    moved.clear()
    step(MODES["offload"])
    assert len(moved) >= 5 * BLOCKS
    assert (WIDTH, WIDTH) not in moved  # weights, transposed ones


def test_evaluation_recomputes_nothing(plain):
    for name in ("full", "selective", "offload"):
        net = Net().eval()
        prepare_blocks(net.blocks, ActivationConfig(**MODES[name]))
        with FlopCounterMode(display=False) as counter:
            net(torch.randn(ROWS, TOKENS, WIDTH, requires_grad=True)).backward()
        assert counter.get_total_flops() == plain[0][0], name
