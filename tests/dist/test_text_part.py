"""The text part of a multimodal model, trained on two ranks and exported: plain transformers loads a text model."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Gemma3Config, Gemma3ForCausalLM, Gemma3ForConditionalGeneration

from lit_fsdp.checkpoint.export import export
from lit_fsdp.models.tokenizers import miniature_tokenizer
from tests.dist.forks import on_ranks
from tests.unit.models.test_text_part import TEXT, VISION

IDS = torch.arange(24).reshape(2, 12)


def test_gemma_3_is_trained_and_exported_as_a_text_model(tmp_path: Path) -> None:
    folder, out = tmp_path / "model", tmp_path / "out"
    tokenizer = miniature_tokenizer()
    torch.manual_seed(0)
    config = Gemma3Config(text_config={**TEXT, "vocab_size": len(tokenizer)}, vision_config=VISION)
    whole = Gemma3ForConditionalGeneration(config).eval()
    whole.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    on_ranks("train", 2, folder=folder, run=tmp_path, strategy={"engine": "fsdp2"}, steps=3, every=3)
    export(tmp_path / "checkpoints" / "step-00000003", out, dtype="fp32")
    loaded, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert type(loaded) is Gemma3ForCausalLM
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    state = torch.load(tmp_path / "live.pt", weights_only=True)
    before = whole.model.language_model.state_dict()
    assert any(not torch.equal(state[f"model.{name}"], tensor) for name, tensor in before.items())
    whole.model.language_model.load_state_dict({name: state[f"model.{name}"] for name in before})
    with torch.no_grad():
        assert torch.equal(loaded.eval()(IDS).logits, whole(IDS).logits)
