"""Activation checkpointing: what is computed again, by FLOP count; what is kept; and always the same bits."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from lit_fsdp.config.strategy import ActivationConfig
from lit_fsdp.models.build import build_on_meta
from lit_fsdp.parallel import activation
from lit_fsdp.parallel.activation import prepare_blocks, recomputes
from tests.unit.models.families import tiny

WIDTH, ROWS, TOKENS, BLOCKS = 16, 2, 4, 5
LINEAR = 2 * ROWS * TOKENS * WIDTH * WIDTH  # FLOPs of one linear layer forward; its backward costs twice that
# torch counts none of these, or from 2.15 on the second; here each forward call is one
ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda *args, **kwargs: 1,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda *args, **kwargs: 0,
}
PLAIN = 3 * (2 * BLOCKS + 1) * LINEAR + BLOCKS
# options; linear layers and attentions that run again; what the blocks say
MODES = {
    "none": ({}, 0, 0, ["no"] * 5),
    "full": ({"mode": "full"}, 2 * BLOCKS, BLOCKS, ["full"] * 5),
    "every_n": ({"mode": "every_n", "n": 2}, 2 * 3, 3, ["full", "no", "full", "no", "full"]),  # the first one always
    "every third": ({"mode": "every_n", "n": 3}, 2 * 2, 2, ["full", "no", "no", "full", "no"]),
    "selective": ({"mode": "selective"}, 0, 0, ["selective"] * 5),
    "offload": ({"offload_activations": True}, 0, 0, ["no, offloaded"] * 5),
    "full_offload": ({"mode": "full", "offload_activations": True}, 2 * BLOCKS, BLOCKS, ["full, offloaded"] * 5),
    "selective_offload": ({"mode": "selective", "offload_activations": True}, 0, 0, ["selective, offloaded"] * 5),
}


class Block(nn.Module):
    """Attention and one linear layer on each side, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
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
        scale = torch.linspace(0.5, 1.5, WIDTH)
        for block in self.blocks:
            x = block(x, scale=scale)
        return self.head(x).square().mean()


def step(net: Net) -> tuple[int, float, list[torch.Tensor]]:
    """FLOPs, loss and gradients of one step."""
    torch.manual_seed(0)
    x = torch.randn(ROWS, TOKENS, WIDTH, requires_grad=True)
    net.zero_grad()
    with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter:
        loss = net(x)
        loss.backward()
    return counter.get_total_flops(), float(loss.detach()), [p.grad for p in net.parameters()]


def test_recomputed_ops_and_equal_bits_with_dropout():
    """On one net: the last mode holds, as of a second Trainer; names stay; evaluation recomputes nothing."""
    torch.manual_seed(0)
    net = Net()
    names = [name for name, _ in net.named_parameters()]
    ops, loss, grads = step(net)
    assert ops == PLAIN
    for name, (options, linears, attentions, words) in [*MODES.items(), ("none", MODES["none"])]:
        prepare_blocks(net.blocks, ActivationConfig(**options))
        assert [recomputes(block) for block in net.blocks] == words, name
        found = step(net)
        assert found[0] == PLAIN + linears * LINEAR + attentions, name
        assert found[1] == loss, name
        assert all(torch.equal(a, b) for a, b in zip(found[2], grads, strict=True)), name
        assert step(net.eval())[0] == PLAIN, name
        net.train()
    assert [name for name, _ in net.named_parameters()] == names


def test_activations_move_and_parameters_stay(monkeypatch: pytest.MonkeyPatch):
    moved: list[tuple[int, ...]] = []
    cpu, net = torch.Tensor.cpu, Net()
    monkeypatch.setattr(torch.Tensor, "cpu", lambda t: (moved.append(tuple(t.shape)), cpu(t))[1])
    prepare_blocks(net.blocks, ActivationConfig(**MODES["full_offload"][0]))
    step(net)
    assert moved.count((ROWS, TOKENS, WIDTH)) == BLOCKS  # the input of each block
    moved.clear()
    prepare_blocks(net.blocks, ActivationConfig(**MODES["offload"][0]))
    step(net)
    assert len(moved) >= 5 * BLOCKS
    assert (WIDTH, WIDTH) not in moved  # weights, transposed ones
    moved.clear()
    prepare_blocks(net.blocks, ActivationConfig(**MODES["selective_offload"][0]))
    step(net)
    assert moved.count((ROWS * TOKENS, WIDTH)) == 2 * BLOCKS  # the linear layers' outputs


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # torch about itself
def test_a_smaller_budget_saves_less(monkeypatch: pytest.MonkeyPatch):
    """Than all; with the compiler's front and its split of forward and backward, without C++ code."""
    monkeypatch.setattr("lit_fsdp.parallel.activation.BACKEND", "aot_eager")
    kept: list[dict[int, torch.Tensor]] = []
    for budget in (0.0, 1.0):
        net = Net()
        for block in net.blocks:
            block.drop = nn.Identity()  # whose numbers the compiler draws in its own way
        prepare_blocks(net.blocks, ActivationConfig(mode="memory_budget", memory_budget=budget), True)
        kept.append({})

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            kept[-1][tensor.untyped_storage().data_ptr()] = tensor  # held, so that no address is used twice
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            net.train()(torch.randn(ROWS, TOKENS, WIDTH, requires_grad=True))
        for param in net.parameters():
            kept[-1].pop(param.untyped_storage().data_ptr(), None)
    torch._dynamo.reset()
    saved = [sum(tensor.untyped_storage().nbytes() for tensor in found.values()) for found in kept]
    assert saved[0] < saved[1] / 2


