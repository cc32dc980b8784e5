"""Every cell of the manual's table of choices: ten losses against the loop in one process."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.dist import matrix
from tests.dist.reference import reference_losses
from tests.dist.workers import Workers

CELLS = matrix.cells()


@pytest.fixture(scope="module")
def wanted(tiny_model: Path) -> list[float]:
    return reference_losses(str(tiny_model))


@pytest.mark.parametrize(
    "cell", [c for c in CELLS if not matrix.needs_gpu(c)], ids=lambda cell: "-".join(cell.values()).replace(", ", "-")
)
def test_a_cell_trains_as_the_reference_does(
    workers: Workers, tiny_model: Path, wanted: list[float], cell: matrix.Cell
) -> None:
    options = matrix.strategy_options(cell)
    results = workers.run("train", matrix.num_ranks(cell), folder=str(tiny_model), strategy=options)
    for result in results:
        assert matrix.worst_difference(result["losses"], wanted) <= matrix.TOLERANCE[cell["precision"]]
        assert result["losses"] == results[0]["losses"]
    total = results[0]["audit"]["num_params"]
    copies = {"hybrid_shard": 2, "hybrid_shard_zero2": 2, "no_shard": len(results)}.get(cell["sharding"], 1)
    assert sum(result["local_numel"] for result in results) == copies * total


def test_every_pair_of_values_is_in_a_cell_of_each_engine() -> None:
    columns = [name for name in matrix.COLUMNS if name != "engine"]
    for engine, (a, b) in itertools.product(matrix.COLUMNS["engine"], itertools.combinations(columns, 2)):
        for one, two in itertools.product(matrix.COLUMNS[a], matrix.COLUMNS[b]):
            assert any(c["engine"] == engine and c[a] == one and c[b] == two for c in CELLS), (engine, one, two)


def test_the_manual_has_these_cells_with_a_difference_within_the_tolerance() -> None:
    rows = matrix.rows_of_the_manual()
    assert [{name: row[name] for name in matrix.COLUMNS} for row in rows] == CELLS
    for row in rows:
        if matrix.needs_gpu(row):
            assert row["difference"] == "GPU only"
        else:
            assert 0 < float(row["difference"]) <= matrix.TOLERANCE[row["precision"]] == float(row["tolerance"])
