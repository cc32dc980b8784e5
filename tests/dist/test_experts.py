"""Adapters on experts that are kept in one tensor: the losses of plain peft, and exports that peft and others load."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from lit_fsdp.models import generate
from lit_fsdp.models.experts import fused_experts
from lit_fsdp.models.lora import apply_saved_lora
from lit_fsdp.models.miniature import shrink
from lit_fsdp.models.tokenizers import miniature_tokenizer
from tests.dist.forks import RankError, command, on_ranks
from tests.dist.lora_jobs import peft_losses
from tests.dist.matrix import worst_difference
from tests.dist.reference import global_batch, save_tiny, step_loss
from tests.runs import MORE
from tests.unit.models.families import FAMILIES

ALL = {"r": 4, "alpha": 8, "target_modules": "all-linear"}
_FEW = ("qwen3_moe", "gpt_oss")  # grouped products; transposed and with biases
_MORE = "mixtral qwen2_moe qwen3_next olmoe deepseek_v3 glm4_moe granitemoe phimoe ernie4_5_moe dots1 minimax_m2"
_ALL = tuple(family for family in (*_FEW, "llama4_text", *_MORE.split()) if family in FAMILIES)
_NOISE = re.compile("drop|jitter")


def saved_mixture(family: str, place: Path, **changes: Any) -> str:
    """A miniature of a family without noise."""
    sizes = (
        {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1} if family == "dots1" else {}
    )  # none by default
    config = shrink(AutoConfig.for_model(family, **sizes), miniature_tokenizer())
    values = config.to_dict().items()
    config.update(dict.fromkeys((n for n, v in values if isinstance(v, float) and _NOISE.search(n)), 0.0))
    config.update(changes)
    save_tiny(place / family, config)
    return str(place / family)


@pytest.mark.filterwarnings("ignore:The following rank_pattern keys did not match")  # of peft, which it obeys
@pytest.mark.parametrize(
    "families", [_FEW, pytest.param(_ALL, id="all", marks=pytest.mark.long("each of 14 families under three engines"))]
)
def test_losses_are_those_of_plain_peft(families: tuple[str, ...], tmp_path: Path) -> None:
    cases: list[tuple[int, dict[str, Any]]] = [
        (2, {"engine": "fsdp2", "activation_checkpointing": "full"}),
        (2, {"engine": "fsdp1"}),
        (1, {"engine": "single"}),
    ]
    wrong = {}
    for family in families:
        folder, lora = saved_mixture(family, tmp_path), {**ALL, "use_rslora": family == "qwen3_moe"}
        attention = AutoModelForCausalLM.from_pretrained(folder).config._attn_implementation
        wanted = peft_losses(folder, lora, attn_implementation=attention)
        # units by size or class would be the experts themselves, whose weights the outermost wrapper reads
        by_size, by_class = {"min_num_params": 2000}, {"classes": ["Qwen3MoeExperts"], "max_root_share": 1.0}
        apart = [(2, {"engine": "fsdp2", "wrap": by_size}), (2, {"engine": "fsdp1", "wrap": by_class})]
        for ranks, strategy in [*cases, *(apart if family == "qwen3_moe" else [])]:
            job: dict[str, Any] = {"folder": folder, "model": {"lora": lora}}
            try:
                (found, *_) = on_ranks("train_lora", ranks, strategy={**strategy, "precision": "fp32"}, **job)
            except RankError as error:
                wrong[family, strategy["engine"]] = str(error)
                continue
            adapted = {name.rpartition(".lora_A")[0] for name in found["trained"] if ".lora_A." in name}
            on_experts = [name for name in adapted if "expert" in name or "block_sparse_moe" in name]
            is_right = not any("router" in name or "gate." in name for name in adapted)
            is_right = is_right and worst_difference(found["losses"], wanted) < 1e-5 and found["changed"] == []
            if not is_right or not on_experts or not found["losses"][-1] < found["losses"][0]:
                wrong[family, strategy["engine"]] = (found["losses"], wanted, on_experts)
    assert not wrong, "\n".join(f"{case}: {found}" for case, found in wrong.items())


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft 0.21 on transformers 5.23
def test_runs_go_on_and_are_exported_under_the_names_of_the_hub(tmp_path: Path) -> None:
    """Adapters for plain peft, merged and full models with a file's tensor for each expert, as the base has them."""
    folder = saved_mixture("qwen3_moe", tmp_path)
    on_disk = set(load_file(Path(folder) / "model.safetensors"))
    assert "model.layers.1.mlp.experts.3.gate_proj.weight" in on_disk
    job: dict[str, Any] = {"folder": folder, "model": {"lora": ALL}}
    strategy = {"engine": "fsdp2", "precision": "fp32"}
    (whole, _) = on_ranks("train_lora", 2, run=str(tmp_path / "a"), strategy=strategy, **job)
    job["ckpt_path"] = str(tmp_path / "a/checkpoints/step-00000003")
    (rest, _) = on_ranks("train_lora", 2, strategy=strategy, **job)
    assert rest["losses"] == whole["losses"][3:]
    (again,) = on_ranks("train_lora", 1, strategy={"engine": "ddp", "precision": "fp32"}, **job)
    assert worst_difference(again["losses"], whole["losses"][3:]) < 1e-5
    on_ranks("train", 2, folder=folder, strategy=strategy, run=str(tmp_path / "full"), every=3, steps=3)
    for ckpt, out, flags in (
        ("a/checkpoints/step-00000006", "adapter", []),
        ("a/checkpoints/step-00000006", "merged", ["--merge"]),
        ("full/checkpoints/step-00000003", "model", []),
    ):
        (done,) = command(1, ["export", "--ckpt", ckpt, "--verify", "--out", out, *flags], tmp_path)
        assert (done.code, done.err) == (0, ""), done.err
    live = AutoModelForCausalLM.from_pretrained(folder)
    apply_saved_lora(live, json.loads((tmp_path / "adapter" / "adapter_config.json").read_text()))
    live.load_state_dict(torch.load(tmp_path / "a" / "live.pt", weights_only=True), strict=False, assign=True)
    ids = torch.arange(24).reshape(2, 12)
    adapted = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        wanted, of_adapter, of_merged = (one.eval()(input_ids=ids).logits for one in (live, adapted, merged))
    assert torch.equal(of_adapter, wanted)
    torch.testing.assert_close(of_merged, wanted, rtol=1e-4, atol=1e-5)
    for out in ("merged", "model"):
        assert set(load_file(tmp_path / out / "model.safetensors")) == on_disk
    words = ["ckpt", "import", "adapter", "-o", "imported", "--model", folder]
    (done,) = command(1, words, tmp_path)
    assert (done.code, done.out.split(":")[0]) == (0, "imported"), done.err
    with torch.no_grad():
        wanted = float(step_loss(adapted.train(), global_batch(0)))
    job["ckpt_path"] = str(tmp_path / "imported")
    (again, _) = on_ranks("train_lora", 2, strategy=strategy, **job)
    assert again["losses"][0] == pytest.approx(wanted, rel=1e-5)
    assert len(again["losses"]) == 6
    (tmp_path / "adapter" / "trainer_state.json").write_text('{"global_step": 2}')  # as the Trainer saves it
    (done,) = command(1, [*words[:4], "of-trainer", *words[5:]], tmp_path)
    assert (done.code, done.out.split(",")[0]) == (0, "of-trainer: step 2"), done.err
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    (done,) = command(1, [*words[:4], "again", *words[5:]], tmp_path)
    assert (done.code, "an adapter of type IA3" in done.err) == (2, True)
    trained = torch.load(tmp_path / "full" / "live.pt", weights_only=True)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in trained.items())


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft 0.21 on transformers 5.23
def test_an_imported_adapter_has_the_buffers_that_a_run_saves(tmp_path: Path) -> None:
    """Such as the correction of the router's choices."""
    folder = saved_mixture("deepseek_v3", tmp_path)
    adapted = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder), peft.LoraConfig(r=4, target_modules=["o_proj"])
    )
    for name, param in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(param, std=0.1)
    adapted.save_pretrained(tmp_path / "adapter")
    (done,) = command(1, ["ckpt", "import", "adapter", "-o", "imported", "--model", folder], tmp_path)
    assert (done.code, done.out.split(":")[0]) == (0, "imported"), done.err
    job: dict[str, Any] = {"folder": folder, "model": {"lora": {"r": 4, "alpha": 8, "target_modules": ["o_proj"]}}}
    strategy = {"engine": "single", "precision": "fp32"}
    (found,) = on_ranks("train_lora", 1, ckpt_path=str(tmp_path / "imported"), strategy=strategy, **job)
    with torch.no_grad():
        assert found["losses"][0] == pytest.approx(float(step_loss(adapted.train(), global_batch(0))), rel=1e-5)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft 0.21 on transformers 5.23
