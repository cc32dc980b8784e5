#!/usr/bin/env bash
# transformers 5.24.0 (torch 2.15.0, CPU); run on 2026-12-01.
#
# Prompts of different lengths are padded on the left and passed to `generate` with their attention mask, as the
# documentation shows. An answer should then be the one that the prompt has alone. Three families answer otherwise, with
# no warning:
#
# - DeepSeek V4: compressed keys are weighted sums over blocks of 4 or 128 positions. The blocks are counted from the
#   start of the row, so with padding they have other borders, and padding is part of the first ones.
# - MiniMax: a whole pass is right, steps with the cache are not. The length of the cache is that of the first layer,
#   which is linear in the published model and has no keys, so it is 0. The mask of the layers with attention is
#   then made for one key, and padding is no longer masked.
# - RecurrentGemma: the convolution in front of the recurrence takes padding as tokens.
#
# Mamba, Jamba, Bamba and a Llama do not depend on padding.
#
# Seen (largest change of the logits of the first two tokens by padding, relative to the largest logit):
#   llama:            whole passes 0.000, with the cache 0.000
#   mamba:            whole passes 0.000, with the cache 0.000
#   jamba:            whole passes 0.000, with the cache 0.000
#   bamba:            whole passes 0.000, with the cache 0.000
#   deepseek_v4:      whole passes 0.134, with the cache 0.134
#   minimax:          whole passes 0.000, with the cache 0.477
#   recurrent_gemma:  whole passes 0.076, with the cache 0.076
#   length of MiniMax's cache after 20 tokens: 0
#   unchanged
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.15.0 transformers==5.24.0
cd "$folder"
HF_HUB_OFFLINE=1 venv/bin/python -W ignore - <<'PYTHON'
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, logging

logging.set_verbosity_error()
SIZES = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "pad_token_id": 0}
HEADS = {"intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16}
FAMILIES = {
    "llama": HEADS,
    "mamba": {},
    "jamba": {**HEADS, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "num_experts_per_tok": 1},
    "bamba": {**HEADS, **MAMBA2, "attn_layer_indices": [1]},
    "deepseek_v4": {
        **{**HEADS, "num_key_value_heads": 1, **EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1},
        **{"q_lora_rank": 32, "qk_rope_head_dim": 8, "o_groups": 2, "o_lora_rank": 16},
        **{"index_n_heads": 4, "index_head_dim": 16, "index_topk": 8},
        "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"],
    },
    "minimax": {**HEADS, "num_local_experts": 4, "num_experts_per_tok": 2}
    | {"layer_types": ["linear_attention", "full_attention"]},
    "recurrent_gemma": {**HEADS, "lru_width": 64, "block_types": ["recurrent", "attention"]},
}
STEPS = {"max_new_tokens": 2, "eos_token_id": None, "output_logits": True, "return_dict_in_generate": True}
NUM_TOKENS, NUM_PADS = 20, 7


def random_model(family):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES, **FAMILIES[family])).eval()
    model.generation_config = GenerationConfig(pad_token_id=0)
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.15)
    return model


@torch.no_grad()
def measured(family):
    model = random_model(family)
    torch.manual_seed(1)
    ids = torch.randint(3, 97, (1, NUM_TOKENS))
    padded = torch.nn.functional.pad(ids, (NUM_PADS, 0))
    mask = torch.nn.functional.pad(torch.ones_like(ids), (NUM_PADS, 0))
    changes = []
    for use_cache in (False, True):
        alone = model.generate(ids, attention_mask=torch.ones_like(ids), use_cache=use_cache, **STEPS)
        found = model.generate(padded, attention_mask=mask, use_cache=use_cache, **STEPS)
        pairs = list(zip(alone.logits, found.logits))
        largest = max(right.abs().max() for right, _ in pairs)
        changes.append(float(max((seen - right).abs().max() for right, seen in pairs) / largest))
    print(f"{family + ':':17} whole passes {changes[0]:.3f}, with the cache {changes[1]:.3f}")
    return changes


found = {family: measured(family) for family in FAMILIES}
with torch.no_grad():
    cache = random_model("minimax")(torch.ones(1, NUM_TOKENS, dtype=torch.long), use_cache=True).cache
print(f"length of MiniMax's cache after {NUM_TOKENS} tokens: {cache.get_seq_length()}")
right = [*(found[family] for family in ("llama", "mamba", "jamba", "bamba")), found["minimax"][:1]]
wrong = [found["deepseek_v4"], found["recurrent_gemma"], found["minimax"][1:]]
is_same = max(map(max, right)) < 1e-4 and min(map(min, wrong)) > 0.01 and cache.get_seq_length() == 0
print("unchanged" if is_same else "it behaves otherwise now")
sys.exit(not is_same)
PYTHON
