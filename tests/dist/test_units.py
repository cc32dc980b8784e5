"""Units in live runs on both engines: whatever is wrapped, the losses are those of one process, in fp32.

Tolerance: 1e-5 relative over five or six steps; only the order of summation differs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.dist.foreign import foreign_rows
from tests.dist.reference import reference_losses
from tests.dist.units_jobs import NUM_STEPS, AdapterNet, ExpertNet, OneExpertBlock, is_adapter
from tests.dist.workers import Workers

ENGINES = ("fsdp2", "fsdp1")
PATTERNS = {"patterns": ["model.layers.*", "model.layers.*.mlp.experts"], "max_root_share": 0.7}
engines = pytest.mark.parametrize("engine", ENGINES)


def plain_losses(net: Any) -> list[float]:
    """A plain loop over whole batches in one process."""
    optimizer = net.configure_optimizers()
    losses = []
    for step in range(NUM_STEPS):
        x, y = foreign_rows(step)
        loss = nn.functional.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.fixture(scope="module")
def tiny_mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Mixtral with random weights, saved as a model folder."""
    from transformers import MixtralConfig, MixtralForCausalLM

    from lit_fsdp.models.tokenizers import miniature_tokenizer

    config = MixtralConfig(
        hidden_size=24,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=3,
        num_experts_per_tok=2,
        vocab_size=512,
        max_position_embeddings=64,
        initializer_range=0.08,
    )
    folder = tmp_path_factory.mktemp("mixture") / "model"
    torch.manual_seed(0)
    MixtralForCausalLM(config).save_pretrained(folder)
    miniature_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("precision", ["fp32", "mixed"])
@engines
def test_frozen_and_trainable_weights_share_units(workers: Workers, engine: str, precision: str) -> None:
    found = workers.run("train_adapters", 2, strategy={"engine": engine, "precision": precision})
    torch.manual_seed(5)
    net = AdapterNet()
    adapters = sorted(name for name, _ in net.named_parameters() if is_adapter(name))
    assert len(adapters) == 4
    for result in found:
        assert result["trainable"] == adapters
        assert result["changed"] == adapters  # all others are bit-equal to what they were
        assert result["names"] == sorted(name for name, _ in net.named_parameters())
        assert {unit["name"]: (unit["num_trainable"], unit["num_params"]) for unit in result["units"]} == {
            "layers.0": (64, 64 + 272 + 32),
            "layers.1": (0, 272 + 32),
            "layers.2": (64, 64 + 272 + 32),
            "(root)": (0, 12 * 16 + 16 + 17),
        }
    tolerance = {"fp32": 1e-5, "mixed": 3e-2}[precision]
    assert found[0]["losses"] == found[1]["losses"] == pytest.approx(plain_losses(net), rel=tolerance)


@pytest.mark.parametrize(
    "wrap",
    [["LoRALinear", "AdapterBlock"], {"patterns": ["layers.*.mlp.base", "layers.*.mlp.up"]}, {"min_num_params": 250}],
    ids=["classes", "patterns", "size"],
)
@engines
def test_frozen_weights_as_units_of_their_own(workers: Workers, engine: str, wrap: Any) -> None:
    """A unit with nothing to train inside one with something, and the other way round."""
    if isinstance(wrap, dict):
        wrap = {**wrap, "max_root_share": 0.6}
    strategy = {"engine": engine, "precision": "fp32", "wrap": wrap}
    found = workers.run("train_adapters", 2, strategy=strategy)
    torch.manual_seed(5)
    net = AdapterNet()
    assert found[0]["changed"] == sorted(name for name, _ in net.named_parameters() if is_adapter(name))
    assert found[0]["losses"] == pytest.approx(plain_losses(net), rel=1e-5)


@pytest.mark.parametrize("wrap", ["auto", PATTERNS], ids=["auto", "patterns"])
@engines
def test_experts_as_units(workers: Workers, tiny_mixture: Path, engine: str, wrap: Any) -> None:
    strategy = {"engine": engine, "precision": "fp32", "wrap": wrap}
    wanted = reference_losses(str(tiny_mixture), steps=5)
    layers = [f"model.model.layers.{i}" for i in range(2)]
    units = ["", *layers]
    units += [] if wrap == "auto" else [f"{layer}.mlp.experts" for layer in layers]
    units += ["model.model.embed_tokens", "model.lm_head"]
    for result in workers.run("train_with_units", 2, folder=str(tiny_mixture), strategy=strategy):
        assert result["losses"] == pytest.approx(wanted, rel=1e-5)
        assert result["realized"] == result["planned"] == sorted(units)


