"""lit-fsdp audit: what a recipe would do, without weights, processes or training."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import torch

from lit_fsdp.__main__ import main
from lit_fsdp.audit import audit_recipe, state_per_rank
from lit_fsdp.config.parser import load_recipe
from lit_fsdp.config.strategy import StrategyConfig, WrapConfig
from lit_fsdp.parallel.units import plan_for

ROOT = Path(__file__).parents[2]
RECIPE_70B = ROOT / "recipes" / "llama3.1-70b_full_fsdp2_64x80gb.yaml"
SMALL = ROOT / "recipes" / "smollm2-135m_full_fsdp2_2xcpu.yaml"
_ARGS = "trainer.strategy.init_args"


def test_seventy_billion_parameters_in_seconds():
    start = time.process_time()
    record = audit_recipe(load_recipe(["--config", str(RECIPE_70B)], "fit").run)
    assert time.process_time() - start < 10
    assert (record["num_params"], record["num_units"]) == (70_553_706_496, 83)
    assert (record["ranks"], record["replicate_degree"], record["shard_degree"]) == (64, 1, 64)
    assert sum(unit["recompute"] == "full" for unit in record["units"]) == 80
    for rank in record["state_per_rank"]:
        assert list(rank.values()) == [record["num_params"] // part for part in (64, 16, 16, 8)]


def test_four_thousand_ranks_take_no_more_work_than_four():
    module = torch.nn.ModuleDict({"a": torch.nn.Linear(30, 5000), "b": torch.nn.Linear(7, 3)})
    asked: list[int] = []

    def kept(param: torch.nn.Parameter, count: int) -> int:
        asked.append(count)
        return 2 * count

    for engine in ("fsdp1", "fsdp2"):
        config = StrategyConfig(engine=engine, wrap=WrapConfig(classes=["Linear"]))  # type: ignore[arg-type]
        found = state_per_rank(module, plan_for(module, config, "strategy"), config, 4096, kept)
        assert sum(rank["num_params"] for rank in found) == sum(p.numel() for p in module.parameters())
        assert [rank["optimizer_bytes"] for rank in found] == [2 * rank["num_params"] for rank in found]
    assert len(asked) <= 3 * 4 * 2


def test_the_command_prints_tables_or_json(capsys, monkeypatch):
    monkeypatch.setattr("lit_fsdp.parallel.precision.cpu_has_bf16", lambda: True)
    words = ["audit", "--config", str(SMALL), f"--{_ARGS}.activation_checkpointing", "full"]
    words += ["--ranks", "4", "--nodes", "2", f"--{_ARGS}.sharding", "hybrid_shard"]
    assert main([*words, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["replicate_degree"], record["shard_degree"], record["ranks"]) == (2, 2, 4)
    assert sum(rank["num_params"] for rank in record["state_per_rank"]) == record["num_params"] == 134_515_008
    monkeypatch.delenv("COLUMNS", raising=False)
    assert main(words) == 0
    assert re.search(r"layers.0 … 29\s+30 × LlamaDecoderLayer", capsys.readouterr().out)  # a file has 120 columns
    monkeypatch.setenv("COLUMNS", "80")
    assert main(words) == 0
    text, _ = capsys.readouterr()
    assert re.search(r"model.model.layers.0 … 29 +30 × .*\n +LlamaDecode", text)  # names are whole
    assert max(map(len, text.splitlines()[:12])) <= 80
    assert "fsdp2 hybrid_shard on 4 ranks: replicate_degree 2, shard_degree 2" in text
    assert "precision mixed declares param fp32, compute bf16, reduce fp32" in text


def test_what_cannot_be_is_refused(capsys):
    for words, said in (
        (["--ranks", "0"], "--nodes: got 1 for 0 ranks"),
        (["--nodes", "2"], "--nodes: got 2 without --ranks"),
        (["--rank", "8"], "write --ranks NUMBER"),  # not the rank of adapters
        ([f"--{_ARGS}.wrap", "[NoSuchBlock]"], "NoSuchBlock"),
        ([f"--{_ARGS}.context_parallel", "0"], f"{_ARGS}.context_parallel: got 0\n"),
        ([f"--{_ARGS}.context_parallel={{degree: 0}}"], f"{_ARGS}.context_parallel.degree: got 0\n"),
        ([f"--{_ARGS}.context_parallel=2", "--model.attn_implementation=eager"], "2 for llama with attention eager"),
        ([f"--{_ARGS}.expert_parallel", "2"], "2 for llama, which has no such experts"),
    ):
        assert main(["audit", "--config", str(SMALL), *words]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert said in err
        assert "allowed:" in err


def test_what_is_replaced_is_said(capsys):
    assert main(["audit", "--config", str(SMALL), f"--{_ARGS}.engine", "ddp", "--ranks", "3"]) == 0
    out, _ = capsys.readouterr()
    assert "ddp no_shard on 3 ranks: replicate_degree 3, shard_degree 1\n" in out
    assert "replaced: sharding: full_shard → no_shard" in out
    assert main(["audit", "--config", str(SMALL), f"--{_ARGS}.context_parallel", "2"]) == 0
    assert "on 2 ranks: replicate_degree 1, shard_degree 2, context_parallel 2\n" in capsys.readouterr().out
