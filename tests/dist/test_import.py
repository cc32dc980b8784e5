"""What Lightning and Accelerate wrote goes on here: the same tensors bit for bit, the same next losses and units."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from lit_fsdp.__main__ import main
from lit_fsdp.checkpoint.manifest import read_manifest
from lit_fsdp.checkpoint.store import load_state
from lit_fsdp.convert import convert_file
from tests.dist.forks import command, on_ranks
from tests.dist.reference import LEARNING_RATE
from tests.runs import records

SAVED_AT, STEPS = 3, 6
LIGHTNING = {  # ranks, parameter groups, whether the parameters of its optimizer have names
    "single": (1, 2, False),
    "fsdp2": (2, 2, True),
    "fsdp1": (2, 1, True),  # its parameters are flat, so that none would count as a matrix
}
PLUGIN = {
    "ACCELERATE_USE_FSDP": "true",
    "ACCELERATE_USE_CPU": "true",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "False",
}


def check_import(source: Path, out: Path, model: Path, capsys: pytest.CaptureFixture, step: int, moments: int) -> None:
    """An import succeeds, of every weight, and says so."""
    assert main(["ckpt", "import", str(source), "-o", str(out), "--model", str(model)]) == 0
    said = f"{out}: step {step}, 29 weights, AdamW state of {moments} of them; the others start with new state\n"
    assert capsys.readouterr().out == said


def check_tensors(out: Path, truth_file: Path, net: str, moments: dict[Any, Any] | None = None) -> None:
    """Weights and named moments are bit for bit what torch gathered from the other tool's run.

    FSDP 1 gathers the moments of a full checkpoint through one buffer that only a GPU has apart from the result, so
    that on the CPU its file holds one moment twice; then ``moments`` are what the file holds.
    """
    found = load_file(out / "tensors.safetensors")
    truth = torch.load(truth_file, weights_only=True)
    truth["moments"] = truth["moments"] if moments is None else moments
    expected = {f"model/model.{name.removeprefix(net)}": t for name, t in truth["weights"].items()}
    expected.pop("model/model.lm_head.weight")  # tied
    for name, entry in truth["moments"].items():
        for key, value in entry.items():
            expected[f"optim/model.{name.removeprefix(net)}/{key}"] = torch.as_tensor(value)
    assert found.keys() == expected.keys()
    assert len(found) == (29 * 4 if truth["moments"] else 29)
    for name, tensor in expected.items():
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], tensor.reshape(found[name].shape)), name
    if truth["moments"]:
        assert read_manifest(out).tensors["optim/model.model.norm.weight/step"].shape == ()


def check_next_losses(model: Path, out: Path, run: Path, losses: list[float], decay: float) -> None:
    """A run of ours from the imported folder has the losses that the other tool had next, at the rate of the recipe."""
    job = {"folder": model, "run": run, "ckpt": out, "strategy": {"engine": "fsdp2", "precision": "fp32"}}
    after = on_ranks("continue_imported", 2, steps=STEPS, weight_decay=decay, **job)[0]
    assert after["losses"][0] == pytest.approx(losses[SAVED_AT], rel=1e-6)
    assert after["losses"] == pytest.approx(losses[SAVED_AT:], rel=1e-5)  # fp32 sums in another order
    assert after["rates"] == [LEARNING_RATE] * (STEPS - SAVED_AT)


@pytest.mark.parametrize("strategy", LIGHTNING)
def test_a_checkpoint_of_lightning(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture, strategy: str
) -> None:
    ranks, groups, has_names = LIGHTNING[strategy]
    source, out = tmp_path / "theirs.ckpt", tmp_path / "ours"
    job = {"folder": tiny_model, "out": source, "save_at": SAVED_AT, "steps": STEPS}
    losses = on_ranks("train_with_stock_lightning", ranks, strategy=strategy, groups=groups, **job)[0]
    assert source.is_dir() == (strategy in ("fsdp1", "fsdp2"))
    check_import(source, out, tiny_model, capsys, SAVED_AT, 29 if has_names else 0)
    check_tensors(out, Path(f"{source}.truth.pt"), "net.", None if has_names else {})
    if strategy in ("fsdp2", "fsdp1"):
        check_next_losses(tiny_model, out, tmp_path / "run", losses, 0.1 if groups == 2 else 0.0)


@pytest.mark.parametrize(("version", "kind"), [(1, "FULL_STATE_DICT"), (2, "SHARDED_STATE_DICT")])
def test_a_checkpoint_of_accelerate(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture, version: int, kind: str
) -> None:
    pytest.importorskip("accelerate")
    source, out = tmp_path / "checkpoint-3", tmp_path / "ours"
    job = {"folder": tiny_model, "out": source, "save_at": SAVED_AT, "steps": STEPS, "groups": version}
    env = {**PLUGIN, "FSDP_VERSION": str(version), "FSDP_STATE_DICT_TYPE": kind, "FSDP_USE_ORIG_PARAMS": "true"}
    losses = on_ranks("train_with_stock_accelerate", 2, env=env, **job)[0]["losses"]
    names = {path.name for path in source.iterdir()}
    assert names >= ({"pytorch_model_fsdp_0", "optimizer_0"} if "SHARDED" in kind else {"pytorch_model_fsdp.bin"})
    # its scheduler counts a step for every process; the optimizer counts what was done
    check_import(source, out, tiny_model, capsys, SAVED_AT, 29)
    one = (version, kind) == (1, "FULL_STATE_DICT")
    moments = torch.load(source / "optimizer.bin", weights_only=True)["state"] if one else None
    check_tensors(out, Path(f"{source}.truth.pt"), "", moments)
    if (version, kind) == (2, "SHARDED_STATE_DICT"):
        check_next_losses(tiny_model, out, tmp_path / "run", losses, 0.1)
        (source / "trainer_state.json").write_text('{"global_step": 7}')  # where the Trainer writes it
        shutil.rmtree(out)
        check_import(source, out, tiny_model, capsys, 7, 29)
        (source / "trainer_state.json").write_text('{"global_step": 5}')
        shutil.rmtree(out)
        shutil.rmtree(source / "optimizer_0")
        check_import(source, out, tiny_model, capsys, 5, 0)
        # weights alone: the optimizer begins anew, at the learning rate of the step in the recipe's schedule
        assert load_state(out)["optimizer_states"] == []
        job = {"folder": tiny_model, "run": tmp_path / "fresh", "ckpt": out, "strategy": {"engine": "fsdp1"}}
        after = on_ranks("continue_imported", 1, steps=8, schedule="linear", warmup_steps=2, **job)[0]
        assert after["rates"] == pytest.approx([LEARNING_RATE * (1 - done / 6) for done in (3, 4, 5)])


def test_a_recipe_goes_on_from_an_import(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """By the command line, with our data: 7 rows in batches of 2 are 4 steps an epoch, the last a short one."""
    rows = [{"prompt": f"{n}?", "completion": "yes"} for n in range(7)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        "trainer": {"devices": 1, "accelerator": "cpu", "max_epochs": 3, "max_steps": -1, "log_every_n_steps": 1},
        "model": {"name": str(tiny_model), "optim": {"lr": 0.001, "schedule": "linear"}},
        "data": {"train": str(tmp_path / "rows.jsonl"), "global_batch_size": 2, "micro_batch_size": 1},
        "checkpoint": {"every_steps": 4, "keep_last": -1},
    }
    recipe["trainer"]["strategy"] = {"class_path": "lit_fsdp.fsdp_strategy", "init_args": {"precision": "fp32"}}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    for step in (3, 4):  # inside an epoch, and between two
        source, run = tmp_path / f"theirs-{step}.ckpt", tmp_path / f"run-{step}"
        job = {"folder": tiny_model, "out": source, "save_at": step, "steps": step, "groups": 2}
        on_ranks("train_with_stock_lightning", 1, strategy="single", **job)
        check_import(source, tmp_path / f"ours-{step}", tiny_model, capsys, step, 0)
        flags = ["--ckpt_path", f"ours-{step}", "--trainer.default_root_dir", str(run)]
        (done,) = command(1, ["fit", "--config", "recipe.yaml", *flags], tmp_path)
        assert done.code == 0, done.err
        assert "learning rate changes" not in done.err  # the import has none
        saved = sorted(path.name for path in (run / "checkpoints").iterdir())
        assert saved == [f"step-{n:08d}" for n in (4, 8, 12) if n > step]
        state = load_state(run / "checkpoints" / "step-00000012")
        assert state["lr_schedulers"][0]["last_epoch"] == 12
        assert state["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"] == 2
        rates = [float(row["lr"]) for row in records(run / "metrics.csv") if row.get("lr")]
        assert rates == pytest.approx([0.001 * (1 - n / 12) for n in range(step, 12)])


# fp32 sums in another order; under bf16 Accelerate adds autocast to FSDP's own casts.
@pytest.mark.parametrize(("mixed_precision", "reshard", "tolerance"), [("no", True, 1e-5), ("bf16", False, 3e-3)])
def test_the_converted_recipe_trains_as_accelerate_does(
    tiny_model: Path, tmp_path: Path, mixed_precision: str, reshard: bool, tolerance: float
) -> None:
    pytest.importorskip("accelerate")
    config = {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": reshard,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
        "fsdp_cpu_ram_efficient_loading": False,
    }
    file = tmp_path / "accelerate.yaml"
    recipe = {"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": config}
    file.write_text(yaml.safe_dump({**recipe, "mixed_precision": mixed_precision}))
    found = convert_file("accelerate", file)
    assert not found.differs
    strategy = found.recipe["trainer"]["strategy"]["init_args"]
    env = {**PLUGIN, "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": str(reshard)}
    job = {"folder": tiny_model, "mixed_precision": mixed_precision, "steps": 4, "groups": 2}
    theirs = on_ranks("train_with_stock_accelerate", 2, env=env, **job)[0]
    ours = on_ranks("train", 2, folder=tiny_model, strategy=strategy, steps=4)[0]
    assert (theirs["sharded"], theirs["dtypes"]) == (True, ["torch.float32"])
    blocks = [f"model.layers.{index}" for index in range(3)]
    assert [name for name in theirs["units"] if ".layers." in name] == blocks
    units = [unit["name"] for unit in ours["audit"]["units"] if "layers." in unit["name"]]
    assert [f"model.{name[name.index('layers.') :]}" for name in units] == blocks
    assert set(ours["dtypes"]["realized"]["parameters after setup"]) == {"fp32"}
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=tolerance)
