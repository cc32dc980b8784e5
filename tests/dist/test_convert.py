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
    pytest.importorskip("accelerate")
    strategy = converted(tmp_path, config, mixed_precision=mixed_precision)["strategy"]["init_args"]
    env = {name.upper(): str(value) for name, value in config.items()}
    env["FSDP_TRANSFORMER_CLS_TO_WRAP"] = env.pop("FSDP_TRANSFORMER_LAYER_CLS_TO_WRAP")
    env |= {"ACCELERATE_USE_FSDP": "true", "ACCELERATE_USE_CPU": "true"}
    job = {"folder": tiny_model, "mixed_precision": mixed_precision, "steps": STEPS, "groups": 2}
    theirs = on_ranks("train_with_stock_accelerate", 2, env=env, **job)[0]
    ours = on_ranks("train", 2, folder=tiny_model, strategy=strategy, steps=STEPS)[0]

    assert (theirs["sharded"], theirs["dtypes"]) == (True, ["torch.float32"])
    blocks = [f"model.layers.{index}" for index in range(3)]
    assert [name for name in theirs["units"] if ".layers." in name] == blocks
    units = [unit["name"] for unit in ours["audit"]["units"] if "layers." in unit["name"]]
    assert [f"model.{name[name.index('layers.') :]}" for name in units] == blocks
    assert set(ours["dtypes"]["realized"]["parameters after set-up"]) == {"fp32"}
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=TOLERANCE[mixed_precision])