@engines
def test_experts_inside_recomputed_blocks_in_mixed_precision(workers: Workers, tiny_mixture: Path, engine: str) -> None:
    """A unit inside a block is gathered again while the block is recomputed."""
    strategy = {"engine": engine, "wrap": PATTERNS, "activation_checkpointing": "full", "precision": "mixed"}
    found = workers.run("train_with_units", 2, folder=str(tiny_mixture), strategy=strategy)
    assert found[0]["losses"] == pytest.approx(reference_losses(str(tiny_mixture), steps=5), rel=3e-2)
    recomputed = [unit["name"] for unit in found[0]["audit"]["units"] if unit["recompute"] != "no"]
    layers = ["model.model.layers.0", "model.model.layers.1"]
    assert recomputed == [*(f"{layer}.mlp.experts" for layer in layers), *layers]
    kept = workers.run(
        "train_with_units",
        2,
        folder=str(tiny_mixture),
        strategy={**strategy, "activation_checkpointing": "none"},
    )
    assert found[0]["losses"] == kept[0]["losses"]  # bit-equal


@pytest.mark.parametrize(
    "wrap", [["model.layers.*"], ["LlamaMLP", "model.layers.*.self_attn", "LlamaDecoderLayer"]], ids=str
)
@engines
def test_patterns_and_classes_change_no_losses(workers: Workers, tiny_model: Path, engine: str, wrap: Any) -> None:
    job = {"folder": str(tiny_model), "strategy": {"engine": engine, "precision": "fp32"}}
    auto = workers.run("train_with_units", 2, **job)[0]
    job["strategy"]["wrap"] = wrap
    named = workers.run("train_with_units", 2, **job)[0]
    assert named["losses"] == pytest.approx(auto["losses"], rel=1e-5)
    assert auto["losses"] == pytest.approx(reference_losses(str(tiny_model), steps=5), rel=1e-5)
    assert named["realized"] == named["planned"]
    assert len(named["realized"]) == (4 if len(wrap) == 1 else 10)


@engines
def test_a_class_of_a_foreign_module(workers: Workers, engine: str) -> None:
    strategy = {"engine": engine, "precision": "fp32"}
    auto = workers.run("train_foreign", 2, strategy=strategy, steps=5)[0]
    named = workers.run("train_foreign", 2, strategy={**strategy, "wrap": ["Sequential"]}, steps=5)[0]
    assert named["losses"] == pytest.approx(auto["losses"], rel=1e-5)
    assert named["units"] == auto["units"] == ["layers.0", "layers.1", "layers.2", "(root)"]


@engines
def test_experts_of_a_foreign_module_one_by_one(workers: Workers, engine: str) -> None:
    strategy = {"engine": engine, "precision": "fp32", "wrap": ["layers.*", "layers.*.experts.*"]}
    found = workers.run("train_expert_net", 2, strategy=strategy)
    torch.manual_seed(5)
    assert found[0]["losses"] == pytest.approx(plain_losses(ExpertNet()), rel=1e-5)
    layers = ["layers.0", "layers.1"]
    experts = [f"{layer}.experts.{i}" for layer in layers for i in range(3)]
    assert found[0]["realized"] == sorted(["", *layers, *experts])


@engines
def test_experts_that_only_some_ranks_call_get_their_own_gradients(workers: Workers, engine: str) -> None:
    """Inside one unit; ranks that reduced different lists of gradients would mix those of different experts."""
    strategy = {"engine": engine, "precision": "fp32"}
    found = workers.run("train_expert_net", 2, strategy=strategy, one_per_rank=True)
    torch.manual_seed(5)
    net = ExpertNet(OneExpertBlock)
    optimizer, wanted = net.configure_optimizers(), []
    for step in range(NUM_STEPS):
        x, y = foreign_rows(step)
        losses = []
        for rank in range(2):
            for layer in net.layers:
                layer.called = rank
            losses.append(nn.functional.mse_loss(net(x[rank * 4 : rank * 4 + 4]), y[rank * 4 : rank * 4 + 4]) / 2)
            losses[-1].backward()
        for layer in net.layers:
            for param in layer.experts[2].parameters():  # sharded beside used ones, it gets zeros and so decays
                param.grad = torch.zeros_like(param)
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(sum(float(loss.detach()) for loss in losses))
    assert found[0]["losses"] == pytest.approx(wanted, rel=1e-5)
    assert found[0]["realized"] == ["", "layers.0", "layers.1"]


@engines
def test_units_a_module_wrapped_itself_are_read_back(workers: Workers, engine: str) -> None:
    """Names, classes and unsharded sizes are those of the plan that was never carried out."""
    for result in workers.run("wrapped_by_hand", 2, engine=engine):
        assert result["after"] == result["before"]
        assert result["names"] == sorted(row[0] for row in result["before"][:-2])
        assert result["engines"] == [engine]
        assert result["source"] == "manual"
        assert result["blocks"] == ["ExpertBlock", "ExpertBlock"]
