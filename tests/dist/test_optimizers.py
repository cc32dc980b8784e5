"""Optimizers besides AdamW, and noise on embeddings: a resume is bit-equal, and the audit knows what they keep."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from safetensors.torch import load_file
from transformers import LlamaConfig

from lit_fsdp.audit import audit_recipe
from tests.dist.forks import RankError, on_ranks
from tests.dist.reference import TINY, save_tiny
from tests.runs import MORE, check_recipe

MUON = {"optimizer": "lit_fsdp.MuonWithAdamW", "lr": 0.02, "schedule": "wsd"}
EIGHT_BITS = {"optimizer": "torchao.optim.AdamW8bit", "lr": 1e-3, "schedule": "wsd"}


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Half of its matrices have rows of whole blocks of 256, half have not; with dropout."""
    sizes = {"hidden_size": 256, "intermediate_size": 96, "num_hidden_layers": 1, "attention_dropout": 0.1}
    config = LlamaConfig(**{**TINY.to_dict(), **sizes, "head_dim": 64})
    return save_tiny(tmp_path_factory.mktemp("wide") / "model", config, seed=2)


def audited(folder: Path, optim: dict[str, Any]) -> dict[str, Any]:
    trainer = {"devices": 2, "max_steps": 2, "strategy": {"init_args": {"precision": "fp32"}}}
    data = {"train": "rows.jsonl", "global_batch_size": 12}
    return audit_recipe(
        check_recipe({"trainer": trainer, "model": {"name": str(folder), "optim": optim}, "data": data}, "fit")
    )


@pytest.mark.parametrize(
    ("optim", "layout"),
    [(EIGHT_BITS, "sharded"), pytest.param(EIGHT_BITS, "full", marks=MORE), (MUON, "sharded")],
    ids=["8bit", "full", "muon"],
)
def test_a_resume_is_bit_equal(wide_model: Path, tmp_path: Path, optim: dict[str, Any], layout: str) -> None:
    if optim is EIGHT_BITS:
        pytest.importorskip("torchao", reason="torchao is not installed")
    strategy, model = {"engine": "fsdp2", "state_dict": layout}, {"optim": optim, "neftune_alpha": 5.0}
    job: dict[str, Any] = {"folder": str(wide_model), "strategy": strategy, "model": model}
    whole = on_ranks("optimized_run", 2, run=str(tmp_path / "whole"), steps=6, **job)
    path = str(tmp_path / "whole/checkpoints/step-00000003")
    resumed = on_ranks("optimized_run", 2, run=str(tmp_path / "again"), steps=6, ckpt_path=path, **job)
    said = audited(wide_model, optim)
    for rank, (before, after) in enumerate(zip(whole, resumed, strict=True)):
        assert (after["losses"], after["digest"]) == (before["losses"][3:], before["digest"])
        assert len(after["losses"]) == 3
        assert before["state_bytes"] == said["state_per_rank"][rank]["optimizer_bytes"]
        assert before["in_codes"] == (16 if optim is EIGHT_BITS else 0)  # two moments of the matrices
    if optim is EIGHT_BITS:
        names = json.loads(Path(path, "manifest.json").read_text())["tensors"]
        kept = {name.rpartition(".")[2] for name in names if "q_proj.weight/exp_avg" in name}
        assert kept == {"codes", "scale"}
        job["model"] = {"optim": optim}
        sums = []
        for ranks, engine in ((2, "fsdp2"), (4, "fsdp2"), (1, "single")):  # which cut every matrix at whole blocks
            job["strategy"] = {"engine": engine}
            found = on_ranks("optimized_run", ranks, run=str(tmp_path / f"{ranks}"), steps=3, ckpt_path=path, **job)
            sums.append(sum(one["sum_of_state"] for one in found))
        assert sums == pytest.approx([sums[0]] * 3, rel=1e-12)


def test_noise_on_an_embedding_that_is_a_unit(untied_model: Path, tmp_path: Path) -> None:
    found = {}
    for engine, alpha in (("fsdp2", None), ("fsdp2", 5.0), ("fsdp1", 5.0), ("ddp", 5.0)):
        model = {"neftune_alpha": alpha, "optim": {"lr": 1e-3}}
        job = {"folder": str(untied_model), "run": str(tmp_path / f"{engine}{alpha}"), "strategy": {"engine": engine}}
        found[engine, alpha] = on_ranks("optimized_run", 2, steps=4, model=model, **job)[0]["losses"]
    plain, *noisy = found.values()
    for losses in noisy:
        assert losses == pytest.approx(noisy[0], rel=1e-5)
        assert all(abs(a - b) > 1e-4 for a, b in zip(losses, plain, strict=True))