@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param("llama4_text", marks=MORE)])
def test_experts_in_four_bits_are_those_that_bitsandbytes_rounds(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses of plain peft on weights that were quantized and turned back; the bytes; exports; answers."""
    folder = saved_mixture(family, tmp_path)
    rounded = AutoModelForCausalLM.from_pretrained(folder)
    packed = fused_experts(rounded) | {
        f"{name}.weight": layer.weight
        for name, layer in rounded.named_modules()
        if type(layer) is torch.nn.Linear and name != "lm_head"
    }
    for param in packed.values():
        param.data = dequantize_4bit(*quantize_4bit(param.data, quant_type="nf4"))
    rounded.save_pretrained(tmp_path / "rounded")
    miniature_tokenizer().save_pretrained(tmp_path / "rounded")
    wanted = peft_losses(str(tmp_path / "rounded"), ALL)
    job: dict[str, Any] = {"folder": folder, "model": {"lora": {**ALL, "quantize": "nf4"}}}
    strategies: list[dict[str, Any]] = [{"engine": "fsdp2", "activation_checkpointing": "full"}, {"engine": "ddp"}]
    for strategy in strategies:
        run = tmp_path / str(strategy["engine"])
        for found in on_ranks("train_lora", 2, run=str(run), strategy={**strategy, "precision": "fp32"}, **job):
            assert worst_difference(found["losses"], wanted) < 1e-5
            assert found["changed"] == []
            assert {"packed parameters after setup"} < set(found["dtypes"]["realized"])
    halves, whole = found["audit"]["units"], sum(param.numel() for param in packed.values())
    assert sum(unit["quantization_bytes"] for unit in halves) >= whole / 16
    assert sum(unit["num_params"] - unit["num_trainable"] for unit in halves) == rounded.num_parameters()
    ckpt = tmp_path / "fsdp2/checkpoints/step-00000006"
    for form in ("adapter", "merge"):
        (done,) = command(1, ["export", "--ckpt", str(ckpt), f"--{form}", "--verify", "--out", form], tmp_path)
        assert (done.code, done.err) == (0, ""), done.err
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")  # answers in fp32 on every CPU
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)  # whose kernel wants widths of n * 32
    chat = generate.Chat(str(tmp_path / "adapter"))
    plain = peft.PeftModel.from_pretrained(rounded, tmp_path / "adapter")
    with torch.no_grad():
        logits, wanted_logits = (model(global_batch(0)["input_ids"]).logits for model in (chat.model, plain))
    assert float((logits - wanted_logits).norm() / wanted_logits.norm()) < 1e-5
