"""An Accelerate configuration trained by Accelerate, and its converted recipe by ours: units, dtypes and losses.

Accelerate needs a GPU for version 1 of FSDP; tests/unit/convert compares its plugin field by field.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_fsdp.convert import convert_file
from tests.dist.forks import on_ranks

STEPS = 4
# fp32 sums in another order; under bf16 Accelerate adds autocast to FSDP's own casts.
TOLERANCE = {"no": 1e-5, "bf16": 3e-3}


def with_accelerate(model: Path, env: dict[str, str], mixed_precision: str, forced: bool) -> Any:
    """What the original configuration did under the real library, on the first of two ranks."""
    pytest.importorskip("accelerate")
    job = {"folder": model, "env": env, "mixed_precision": mixed_precision, "steps": STEPS, "forced": forced}
    return on_ranks("train_with_accelerate", 2, **job)[0]


def converted(folder: Path, fsdp_config: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The recipe's trainer."""
    file = folder / "accelerate.yaml"
    file.write_text(
        yaml.safe_dump({"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": fsdp_config, **more})
    )
    found = convert_file("accelerate", file)
    assert not found.differs
    return found.recipe["trainer"]


@pytest.mark.parametrize(("mixed_precision", "reshard"), [("no", True), ("bf16", False)])
def test_the_converted_recipe_trains_as_accelerate_does(
    tiny_model: Path, tmp_path: Path, mixed_precision: str, reshard: bool
) -> None:
    config: dict[str, Any] = {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": reshard,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
        "fsdp_cpu_ram_efficient_loading": False,
    }
    strategy = converted(tmp_path, config, mixed_precision=mixed_precision)["strategy"]["init_args"]
    env = {name.upper(): str(value) for name, value in config.items()}
    env["FSDP_TRANSFORMER_CLS_TO_WRAP"] = env.pop("FSDP_TRANSFORMER_LAYER_CLS_TO_WRAP")
    env |= {"ACCELERATE_USE_FSDP": "true", "ACCELERATE_USE_CPU": "true"}
    theirs = with_accelerate(tiny_model, env, mixed_precision, forced=True)
    ours = on_ranks("train", 2, folder=tiny_model, strategy=strategy, steps=STEPS)[0]

    assert (theirs["type"], theirs["sharded"], theirs["dtypes"]) == ("FSDP", True, ["torch.float32"])
    blocks = [f"model.layers.{index}" for index in range(3)]
    assert [name for name in theirs["units"] if ".layers." in name] == blocks
    units = [unit["name"] for unit in ours["audit"]["units"] if "layers." in unit["name"]]
    assert [f"model.{name[name.index('layers.') :]}" for name in units] == blocks
    assert set(ours["dtypes"]["realized"]["parameters after set-up"]) == {"fp32"}
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=TOLERANCE[mixed_precision])


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_on_a_cpu_both_train_with_ddp(tiny_model: Path, tmp_path: Path, mixed_precision: str) -> None:
    config = {"fsdp_version": 2, "fsdp_offload_params": True}
    trainer = converted(tmp_path, config, use_cpu=True, mixed_precision=mixed_precision)
    assert trainer["accelerator"] == "cpu"
    env = {"ACCELERATE_USE_FSDP": "true", "ACCELERATE_USE_CPU": "true", "FSDP_VERSION": "2"}
    env |= {"FSDP_OFFLOAD_PARAMS": "true"}
    theirs = with_accelerate(tiny_model, env, mixed_precision, forced=False)
    assert (theirs["type"], theirs["sharded"], theirs["units"]) == ("MULTI_CPU", False, [])
    strategy = trainer["strategy"]["init_args"]
    assert (strategy["engine"], strategy["precision"]) == ("ddp", "fp32" if mixed_precision == "no" else "mixed")
    ours = on_ranks("train", 2, folder=tiny_model, strategy=strategy, steps=STEPS)[0]
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=TOLERANCE[mixed_precision])
