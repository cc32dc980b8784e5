"""Every activation checkpointing mode on two ranks of both engines: the same losses to the bit, in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist.workers import Workers

ENGINES = ("fsdp2", "fsdp1")
MODES: dict[str, tuple[Any, list[str]]] = {
    "full": ("full", ["full"] * 3),
    "every_n": ({"mode": "every_n", "n": 2}, ["full", "no", "full"]),
    "selective": ("selective", ["selective"] * 3),
    "attention": (
        {"mode": "selective", "ops": ["aten._scaled_dot_product_flash_attention_for_cpu"]},
        ["selective"] * 3,
    ),
    "offload": ({"offload_activations": True}, ["no, offloaded"] * 3),
    "full_offload": ({"mode": "full", "offload_activations": True}, ["full, offloaded"] * 3),
    "selective_offload": ({"mode": "selective", "offload_activations": True}, ["selective, offloaded"] * 3),
}
COMPILED: list[Any] = ["none", "full", "selective", {"mode": "memory_budget", "memory_budget": 0.5}]


@pytest.fixture(scope="module")
def kept(workers: Workers, tiny_model: Path) -> dict[str, Any]:
    """What the engines give when all activations are kept."""
    return {engine: _run(workers, tiny_model, {"engine": engine}) for engine in ENGINES}


def _run(workers: Workers, folder: Path, strategy: dict[str, Any]) -> dict[str, Any]:
    options = {"precision": "fp32", **strategy}
    first, second = workers.run("train_activations", 2, folder=str(folder), strategy=options)
    assert first["losses"] == second["losses"]
    return first


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("engine", ENGINES)
def test_losses_and_parameters_are_bit_equal(
    workers: Workers, tiny_model: Path, kept: dict[str, Any], engine: str, mode: str
) -> None:
    given, does = MODES[mode]
    found = _run(workers, tiny_model, {"engine": engine, "activation_checkpointing": given})
    assert len(found["losses"]) == 4
    assert found["losses"] == kept[engine]["losses"]
    assert found["digest"] == kept[engine]["digest"]
    assert found["recomputes"] == does
    assert found["gathers"] == kept[engine]["gathers"] > 0  # recomputation gathers nothing again
    tokens, hidden = 6 * 14, 48
    if mode == "full_offload":  # the input of the block and nothing else: no weight, no position embedding
        assert found["moved_bytes"] == [tokens * hidden * 4] * 3
    elif "offload" in mode:
        assert all(moved >= tokens * hidden * 4 for moved in found["moved_bytes"])
    else:
        assert not any(found["moved_bytes"])


@pytest.mark.slow
@pytest.mark.parametrize("given", COMPILED, ids=lambda given: given if isinstance(given, str) else given["mode"])
@pytest.mark.parametrize("engine", ENGINES)
def test_compiled_blocks_agree(
    workers: Workers, tiny_model: Path, kept: dict[str, Any], engine: str, given: Any
) -> None:
    strategy = {"engine": engine, "activation_checkpointing": given, "compile": True}
    found = _run(workers, tiny_model, strategy)
    assert found["losses"] == pytest.approx(kept[engine]["losses"], rel=1e-5)
    assert found["graphs"] == {"unique_graphs": 1, "breaks": 0}  # three blocks, compiled once
    assert found["gathers"] == kept[engine]["gathers"]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_models_own_switch_becomes_ours(
    workers: Workers, tiny_model: Path, kept: dict[str, Any], engine: str
) -> None:
    (found, _) = workers.run(
        "train_activations", 2, folder=str(tiny_model), strategy={"engine": engine, "precision": "fp32"}, theirs=True
    )
    assert found["losses"] == kept[engine]["losses"]
    assert found["recomputes"] == ["full"] * 3
    assert found["gathers"] == kept[engine]["gathers"]
