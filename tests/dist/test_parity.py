"""Both engines against a plain single-process loop: the table of choices, and dtypes read back.

Tolerances in fp32: 1e-6 relative on the first loss, 1e-5 over ten steps; only the order of summation differs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist import matrix
from tests.dist.forks import on_ranks_each
from tests.dist.reference import reference_losses

ENGINES = ("fsdp2", "fsdp1")


@pytest.fixture(scope="module")
def wanted(tiny_model: Path) -> list[float]:
    losses = reference_losses(str(tiny_model))
    assert losses[-1] < losses[0]
    return losses


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(cell, marks=[pytest.mark.long("pairs of values; each value is met without it")] * is_long)
        for cell, is_long in zip(matrix.CELLS, matrix.LONG, strict=True)
    ],
    ids=lambda cell: "-".join(cell.values()),
)
def test_a_cell_trains_as_the_loop_does(tiny_model: Path, wanted: list[float], cell: dict[str, str]) -> None:
    results = matrix.run_cell(cell, tiny_model)
    for result in results:
        assert matrix.worst_difference(result["losses"], wanted) <= matrix.TOLERANCE[cell["precision"]]
        assert result["losses"] == results[0]["losses"]
    if cell["precision"] == "fp32":
        assert results[0]["losses"][0] == pytest.approx(wanted[0], rel=1e-6)
    units = results[0]["audit"]["units"]
    total = results[0]["audit"]["num_params"]
    assert sum(unit["num_params"] for unit in units) == total
    copies = {"hybrid_shard": 2, "hybrid_shard_zero2": 2, "no_shard": len(results)}.get(cell["sharding"], 1)
    assert sum(result["local_numel"] for result in results) == copies * total
    if cell["activation_checkpointing"] == "full" and cell["wrap"] == "auto":
        assert [unit["class"] for unit in units if unit["recompute"] == "full"] == ["LlamaDecoderLayer"] * 3


def test_every_value_of_an_engine_is_met_without_the_long_cells() -> None:
    short = [cell for cell, is_long in zip(matrix.CELLS, matrix.LONG, strict=True) if not is_long]
    pairs = [
        {(cell["engine"], name, value) for cell in cells for name, value in cell.items()}
        for cells in (short, matrix.CELLS)
    ]
    assert pairs[0] == pairs[1]


def test_the_manual_has_these_cells_with_a_difference_within_the_tolerance() -> None:
    rows = matrix.rows_of_the_manual()
    assert [{name: row[name] for name in matrix.COLUMNS} for row in rows] == matrix.CELLS
    for row in rows:
        assert 0 < float(row["difference"]) <= matrix.TOLERANCE[row["precision"]] == float(row["tolerance"])


@pytest.mark.parametrize("engine", ENGINES)
def test_hybrid_with_one_copy_and_with_one_rank_per_copy(tiny_model: Path, wanted: list[float], engine: str) -> None:
    strategy = {"engine": engine, "sharding": "hybrid_shard", "precision": "fp32"}
    cases = [{"strategy": {**strategy, "replicate_degree": copies}} for copies in (1, 2)]
    found = on_ranks_each("train", 2, cases, folder=tiny_model, accumulate_grad_batches=3)
    for copies, results in enumerate(found, 1):
        for result in results:
            assert result["losses"][0] == pytest.approx(wanted[0], rel=1e-6)
            assert result["losses"] == pytest.approx(wanted, rel=1e-5)
        assert sum(result["local_numel"] for result in results) == copies * results[0]["audit"]["num_params"]


@pytest.mark.parametrize("sharding", ["full_shard", "no_shard"])
def test_gradients_accumulate_in_fp32_in_mixed_precision(tiny_model: Path, sharding: str) -> None:
    """FSDP1 would add up whole micro-batches in bf16 if Lightning held its reductions back."""
    job = {"folder": tiny_model, "accumulate_grad_batches": 3}
    cases = [{"strategy": {"engine": engine, "sharding": sharding}} for engine in ENGINES]
    (first, _), (second, _) = on_ranks_each("train", 2, cases, **job)
    assert first["losses"] == pytest.approx(second["losses"], rel=1e-5)  # whole micro-batches in bf16 are 1e-3 off


@pytest.mark.parametrize("engine", ENGINES)
def test_realized_dtypes(tiny_model: Path, wanted: list[float], engine: str) -> None:
    modes = {"mixed": ("fp32", "bf16", "fp32"), "low_precision": ("bf16",) * 3, "fp32": ("fp32",) * 3}
    cases = [{"strategy": {"engine": engine, "precision": mode}} for mode in modes]
    found = on_ranks_each("train", 2, cases, folder=tiny_model, steps=2)
    for (param, compute, reduce), (result, _) in zip(modes.values(), found, strict=True):
        realized = {what: set(found) for what, found in result["dtypes"]["realized"].items()}
        assert realized == {
            "parameters after setup": {param},
            "gathered parameters in the forward": {compute},
            "buffers": {"fp32"},
            "reductions": {reduce},
            "parameters after the first step": {param},
            "gradients": {param},
            "optimizer state after the first step": {param},
        }
        assert result["losses"][0] == pytest.approx(wanted[0], rel=2e-2)
