"""Pairs on every engine: a plain loop's losses however they are cut, and one reference."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from lit_fsdp.checkpoint.manifest import read_manifest
from tests.dist.forks import command, on_ranks
from tests.dist.preference_jobs import BETA, plain_dpo
from tests.runs import MORE, records

NAMES = ("loss", "rewards/chosen", "rewards/rejected")
LORA = {"lora": {"r": 4, "alpha": 64, "target_modules": "all-linear"}}
QLORA = {"lora": {**LORA["lora"], "quantize": "nf4"}}


def worst(found: list[dict[str, float]], wanted: list[dict[str, float]], names: tuple[str, ...] = NAMES) -> float:
    """Largest difference of a logged number in any step."""
    assert len(found) == len(wanted)
    return max(abs(a[name] - b[name]) for a, b in zip(found, wanted, strict=True) for name in names)


def test_losses_and_rewards_are_those_of_a_plain_loop(tiny_model: Path, tmp_path: Path) -> None:
    """Ranks, engines and accumulation; all but the first take the reference that it has computed."""
    wanted, kept = plain_dpo(str(tiny_model)), None
    for engine, ranks, micro in (("fsdp2", 2, 1), ("fsdp1", 2, 1), ("ddp", 2, 2), ("single", 1, 4)):
        job = {"folder": str(tiny_model), "run": str(tmp_path / f"{engine}-{micro}"), "micro": micro}
        found = on_ranks("train_pairs", ranks, strategy={"engine": engine}, **job)[0]
        assert worst(found["steps"], wanted) < 2e-5, (engine, micro)
        first, last = found["steps"][0], found["steps"][-1]
        assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
        assert found["rows"] == "shared"
        assert found["tokens"] == found["slots"]
        assert last["rewards/margins"] > 0.5
        assert last["rewards/accuracies"] == 1
        kept = kept or found["references"]
        assert len(kept) == 1
        assert found["references"] == kept


@pytest.mark.parametrize(
    ("engine", "model"),
    [("fsdp2", QLORA), pytest.param("fsdp1", LORA, marks=MORE), ("ddp", LORA)],
    ids=["fsdp2-nf4", "fsdp1", "ddp"],
)
def test_with_adapters_the_reference_is_what_lies_below_them(
    tiny_model: Path, tmp_path: Path, engine: str, model: dict[str, Any]
) -> None:
    """Each step sees all twelve pairs, so what they are compared with must stay the first step's model.

    It is in the cache for any ranks, engine or seed and a resume, but not where fewer pairs are seen than there are.
    """
    data = {"global_batch_size": 12}
    job: dict[str, Any] = {"folder": str(tiny_model), "steps": 4, "model": model, "data": data}
    recompute = {"engine": engine, "activation_checkpointing": "none" if engine == "ddp" else "full"}
    found = on_ranks("train_pairs", 2, run=str(tmp_path / "a"), strategy=recompute, **job)[0]["steps"]
    (alone,) = on_ranks("train_pairs", 1, run=str(tmp_path / "b"), strategy={"engine": "single"}, **job)
    assert worst(found, alone["steps"]) < 2e-5
    assert len(alone["references"]) == 1
    (resumed,) = on_ranks(
        "train_pairs",
        1,
        run=str(tmp_path / "c"),
        strategy={"engine": "single"},
        seed=4,
        ckpt_path=str(tmp_path / "a/checkpoints/step-00000002"),
        **job,
    )
    assert resumed["references"] == alone["references"]
    assert worst(resumed["steps"], found[2:]) < 2e-5
    few = {"strategy": {"engine": "single"}, **job, "steps": 2, "data": {"global_batch_size": 4}}
    (below,) = on_ranks("train_pairs", 1, run=str(tmp_path / "few" / "d"), **few)
    assert below["references"] == {}
    assert below["steps"][0]["rewards/margins"] == 0
    assert found[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert found[0]["rewards/margins"] == pytest.approx(0, abs=1e-5)
    assert found[-1]["rewards/margins"] > 0.05
    for step in found:
        for side in ("chosen", "rejected"):
            below = step[f"logps/{side}"] - step[f"rewards/{side}"] / BETA
            assert below == pytest.approx(found[0][f"logps/{side}"], abs=1e-4)


def test_losses_without_a_reference_do_not_depend_on_ranks(tiny_model: Path, tmp_path: Path) -> None:
    for loss in ("ipo", "orpo", "simpo"):
        job: dict[str, Any] = {"folder": str(tiny_model), "steps": 3, "model": {"preference": {"loss": loss}}}
        found = on_ranks("train_pairs", 2, run=str(tmp_path / loss), micro=1, strategy={"engine": "fsdp2"}, **job)
        (alone,) = on_ranks(
            "train_pairs", 1, run=str(tmp_path / f"{loss}-1"), micro=4, strategy={"engine": "single"}, **job
        )
        names = ("loss", "rewards/margins", *(("nll_loss",) if loss == "orpo" else ()))
        assert worst(found[0]["steps"], alone["steps"], names) < 2e-5, loss
        assert found[0]["steps"][-1]["loss"] < found[0]["steps"][0]["loss"]


def test_another_model_or_setting_has_a_reference_of_its_own(tiny_model: Path, tmp_path: Path) -> None:
    """Its first loss is that of two equal models, although rows, names and even sums of the weights are the same."""
    other = shutil.copytree(tiny_model, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].flip(1).contiguous()
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    job: dict[str, Any] = {"strategy": {"engine": "single"}, "steps": 1}
    for number, (folder, overrides) in enumerate(
        ((tiny_model, None), (other, None), (tiny_model, {"rms_norm_eps": 0.5}), (tiny_model, None))
    ):
        model = {"config_overrides": overrides} if overrides else {}
        run = str(tmp_path / f"run-{number}")
        (found,) = on_ranks("train_pairs", 1, folder=str(folder), run=run, model=model, **job)
        assert found["steps"][0]["loss"] == pytest.approx(math.log(2), abs=1e-6), number
    assert len(found["references"]) == 3


def test_a_resumed_run_is_bit_equal_and_takes_the_reference_of_before(tiny_model: Path, tmp_path: Path) -> None:
    job: dict[str, Any] = {"folder": str(tiny_model), "strategy": {"engine": "fsdp2"}, "steps": 4}
    whole = on_ranks("train_pairs", 2, run=str(tmp_path / "whole"), **job)
    again = str(tmp_path / "whole" / "checkpoints" / "step-00000002")
    resumed = on_ranks("train_pairs", 2, run=str(tmp_path / "rest"), ckpt_path=again, **job)
    assert [rank["digest"] for rank in resumed] == [rank["digest"] for rank in whole]
    assert resumed[0]["steps"] == whole[0]["steps"][2:]
    assert resumed[0]["references"] == whole[0]["references"]


def test_a_recipe_trains_validates_and_predicts(tiny_model: Path, tmp_path: Path) -> None:
    """By the command line; a checkpoint is validated against the model before training, not against itself."""
    recipe = tmp_path / "pairs.yaml"
    recipe.write_text(f"model: {{class_path: lit_fsdp.PreferenceModule, init_args: {{name: {tiny_model}}}}}\n")
    words = ["--config", str(recipe), "--data.train", "generated:12", "--data.val", "generated:7"]
    words += ["--data.max_seq_length", "200", "--data.global_batch_size", "4", "--model.preference.beta", "0.5"]
    words += ["--trainer.accelerator", "cpu", "--trainer.devices", "2", "--trainer.default_root_dir", "run"]
    words += ["--trainer.strategy.init_args.precision", "fp32", "--data.cache_dir", "cache"]
    alone = [*words, "--trainer.strategy.init_args.engine=fsdp1", "--trainer.default_root_dir", "alone"]
    for rank in command(2, ["validate", *alone], tmp_path):
        assert rank.code == 0, rank.err
    assert float(records(tmp_path / "alone/validate-metrics.csv")[-1]["val_loss"]) == pytest.approx(math.log(2))
    fit = [*words, "--seed_everything", "5", "--trainer.max_steps", "3", "--trainer.val_check_interval", "6"]
    fit += ["--model.optim.lr", "1e-3"]
    done = command(2, ["fit", *fit], tmp_path)
    assert [rank.code for rank in done] == [0, 0], done[0].err
    position = read_manifest(tmp_path / "run/checkpoints/step-00000003").extra["data"]
    assert (position["seed"], position["epoch"], position["global_batches_done_in_epoch"]) == (5, 1, 0)
    for rank in command(2, ["validate", *words, "--ckpt_path", "last"], tmp_path):
        assert rank.code == 0, rank.err
    found = []
    for name in ("metrics.csv", "validate-metrics.csv"):
        last = records(tmp_path / "run" / name)[-1]
        found.append({key: float(value) for key, value in last.items() if key.startswith("val_")})
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    assert found[0]["val_loss"] < math.log(2) - 1e-3
    assert found[0]["val_rewards/margins"] > 0
    predict = [*words, "--data.predict", "generated:5", "--ckpt_path", "last"]
    assert command(2, ["predict", *predict], tmp_path)[0].code == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "predictions.jsonl").read_text().splitlines()]
    assert [row["row"] for row in rows] == list(range(5))
    assert all(row["logp_chosen"] < 0 and row["logp_rejected"] < 0 for row in rows)
    bare = ["fit", "--model.name", str(tiny_model), "--data.train", "generated:12", "--data.format", "preference"]
    bare += ["--trainer.max_steps", "1", "--trainer.accelerator", "cpu", "--trainer.devices", "1"]
    (refused,) = command(1, [*bare, "--data.cache_dir", "cache"], tmp_path)
    assert refused.code == 2
    assert "lit_fsdp.PreferenceModule" in refused.err