@pytest.mark.parametrize("family", ["gpt_oss", "gemma3n_text", "falcon"])
def test_gradients_are_right_where_the_model_adds_in_place(family: str):
    """GPT-OSS adds biases to products of experts, Gemma 3n its input to one of batches, Falcon attention to another."""
    model = AutoModelForCausalLM.from_config(tiny(family)).train()
    blocks = [module for module in model.modules() if type(module).__name__ in model._no_split_modules]
    ids, found = torch.arange(3, 19).reshape(2, 8), []
    for mode in ("none", "selective"):
        prepare_blocks(blocks, ActivationConfig(mode=mode))
        model.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        found.append([param.grad.clone() for param in model.parameters() if param.grad is not None])
    assert found[0]
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("how", ["whole", "slice", "out", "later"])
def test_a_kept_result_that_the_model_changes_in_place_is_copied_before(bias: bool, how: str):
    """In each step; without a bias torch notices nothing, and gradients would be wrong."""

    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH, bias), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.first(x)
            if how == "whole":
                out += x
            elif how == "slice":
                out[..., :4] = out[..., :4] * 2
            elif how == "out":
                with torch.no_grad():
                    torch.mul(out.detach(), 3.0, out=out.detach())
            elif len(found) != 3:  # not in the first pass with selective
                out *= 2
            return self.second(out.square())

    block, found = Adds(), []
    x = torch.randn(2, 3, WIDTH, requires_grad=True)
    for mode in ("none", "selective"):
        prepare_blocks([block], ActivationConfig(mode=mode))
        for _ in range(3):
            block.zero_grad()
            block(x).square().sum().backward()
            found.append([param.grad.clone() for param in block.parameters()])
    pairs = list(zip(found[:3], found[3:], strict=True))
    pairs = pairs[1:] if how == "later" else pairs
    assert all(torch.equal(a, b) for plain, selective in pairs for a, b in zip(plain, selective, strict=True))


class Calls(TorchDispatchMode):
    """How often the CPU's attention and products of two matrices are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[op.name().removeprefix("aten::_scaled_dot_product_")] += 1
        return op(*args, **(kwargs or {}))


def test_attention_of_long_rows_is_computed_once_whatever_else_is_recomputed():
    """Of two of three samples in each block, as heads are 64 wide in all; not by products of its own (eager)."""
    ids, lengths = torch.randint(3, 99, (1, 271)), [3, 128, 140]
    for attends, again in ((None, 0), ("eager", 2)):
        model: Any = build_on_meta(tiny("llama"), attends).to_empty(device="cpu")
        model.init_weights()
        counts, grads, blocks = [], [], len(model.model.layers)
        for mode in ("none", "full"):
            prepare_blocks(model.model.layers, ActivationConfig(mode=mode))
            model.zero_grad()
            with Calls() as calls:
                loss = model(input_ids=ids, labels=ids, sample_lengths=None if attends else lengths).loss
                loss.backward(retain_graph=True)
            counts.append(calls.found)
            loss.backward()
            grads.append([param.grad for param in model.parameters()])
        assert all(map(torch.equal, *grads))
        kept, found = counts
        assert [n["flash_attention_for_cpu"] for n in counts] == ([0, 0] if attends else [3 * blocks, 4 * blocks])
        assert found["aten::bmm"] - kept["aten::bmm"] == again * blocks
        assert found["aten::mm"] - kept["aten::mm"] == 6 * blocks  # all but the last, which nobody needs


def test_modules_that_call_torchs_attention_keep_it_too_and_on_the_host(monkeypatch: pytest.MonkeyPatch):
    moved: list[tuple[int, ...]] = []
    cpu, net = torch.Tensor.cpu, Net()
    monkeypatch.setattr(torch.Tensor, "cpu", lambda t: (moved.append(tuple(t.shape)), cpu(t))[1])
    grads = []
    for mode in ("none", "full", "full_offload"):
        prepare_blocks(net.blocks, ActivationConfig(**MODES[mode][0]))
        net.zero_grad()
        torch.manual_seed(0)
        with Calls() as calls:
            net(torch.ones(ROWS, 2 * WIDTH, WIDTH)).backward()
        assert calls.found["flash_attention_for_cpu"] == BLOCKS
        assert moved.count((ROWS, 1, 2 * WIDTH, WIDTH)) == (BLOCKS if mode == "full_offload" else 0)
        grads.append([param.grad for param in net.parameters()])
    assert all(map(torch.equal, grads[0], grads[1]))
    assert all(map(torch.equal, grads[0], grads[2]))


def test_copies_to_the_host_keep_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or recomputation with ``selective`` would run other operations than the forward pass."""
    made = torch.empty_like
    monkeypatch.setattr(activation.torch, "empty_like", lambda t, pin_memory, **kind: made(t, **kind))  # no device here
    for given in (torch.randn(2, 3, 4).transpose(1, 2), torch.randn(6)[::2], torch.randn(1, 4).expand(3, 4)):
        device, copied = activation._pinned(given)
        assert copied.equal(given)
        assert device == given.device
        assert copied.stride() == given.cpu().clone().stride()
