"""Tiny configs of all causal language models of transformers, made by shrinking their defaults."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

FAMILIES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
FEW = (
    *("llama", "gemma2", "gpt_oss", "gemma4_text", "openai-gpt", "modernbert-decoder", "diffllama"),
    *("recurrent_gemma", "falcon_mamba", "mamba2", "bamba", "nemotron_h", "qwen3_next", "deepseek_v3", "bloom"),
)
"""Each of these is unlike the others in what it initializes, shares, or computes attention with."""

_MOST = {  # the largest value of a setting, by the names that transformers uses
    128: "vocab_size vocab_size_per_layer_input max_position_embeddings n_positions n_ctx seq_length",
    96: "intermediate_size ffn_dim n_inner ffn_hidden_size d_ff dim_ff dff encoder_ffn_dim decoder_ffn_dim"
    " feed_forward_size shared_intermediate_size",
    64: "hidden_size n_embd d_model dim dim_model embed_dim embedding_size word_embed_proj_dim attention_hidden_size"
    " lru_width time_step_rank emb_dim",
    32: "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size qk_head_dim",
    16: "head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim attention_head_dim global_head_dim linear_key_head_dim"
    " linear_value_head_dim index_head_dim mamba_d_head mamba_head_dim q_lora_rank kv_lora_rank o_lora_rank state_size"
    " mamba_d_state ssm_state_size hidden_size_per_layer_input swa_head_dim swa_v_head_dim",
    8: "mamba_n_heads mamba_num_heads sliding_window attention_window_size window_size index_topk laurel_rank",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads num_local_experts"
    " num_experts n_routed_experts moe_num_experts linear_num_key_heads linear_num_value_heads zero_expert_num",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers num_blocks"
    " num_key_value_heads num_kv_heads multi_query_group_num swa_num_key_value_heads num_experts_per_tok moe_topk"
    " moe_k index_n_heads",
    1: "n_group topk_group n_shared_experts first_k_dense_replace num_dense_layers mamba_n_groups n_groups",
}
_SIZES = {name: most for most, names in _MOST.items() for name in names.split()}
_LAYERS = ("layer_types", "layers_block_type", "mlp_layer_types", "block_types")
_LAST_TOKEN = 127
_OWN: dict[str, dict[str, Any]] = {
    "granite": {"logits_scaling": 8.0},
    "gemma3n_text": {"intermediate_size": [96, 96], "activation_sparsity_pattern": [0.0, 0.0], "altup_num_inputs": 2},
    "laguna": {"num_attention_heads_per_layer": [4, 4]},
    "mamba2": {"num_heads": 8},
    "recurrent_gemma": {"num_hidden_layers": 3},
}


def tiny(model_type: str) -> PretrainedConfig:
    """The default config of a family, shrunk; the text part of those that also see or hear."""
    full = AutoConfig.for_model(model_type).get_text_config()
    if full.model_type not in FAMILIES:
        full = AutoConfig.for_model(model_type)
    values = _shrunk(full.to_dict())
    layers = next((values[n] for n in ("num_hidden_layers", "n_layer", "num_layers") if values.get(n)), 2)
    for name in _LAYERS:
        if values.get(name):
            kinds = list(dict.fromkeys(values[name]))
            values[name] = (kinds * layers)[:layers]
    if model_type.startswith(("gemma3n", "gemma4")):
        values["num_kv_shared_layers"] = 0
    values = {**values, "is_decoder": True, **_OWN.get(full.model_type, {})}
    for name in ("model_type", "per_layer_config"):
        values.pop(name, None)
    return type(full)(**values)


def saved(model_type: str, folder: Path) -> PreTrainedModel:
    """A tiny model of random weights in a folder of its own, as plain transformers loads it again.

    Raises:
        Exception: The sizes of this family depend on each other in ways that :func:`tiny` does not know.
    """
    config = tiny(model_type)
    with torch.device("meta"):
        size = sum(param.numel() for param in AutoModelForCausalLM.from_config(config).parameters())
    if size > 5e6:
        raise ValueError(f"{model_type} has {size} parameters")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def _shrunk(values: dict[str, Any]) -> dict[str, Any]:
    small = {}
    for name, value in values.items():
        if isinstance(value, dict) and name.endswith("_config"):
            small[name] = _shrunk(value)
        elif name.endswith("_token_id") and isinstance(value, int):
            small[name] = min(value, _LAST_TOKEN)
        elif isinstance(value, int) and not isinstance(value, bool):
            small[name] = min(value, _SIZES.get(name, math.inf))
        elif name not in ("quantization_config", "transformers_version"):
            small[name] = value
    return small