def test_adafactor_is_that_of_one_process_or_refused(tiny_model: Path, tmp_path: Path) -> None:
    """Of the flat parts of FSDP1 it would take other means, and train something else."""
    model = {"optim": {"optimizer": "torch.optim.Adafactor", "lr": 1e-2}}
    job: dict[str, Any] = {"folder": str(tiny_model), "steps": 4, "model": model}
    (alone,) = on_ranks("optimized_run", 1, run=str(tmp_path / "1"), strategy={"engine": "single"}, **job)
    found = on_ranks("optimized_run", 2, run=str(tmp_path / "2"), strategy={"engine": "ddp"}, **job)
    assert found[0]["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert alone["losses"][-1] < 0.99 * alone["losses"][0]
    with pytest.raises(RankError, match=r"Adafactor with fsdp_strategy.engine: fsdp1\n.*ddp \| single: it needs means"):
        on_ranks("optimized_run", 2, run=str(tmp_path / "3"), strategy={"engine": "fsdp1"}, **job)


def test_muon_is_that_of_one_process(tiny_model: Path, tmp_path: Path) -> None:
    """Its iteration amplifies rounding, in fp32 some ten times; three ranks have uneven shards, some of them empty."""
    start, found = load_file(tiny_model / "model.safetensors"), []
    hybrid = {"sharding": "hybrid_shard", "replicate_degree": 2}
    for ranks, engine, more in ((1, "single", {}), (3, "fsdp2", {}), (4, "fsdp2", hybrid), (2, "ddp", {})):
        strategy = {"engine": engine, "precision": "fp32", **more}
        job: dict[str, Any] = {"folder": str(tiny_model), "run": str(tmp_path / f"{ranks}"), "optim": MUON, "steps": 4}
        on_ranks("train", ranks, strategy=strategy, **job)
        weights = torch.load(tmp_path / f"{ranks}" / "live.pt", weights_only=True)
        found.append(torch.cat([weights[name].flatten() for name in start]))
    moved = (found[0] - torch.cat([start[name].flatten() for name in start])).norm()
    assert max(float((one - found[0]).norm() / moved) for one in found) < 1e-4


def test_what_no_checkpoint_could_hold_is_refused(wide_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="torchao is not installed")
    job: dict[str, Any] = {"folder": str(wide_model), "run": str(tmp_path), "steps": 2}
    # 84 rows of 96 on the last of 3 ranks are whole blocks, 86 are not
    optim = {"optimizer": "torchao.optim.AdamW8bit", "optimizer_args": {"block_size": 128}}
    with pytest.raises(RankError, match=r"AdamW8bit, with \[8064, 8256\] elements of .*down_proj\.weight"):
        on_ranks("optimized_run", 3, strategy={"engine": "fsdp2"}, model={"optim": optim}, **job)


@pytest.mark.parametrize(("engine", "ranks"), [("fsdp2", 2), ("fsdp1", 2), ("ddp", 2), ("single", 1)])
def test_what_fails_in_step_1_is_refused_before_the_first_batch(engine: str, ranks: int, tmp_path: Path) -> None:
    everywhere = {"Nested": "a dict, more", "Asking": "closure", "LBFGS": "", "SparseAdam": "sparse|dense gradients"}
    wanted = everywhere | {
        "fsdp2": {"ByMask": "index_put", "Rprop": r"fsdp1 \| ddp \| single: ", "SGD": "_fused_sgd_"},
        "fsdp1": {"ByNorm": "it needs whole tensors"},
    }.get(engine, {})
    if Version(torch.__version__).release >= (2, 15):  # whose DTensors take masks
        wanted.pop("ByMask", None)
    for found in on_ranks("tried", ranks, engine=engine, folder=str(tmp_path)):
        assert {name for name, error in found.items() if error} == wanted.keys()
        for name, cause in wanted.items():
            said = (
                rf"model\.optim\.class_path: got .*\.{name} with .*{engine}\n.*({cause}).*\n  fix: .*AdamW.*\n0 batches"
            )
            assert re.fullmatch(said, found[name]), found[name]
        assert "Own" in found
