"""Every activation checkpointing mode on two ranks of both engines: the same losses to the bit, in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from tests.dist.reference import TINY
from tests.dist.workers import Workers

ENGINES = ("fsdp2", "fsdp1")
MODES: dict[str, tuple[Any, list[str]]] = {
    "full": ("full", ["full"] * 3),
    "every_n": ({"mode": "every_n", "n": 2}, ["full", "no", "full"]),
    "selective": ("selective", ["selective"] * 3),
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


@pytest.mark.parametrize("engine", ENGINES)
def test_the_unit_that_is_called_last_is_gathered_once_per_step(workers: Workers, tmp_path: Path, engine: str) -> None:
    """Of an untied model the head: embedding and three blocks are gathered twice, head and root once."""
    LlamaConfig(**{**TINY.to_dict(), "tie_word_embeddings": False}).save_pretrained(tmp_path)
    strategy = {"engine": engine, "precision": "fp32"}
    found = workers.run("train_activations", 2, folder=str(tmp_path / "config.json"), strategy=strategy)[0]
    assert found["gathers"] == len(found["losses"]) * (2 * 4 + 2)


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


@pytest.mark.parametrize(("engine", "ranks"), [("ddp", 2), ("single", 1)])
def test_a_second_trainers_mode_holds_where_nothing_is_sharded(
    workers: Workers, tiny_model: Path, engine: str, ranks: int
) -> None:
    for found in workers.run("fit_twice", ranks, folder=str(tiny_model), engine=engine):
        assert found == [["full"] * 3, ["no"] * 3]
