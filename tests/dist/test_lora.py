"""Adapters on every engine: the losses of plain peft in one process, whatever is sharded, recomputed or compiled."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lit_fsdp import CausalLMModule
from lit_fsdp.checkpoint.manifest import read_manifest
from lit_fsdp.checkpoint.safetensors_file import num_bytes
from lit_fsdp.errors import ConfigError
from lit_fsdp.models.generate import Chat
from lit_fsdp.models.lora import apply_saved_lora
from tests.dist.forks import command, on_ranks, on_ranks_each
from tests.dist.lora_jobs import peft_losses
from tests.dist.matrix import worst_difference
from tests.dist.reference import reference_losses
from tests.runs import MORE

LORA = {"r": 4, "alpha": 8}
ALL = {**LORA, "target_modules": "all-linear"}
# units with nothing to train inside of units with something, and the other way round
APART = {"patterns": ["model.layers.*.mlp.*_proj.base_layer", "model.layers.*.self_attn.*_proj.lora_B.default"]}
WRAP = {"classes": ["LlamaDecoderLayer"], **APART}


@pytest.mark.parametrize(
    ("strategy", "lora", "ranks"),
    [
        ({"engine": "fsdp2", "activation_checkpointing": "full"}, ALL, 2),
        ({"engine": "fsdp1", "sharding": "shard_grad_op"}, {**ALL, "use_dora": True}, 2),
        ({"engine": "fsdp2", "activation_checkpointing": "selective"}, {**LORA, "modules_to_save": ["norm"]}, 2),
        pytest.param(
            {"engine": "fsdp1", "activation_checkpointing": "every_n"},
            {**LORA, "modules_to_save": ["norm"]},
            2,
            marks=MORE,
        ),
        ({"engine": "single", "activation_checkpointing": "full"}, ALL, 1),
        ({"engine": "fsdp2", "wrap": WRAP}, ALL, 2),
        ({"engine": "fsdp1", "wrap": WRAP}, ALL, 2),
        pytest.param({"engine": "fsdp2", "activation_checkpointing": "full", "compile": True}, LORA, 2, marks=MORE),
    ],
)
def test_losses_are_those_of_plain_peft(
    tiny_model: Path, strategy: dict[str, Any], lora: dict[str, Any], ranks: int
) -> None:
    options = {**strategy, "precision": "fp32"}
    results = on_ranks("train_lora", ranks, 300, folder=tiny_model, strategy=options, model={"lora": lora})
    wanted = peft_losses(str(tiny_model), lora)
    losses = results[0]["losses"]
    assert worst_difference(losses, wanted) < 1e-5
    assert losses[-1] < 0.985 * losses[0]  # the adapters do learn
    assert worst_difference(losses[:1], reference_losses(str(tiny_model), 1)) < 1e-6  # B = 0
    for result in results:
        assert result["only_trained_are_optimized"]
        assert result["changed"] == []


def test_mixed_precision_keeps_the_base_in_bf16_and_the_audit_says_so(tiny_model: Path) -> None:
    wanted, engines = peft_losses(str(tiny_model), ALL), ("fsdp2", "fsdp1", "ddp")
    job: dict[str, Any] = {"folder": tiny_model, "model": {"lora": ALL}}
    found = on_ranks_each("train_lora", 2, [{"strategy": {"engine": engine}} for engine in engines], **job)
    for engine, (result, _) in zip(engines, found, strict=True):
        assert worst_difference(result["losses"], wanted) < 5e-3
        audit, dtypes = result["audit"], result["dtypes"]
        assert audit["num_trainable"] == sum(unit["num_trainable"] for unit in audit["units"])
        frozen, size = ("fp32", 4) if engine == "fsdp1" else ("bf16", 2)
        for unit in audit["units"]:
            trained = unit["num_trainable"]
            assert unit["num_bytes"] == 4 * trained + size * (unit["num_params"] - trained)
        assert dtypes["declared"] == {"param": "fp32", "frozen": frozen, "compute": "bf16", "reduce": "fp32"}
        for when in ("after setup", "after the first step"):
            assert set(dtypes["realized"][f"parameters {when}"]) == {"fp32"}
            assert set(dtypes["realized"][f"frozen parameters {when}"]) == {frozen}
        assert set(dtypes["realized"]["gradients"]) == {"fp32"}
        assert set(dtypes["realized"]["optimizer state after the first step"]) == {"fp32"}
        assert result["changed"] == []


def test_frozen_parameters_stay_and_the_others_learn(tiny_model: Path) -> None:
    job: dict[str, Any] = {"folder": tiny_model, "model": {"freeze": ["model.embed_tokens.*", "model.layers.0.*"]}}
    found = on_ranks("train_lora", 1, strategy={"engine": "single", "precision": "fp32"}, **job)
    cases = [{"strategy": {"engine": engine, "precision": "fp32"}} for engine in ("fsdp2", "fsdp1")]
    found += itertools.chain(*on_ranks_each("train_lora", 2, cases, **job))
    names = set(found[0]["names"])
    frozen = {name for name in names if ".layers.0." in name or "embed_tokens" in name}
    for result in found:
        assert worst_difference(result["losses"], found[0]["losses"]) < 1e-5
        assert set(result["changed"]) == names - frozen
        assert result["only_trained_are_optimized"]


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft 0.21 on transformers 5.23
@pytest.mark.parametrize(
    ("strategy", "lora"),
    [
        ({"engine": "fsdp2"}, {**ALL, "use_dora": True}),
        ({"engine": "fsdp1", "state_dict": "full"}, {**LORA, "modules_to_save": ["norm"]}),
    ],
    ids=["fsdp2-dora", "fsdp1-full-whole-module"],
)
def test_exported_adapters_are_the_live_model(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: dict[str, Any], lora: dict[str, Any]
) -> None:
    base = shutil.copytree(tiny_model, tmp_path / "base")
    job = {"folder": base, "strategy": {**strategy, "precision": "fp32"}, "model": {"lora": lora}}
    (result, _) = on_ranks("train_lora", 2, run=tmp_path, **job)
    manifest = read_manifest(tmp_path / "checkpoints/step-00000006")
    saved = {name for name in manifest.tensors if name.startswith("model/")}
    assert saved == {f"model/{name}" for name in result["trained"]}
    in_state = sum(num_bytes(spec) for name, spec in manifest.tensors.items() if name.startswith("state/"))  # averages
    assert manifest.num_bytes - in_state < (tiny_model / "model.safetensors").stat().st_size
    assert Path(manifest.extra["model"]["base"]["name"]) == base
    words = ["export", "--ckpt", "checkpoints/step-00000006", "--verify", "--out"]
    for out, flags in (
        ("adapter", []),
        ("merged", ["--merge"]),
        ("ema", ["--ema"]),
        ("ema-merged", ["--ema", "--merge"]),
    ):
        (done,) = command(1, [*words, out, *flags], tmp_path)
        assert (done.code, done.err) == (0, "")
        assert "verified: loaded again, keys, tensors and logits are equal\n" in done.out
    live = AutoModelForCausalLM.from_pretrained(tiny_model)
    apply_saved_lora(live, json.loads((tmp_path / "adapter" / "adapter_config.json").read_text()))
    state = torch.load(tmp_path / "live.pt", weights_only=True)
    missing, unexpected = live.load_state_dict(state, strict=False, assign=True)
    live.tie_weights()
    assert (missing, unexpected) == (["lm_head.weight"], [])
    adapted = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")  # which names its base
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    ids = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        wanted, of_adapter, of_merged = (m.eval()(input_ids=ids).logits for m in (live, adapted, merged))
    assert torch.equal(of_adapter, wanted)
    torch.testing.assert_close(of_merged, wanted, rtol=1e-4, atol=1e-5)
    live.load_state_dict(torch.load(tmp_path / "averages.pt", weights_only=True), strict=False, assign=True)
    averaged = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "ema")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "ema-merged")
    with torch.no_grad():
        before, (wanted, of_adapter, of_merged) = (
            wanted,
            (m.eval()(input_ids=ids).logits for m in (live, averaged, merged)),
        )
    assert not torch.equal(wanted, before)
    assert torch.equal(of_adapter, wanted)
    torch.testing.assert_close(of_merged, wanted, rtol=1e-4, atol=1e-5)
    with pytest.raises(ConfigError, match="nmae"):
        CausalLMModule.load_from_checkpoint(manifest.folder, name=str(base), lora=lora, nmae="a typo")
    module = CausalLMModule.load_from_checkpoint(manifest.folder, name=str(base), lora=lora).model
    assert all(torch.equal(module.state_dict()[name], tensor) for name, tensor in state.items())
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")  # fp32 on every CPU
    assert Chat(str(tmp_path / "adapter"), None, 9).answer("2 + 2?") == Chat(str(tmp_path / "merged"), None, 9).answer(
        "2 + 2?"
    )
    if strategy["engine"] != "fsdp2":
        return
    base.rename(tmp_path / "moved")
    for line in ([*words, "again", "--merge"], ["generate", "--prompt", "2 + 2?", "--model", "adapter"]):
        (done,) = command(1, line, tmp_path)
        assert done.code == 2
        assert f"error: --base: got {base}, which does not exist" in done.err
        (done,) = command(1, [*line, "--base", "moved"], tmp_path)
        assert done.code == 0, done.err


@pytest.mark.parametrize(
    ("engine", "other", "ranks", "lora"),
    [
        ("fsdp2", "ddp", 1, {"modules_to_save": ["norm"]}),
        pytest.param("fsdp1", "fsdp2", 4, {"modules_to_save": ["norm"]}, marks=MORE),
        ("fsdp2", "single", 1, {"quantize": "nf4", "double_quantization": True}),
    ],
)
def test_resumed_from_adapters_alone(
    tiny_model: Path, tmp_path: Path, engine: str, other: str, ranks: int, lora: dict[str, Any]
) -> None:
    job: dict[str, Any] = {"folder": str(tiny_model), "model": {"lora": {**ALL, **lora}}}
    strategy = {"engine": engine, "precision": "fp32"}
    (whole, _) = on_ranks("train_lora", 2, run=str(tmp_path / "a"), strategy=strategy, **job)
    job["ckpt_path"] = str(tmp_path / "a/checkpoints/step-00000003")
    (rest, _) = on_ranks("train_lora", 2, run=str(tmp_path / "b"), strategy=strategy, **job)
    assert rest["losses"] == whole["losses"][3:]
    files = [tmp_path / run / "checkpoints/step-00000006/tensors/rank-00001.safetensors" for run in "ab"]
    assert files[0].read_bytes() == files[1].read_bytes()
    (again, *_) = on_ranks("train_lora", ranks, strategy={"engine": other, "precision": "fp32"}, **job)
    assert worst_difference(again["losses"], whole["losses"][3:]) < 1e-5


def test_a_resume_through_the_command_line_wants_the_same_adapters_and_base(tiny_model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{i} + 1 = ", "completion": str(i + 1)} for i in range(24)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = [
        *("fit", "--model.name", str(tiny_model), "--model.lora.r", "4", "--model.lora.target_modules", "all-linear"),
        *("--data.train", "rows.jsonl", "--data.global_batch_size", "4", "--data.micro_batch_size", "2"),
        *("--trainer.devices", "2", "--trainer.accelerator", "cpu", "--seed_everything", "3"),
        *("--trainer.strategy.class_path", "lit_fsdp.fsdp_strategy", "--checkpoint.every_steps", "2"),
        *("--trainer.default_root_dir", "a"),
    ]
    done = command(2, [*words, "--trainer.max_steps", "4"], tmp_path)
    assert [one.code for one in done] == [0, 0], done[0].err
    assert " trained, " in done[0].err
    tensors = read_manifest(tmp_path / "a/checkpoints/step-00000004").tensors
    assert not [name for name in tensors if "lora_" not in name]
    recipe = (tmp_path / "a/recipe.yaml").read_bytes()
    others = [*words[1:], "--ckpt_path", "last", "--trainer.max_steps", "8", "--data.val", "rows.jsonl"]
    changes = (("fit", "alpha", "5", 32), ("fit", "r", "8", 4), ("validate", "use_rslora", "true", False))
    for verb, key, value, saved in changes:
        (refused,) = command(1, [verb, *others, f"--model.lora.{key}", value], tmp_path)
        assert refused.code == 2
        assert f"allowed: {saved}, as in a/checkpoints/step-00000004: it is a part of the model" in refused.err
    assert (tmp_path / "a/recipe.yaml").read_bytes() == recipe
    changed = shutil.copytree(tiny_model, tmp_path / "changed")
    state = load_file(changed / "model.safetensors")
    state["model.embed_tokens.weight"][0, 0] += 1e-3  # names, shapes and sizes stay
    save_file(state, changed / "model.safetensors", {"format": "pt"})
    for name, code in (("changed", 2), (str(shutil.copytree(tiny_model, tmp_path / "moved")), 0)):
        again = [*words, "--model.name", name, "--ckpt_path", "last", "--trainer.max_steps", "6"]
        done = command(2, again, tmp_path)
        assert [one.code for one in done] == [code, code], done[0].err
        refusal = r"error: model.name: got \S+/changed \(xxh3 \w+\), which is not the base"
        assert code == 0 or re.search(refusal, done[0].err)
