"""The same architecture at toy size, to try a recipe on any machine without the model's weights."""

import json
import math
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from lit_fsdp.config.locations import shipped
from lit_fsdp.errors import require
from lit_fsdp.models.build import build_on_meta, num_parameters

HUB_NAMES_KEY = "_hub_names"
"""Key of a shipped config that lists the hub repositories it stands for; not part of the architecture."""

_HEAD_DIM = 16
_MAX_PARAMETERS = 20_000_000
_MOST = {  # upper limits of sizes that do not depend on others, by their names in transformers
    **dict.fromkeys(("num_local_experts", "num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token"), 2),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    "first_k_dense_replace": 1,
}


def shrink(
    hf_config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, trust_remote_code: bool = False
) -> PretrainedConfig:
    """``hf_config`` with two to four small blocks and the tokenizer's vocabulary.

    Model type, tying, the ratio of query to key-value heads (up to 4), RoPE type, layer types, sliding window and
    maximum positions do not change.
    """
    full = hf_config.get_text_config()
    try:
        small = type(full).from_dict(_small_values(full, tokenizer))
        size = num_parameters(build_on_meta(small, "eager", trust_remote_code))
        problem = f"still {size:,} parameters" if size > _MAX_PARAMETERS else ""
    except (ValueError, TypeError, RuntimeError, AttributeError, LookupError, ArithmeticError) as error:
        problem = " ".join(str(error).split())[:200]
    given, allowed = f"true for {full.model_type} ({problem})", "an architecture that miniature can shrink"
    fix = "name a small config .json of that architecture instead of miniature: true"
    require(not problem, "model.miniature", given, allowed, fix)
    return small


def shipped_config(name: str, exact: bool = False) -> dict[str, Any] | None:
    """The shipped config for a hub name or, unless ``exact``, for a path whose last part starts with one; or None."""
    for file in sorted(shipped("model").glob("*.json")):
        values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        hub_names = values.pop(HUB_NAMES_KEY, [])
        if name in hub_names or not (exact or all(not _last(name).startswith(_last(one)) for one in hub_names)):
            return values
    return None


def _last(name: str) -> str:
    return Path(name).name.lower()


def _small_values(full: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    values: dict[str, Any] = full.to_dict()
    heads, kv_heads = _heads(full)
    hidden = heads * _HEAD_DIM
    kinds = list(dict.fromkeys(values.get(full.attribute_map.get("layer_types", "layer_types")) or []))
    shares = bool(values.get("num_kv_shared_layers"))  # the last blocks reuse keys of an earlier block of each type
    num_layers = min(full.num_hidden_layers, max(2, len(kinds) * (1 + shares)), 4)
    head_dim = _HEAD_DIM
    if values.get("head_dim"):  # some models have wider heads than hidden / heads
        head_dim *= max(1, min(4, round(values["head_dim"] * full.num_attention_heads / full.hidden_size)))
    common = {
        "hidden_size": hidden,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": values.get("qk_rope_head_dim") or head_dim,  # multi-head latent attention rotates a part
        **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"), 2 * hidden),
        "word_embed_proj_dim": hidden if values.get("word_embed_proj_dim") == full.hidden_size else hidden // 2,
        "mamba_n_heads": 4,
        "mamba_d_head": (values.get("mamba_d_ssm") or hidden * (values.get("mamba_expand") or 2)) // 4,
        "layer_types": (kinds * num_layers)[:num_layers],
        "block_types": list(dict.fromkeys(values.get("block_types") or [])),  # a pattern that is repeated
        **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 1 + max(tokenizer.get_vocab().values())),
        **{f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")},
    }
    if num_layers > 1:  # of hybrids, whose other layers have state spaces
        common |= {"attn_layer_period": 2, "attn_layer_offset": 1}
        common |= {"attn_layer_indices": [1]} if values.get("attn_layer_indices") else {}
    for common_name, value in common.items():
        name = full.attribute_map.get(common_name, common_name)  # GPT-2 uses n_embd for hidden_size
        if values.get(name) is not None:
            values[name] = value
    most = {**_MOST, "num_kv_shared_layers": num_layers // 2, "max_window_layers": num_layers, "rotary_dim": head_dim}
    values |= {name: min(values[name], size) for name, size in most.items() if values.get(name)}
    for name, value in values.items():
        if isinstance(value, list) and len(value) == full.num_hidden_layers > num_layers:
            values[name] = value[:num_layers]
        elif name == "per_layer_config" and value:
            values[name] = {layer: own for layer, own in value.items() if int(layer) < num_layers}
    rope = dict(values.get("rope_parameters") or {})
    share = rope.get("partial_rotary_factor") or values.get("partial_rotary_factor") or 1.0
    for key in ("short_factor", "long_factor"):  # LongRoPE: one factor per remaining frequency
        if isinstance(rope.get(key), list):
            rope[key] = rope[key][: int(head_dim * share) // 2]
            values["rope_parameters"] = rope
    gone = ("quantization_config", "_name_or_path", "dtype", "transformers_version")
    return {name: value for name, value in values.items() if name not in gone}


def _heads(full: PretrainedConfig) -> tuple[int, int]:
    """Query and key-value heads with the model's ratio if it is at most 4, else 4 to 1."""
    kv_heads = getattr(full, "num_key_value_heads", None) or full.num_attention_heads
    ratio = full.num_attention_heads // kv_heads
    if ratio > 4:
        return 4, 1
    heads = math.lcm(ratio, 4) if ratio != 3 else 3
    return heads, heads // ratio
