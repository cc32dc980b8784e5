"""The text part of a multimodal model, trained on two ranks and exported: plain transformers loads a text model."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Gemma3Config, Gemma3ForCausalLM, Gemma3ForConditionalGeneration

from lit_fsdp.checkpoint.export import export
from lit_fsdp.models.tokenizers import miniature_tokenizer
from tests.dist.forks import on_ranks

TEXT = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4, "max_position_embeddings": 64},
    "layer_types": ["sliding_attention", "full_attention"],
}
VISION = {
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"image_size": 28, "patch_size": 14},
}
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
