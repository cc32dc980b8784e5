"""Every activation checkpointing mode on two ranks of both engines: the same losses to the bit, in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist.forks import on_ranks
from tests.dist.reference import UNTIED

ENGINES = ("fsdp2", "fsdp1")
MODES: tuple[tuple[Any, list[str]], ...] = (
    ("full", ["full"] * 3),
    ({"mode": "every_n", "n": 2}, ["full", "no", "full"]),
    ({"mode": "full", "offload_activations": True}, ["full, offloaded"] * 3),
    ({"mode": "selective", "offload_activations": True}, ["selective, offloaded"] * 3),
)


@pytest.fixture(scope="module")
def kept(tiny_model: Path) -> dict[str, Any]:
    """What the engines give when all activations are kept."""
    return {engine: _run(tiny_model, engine=engine) for engine in ENGINES}


def _run(folder: Path, **strategy: Any) -> dict[str, Any]:
    job = {"folder": folder, "strategy": {"precision": "fp32", **strategy}}
    first, second = on_ranks("train_activations", 2, **job)
    assert first["losses"] == second["losses"]
    return first


@pytest.mark.parametrize("engine", ENGINES)
def test_losses_and_parameters_are_bit_equal(tiny_model: Path, kept: dict[str, Any], engine: str) -> None:
    for given, does in MODES:
        found = _run(tiny_model, engine=engine, activation_checkpointing=given)
        assert len(found["losses"]) == 4
        assert [found[what] == kept[engine][what] for what in ("losses", "digest")] == [True, True], given
        assert found["recomputes"] == does
        assert found["gathers"] == kept[engine]["gathers"] > 0  # recomputation gathers nothing again


@pytest.mark.parametrize("engine", ENGINES)
def test_the_unit_that_is_called_last_is_gathered_once_per_step(tmp_path: Path, engine: str) -> None:
    """Of an untied model the head: embedding and three blocks are gathered twice, head and root once."""
    UNTIED.save_pretrained(tmp_path)
    strategy = {"engine": engine, "precision": "fp32"}
    found = on_ranks("train_activations", 2, folder=tmp_path / "config.json", strategy=strategy)[0]
    assert found["gathers"] == len(found["losses"]) * (2 * 4 + 2)


@pytest.mark.parametrize("engine", [*ENGINES, "ddp"])
def test_tiles_of_feed_forward_layers_agree(tiny_model: Path, kept: dict[str, Any], engine: str) -> None:
    """Also where these are units of their own, whose weights are gathered once for all tiles."""
    sharded = engine != "ddp"
    options = {"wrap": ["LlamaDecoderLayer", "*.mlp"]} if sharded else {}
    given = {"mode": "full", "tiles": 3}
    found = _run(tiny_model, engine=engine, activation_checkpointing=given, **options)
    assert found["losses"] == pytest.approx(kept[engine if sharded else "fsdp2"]["losses"], rel=1e-6)
    assert found["recomputes"] == ["full, 3 tiles"] * 3


def test_compiled_blocks_agree(tiny_model: Path, kept: dict[str, Any]) -> None:
    for engine, given in (("fsdp2", {"mode": "memory_budget", "memory_budget": 0.5}), ("fsdp1", "selective")):
        found = _run(tiny_model, engine=engine, activation_checkpointing=given, compile=True)
        assert found["losses"] == pytest.approx(kept[engine]["losses"], rel=1e-5)
        assert found["graphs"] == {"unique_graphs": 1, "breaks": 0}  # three blocks, compiled once
        assert found["gathers"] == kept[engine]["gathers"]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_models_own_switch_becomes_ours(tiny_model: Path, kept: dict[str, Any], engine: str) -> None:
    strategy = {"engine": engine, "precision": "fp32"}
    (found, _) = on_ranks("train_activations", 2, folder=tiny_model, strategy=strategy, theirs=True)
    assert found["losses"] == kept[engine]["losses"]
    assert found["recomputes"] == ["full"] * 3
    assert found["gathers"] == kept[engine]["gathers"]
