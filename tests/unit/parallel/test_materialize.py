"""Meta models are filled from a reader or from reset_parameters, ties are kept, nothing is read twice."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lit_fsdp.parallel.materialize import Materializer, reset_parameters_reader

CPU = torch.device("cpu")


class Tied(nn.Module):
    """Two linear layers that share a weight, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("number", torch.zeros(2))
        self.second.bias.requires_grad_(False)


def test_every_tensor_is_read_once_and_ties_stay():
    with torch.device("meta"):
        net = Tied()
    asked: list[str] = []

    def read(module_name: str, module: nn.Module, attribute: str, rows: slice | None) -> torch.Tensor:
        asked.append(f"{module_name}.{attribute}")
        assert rows is None
        return torch.full(getattr(module, attribute).shape, float(len(asked)))

    materializer = Materializer(net, read, CPU)
    for module in net.modules():
        materializer.fill(module)
    assert asked == [".number", "first.weight", "second.bias"]
    assert net.second.weight is net.first.weight
    assert net.first.weight.tolist() == [[2.0] * 3] * 3
    assert [p.requires_grad for p in (net.first.weight, net.second.bias)] == [True, False]
    assert net.number.tolist() == [1.0, 1.0]


def test_reset_parameters_depends_on_seed_and_name_only():
    with torch.device("meta"):
        net = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    state = torch.get_rng_state()
    one, other = reset_parameters_reader(1), reset_parameters_reader(2)
    weight = one("a", net["a"], "weight", None)
    assert torch.equal(one("a", net["a"], "weight", None), weight)
    assert torch.equal(one("a", net["a"], "weight", slice(1, 3)), weight[1:3])
    assert not torch.equal(one("b", net["b"], "weight", None), weight)
    assert not torch.equal(other("a", net["a"], "weight", None), weight)
    assert torch.equal(torch.get_rng_state(), state)
    assert net["a"].weight.is_meta
    assert weight.abs().max() <= 0.5  # as nn.Linear(4, 4) draws it


def test_a_module_without_reset_parameters_is_named():
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2, device="meta"))

    net = nn.Sequential(Own())
    with pytest.raises(RuntimeError, match=r"^0 \(Own\) has parameters on the meta device and no reset_parameters"):
        Materializer(net, reset_parameters_reader(0), CPU).fill(net[0])
