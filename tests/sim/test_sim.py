"""Runs of every engine on a device that is not the CPU; README.md here says what that shows and what it cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from tests.dist.forks import on_ranks
from tests.dist.reference import TINY, save_tiny
from tests.runs import MORE

LORA = {"lora": {"r": 4, "alpha": 8, "target_modules": "all-linear"}}
HYBRID = {"sharding": "hybrid_shard", "shard_degree": 2, "replicate_degree": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of two blocks, as every operation on the device takes a millisecond."""
    config = LlamaConfig(**{**TINY.to_dict(), "num_hidden_layers": 2})
    return str(save_tiny(tmp_path_factory.mktemp("models") / "tiny", config))


def run(folder: str, place: Path, job: str = "whole_run", **arguments: Any) -> Any:
    return on_ranks(job, 1, folder=folder, run=str(place / arguments.get("on", "sim")), **arguments)[0]


ALONE = [
    pytest.param({"engine": "fsdp2", "cpu_offload": True}, id="fsdp2, offloaded"),
    pytest.param({"engine": "fsdp1"}, id="fsdp1"),
    pytest.param({"engine": "single"}, id="single", marks=pytest.mark.long("half a minute; fsdp1 and 2 do more here")),
]


@pytest.mark.parametrize("strategy", ALONE)
def test_a_run_on_one_device_is_that_on_the_cpu(strategy: dict[str, Any], folder: str, tmp_path: Path):
    strategy = {**strategy, "precision": "fp32"}
    there, here = (run(folder, tmp_path, strategy=strategy, on=on) for on in ("sim", "cpu"))
    assert here.pop("races") == there.pop("races") == []
    for part in ("metrics", "resumed", "tested"):
        assert there[part] == pytest.approx(here[part], rel=1e-4)
    assert there["resumed"] == pytest.approx(there["metrics"], rel=1e-5)


MANY: dict[str, dict[str, Any]] = {
    "offloaded adapters, saved as a whole": {
        "strategy": {"cpu_offload": True, "state_dict": "full"},
        "model": LORA,
        "saves": {"async_save": False},
    },
    "hybrid, offloaded": {"strategy": {**HYBRID, "cpu_offload": True, "precision": "mixed"}, "world": 4, "rows": 2},
    "whole, saved beside": {"strategy": {"state_dict": "full"}, "saves": {"async_save": True}, "rows": 2},
}


@pytest.mark.parametrize("case", MANY.values(), ids=MANY)
def test_one_of_many_ranks_goes_all_the_way(case: dict[str, Any], folder: str, tmp_path: Path):
    found = run(folder, tmp_path, **{"world": 2, **case})
    assert found["races"] == []
    assert [count > 20 for count in found["written"]] == [True, True]
    assert found["metrics"]["val_rows"] == case.get("rows", 1) * case.get("world", 2)
    assert found["metrics"]["val_loss"] > 0


WAITING = {
    "fsdp2": {"strategy": {"engine": "fsdp2", "precision": "mixed"}, "world": 2},
    "fsdp1": {"strategy": {"engine": "fsdp1"}},
    "single": {"strategy": {"engine": "single"}},
    "pairs": {"strategy": {"engine": "fsdp2", "precision": "mixed"}, "world": 2, "preference": {"loss": "dpo"}},
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=name, marks=[MORE] * (name == "pairs")) for name, case in WAITING.items()]
)
def test_the_host_waits_once_per_step(case: dict[str, Any], folder: str, tmp_path: Path):
    found = run(folder, tmp_path, "waits", **case)
    inside, at_step = found["waits"]
    assert (found["races"], inside) == ([], {})
    assert found["rows"] == ("shared" if "preference" in case else None)
    assert [(what.partition(" <")[0], count) for what, count in at_step.items()] == [("tolist", 1)]


def test_memory_of_two_streams_is_noticed(folder: str, tmp_path: Path):
    found = run(folder, tmp_path, "waits", strategy={"cpu_offload": True}, shares_buffer=True)
    assert set(found["races"]) == {"memory of the compute stream"}
