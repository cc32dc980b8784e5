"""Values of HF_TOKEN and WANDB_API_KEY appear in nothing that is written, wherever a run breaks down."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.dist.forks import server

CANARIES = {"HF_TOKEN": "hf_Canary1Canary2Canary3Canary4ab", "WANDB_API_KEY": "c0ffee00c0ffee11c0ffee22c0ffee33"}
CRASHES = {
    "nowhere": "",
    "data": "lit_fsdp.datamodule.CausalLMDataModule.setup",
    "model": "lit_fsdp.module.CausalLMModule.configure_model",
    "step": "lit_fsdp.module.CausalLMModule.training_step",
    "save": "lit_fsdp.callbacks.checkpoint.Checkpoint.save",
    "disk": "lit_fsdp.checkpoint.storage.Writer.write_data",
    "collective": "lit_fsdp.checkpoint.ranks.Ranks.run",
}
RECIPE = """
seed_everything: 5
trainer:
  accelerator: cpu
  devices: 2
  max_steps: 2
  enable_progress_bar: false
  default_root_dir: run
  strategy: {class_path: lit_fsdp.fsdp_strategy, init_args: {timeout_seconds: 30}}
data: {train: "generated:32", val: "generated:4", max_seq_length: 64, global_batch_size: 4, micro_batch_size: 2}
checkpoint: {every_steps: 1}
"""


@pytest.mark.parametrize("where", CRASHES)
def test_no_canary_in_any_output(tiny_model: Path, tmp_path: Path, where: str) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    words = ["fit", "--config", "recipe.yaml", "--model.name", tiny_model]
    job = server().start("crash", 2, env=CANARIES, words=words, cwd=tmp_path, where=CRASHES[where])
    outcomes = job.wait(120)
    job.kill()
    assert not job.is_alive()
    assert all(o.code is not None for o in outcomes)
    said = "".join(o.output for o in outcomes)
    assert all((o.code == 0) == (where == "nowhere") for o in outcomes), said
    assert where == "nowhere" or "made to fail" in said
    texts = {"output": said.encode()}
    for folder in (tmp_path, job.place):
        texts |= {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert len(texts) > 3
    if where in ("step", "disk"):
        status = json.loads((tmp_path / "run/audit.json").read_text())["status"]
        assert re.match(r"failed: \w+Error: .*made to fail: https://\*\*\*@hub", status, re.DOTALL)
    for name, text in texts.items():
        for canary in CANARIES.values():
            assert canary.encode() not in text, f"{name} holds a secret: {text[-2000:]!r}"
