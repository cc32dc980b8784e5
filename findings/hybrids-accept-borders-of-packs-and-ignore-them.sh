#!/usr/bin/env bash
# transformers 5.24.0 (torch 2.15.0, CPU); run on 2026-12-01.
#
# `DataCollatorWithFlattening(return_seq_idx=True)` puts several samples into one row, with positions that start again
# and, for layers with a state, the index of the sample of each token. Families with such layers raise where the kernel
# that needs this index is missing ("can't keep packed sequences apart"). Four others accept the same batch without a
# warning, also with `seq_idx`, and carry the state of one sample into the next: Mamba, Jamba, MiniMax (linear attention)
# and RecurrentGemma. Their attention layers keep samples apart. The keyword arguments of their forward swallow the
# index.
#
# Seen (largest change of the logits of the second sample by the first, relative to the largest logit):
#   llama:            0.000
#   bamba:            raises ValueError
#   qwen3_next:       raises ValueError
#   lfm2:             raises ValueError
#   mamba:            0.566
#   jamba:            0.950
#   minimax:          0.578
#   recurrent_gemma:  0.064
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
from transformers import AutoConfig, AutoModelForCausalLM, DataCollatorWithFlattening, logging

logging.set_verbosity_error()
SIZES = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "pad_token_id": 0}
HEADS = {"intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES = {
    "llama": HEADS,
    "bamba": {**HEADS, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "attn_layer_indices": [1]},
    "qwen3_next": {**HEADS, **LINEAR, **DELTA, **EXPERTS, "shared_expert_intermediate_size": 32},
    "lfm2": {**HEADS, "layer_types": ["conv", "full_attention"]},
    "mamba": {},
    "jamba": {**HEADS, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "num_experts_per_tok": 1},
    "minimax": {**HEADS, **LINEAR, "num_local_experts": 2},
    "recurrent_gemma": {**HEADS, "lru_width": 64, "block_types": ["recurrent", "attention"]},
}
FIRST, SECOND = list(range(3, 15)), list(range(40, 60))


@torch.no_grad()
def measured(family):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES, **FAMILIES[family])).eval()
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.15)
    pack = DataCollatorWithFlattening(return_seq_idx=True)([{"input_ids": FIRST}, {"input_ids": SECOND}])
    del pack["labels"]
    alone = model(input_ids=torch.tensor([SECOND]), use_cache=False).logits[0]
    try:
        packed = model(**pack, use_cache=False).logits[0, -len(SECOND) :]
    except ValueError as error:
        print(f"{family + ':':17} raises ValueError")
        return "raises" if "packed sequences apart" in str(error) else str(error)
    change = float((packed - alone).abs().max() / alone.abs().max())
    print(f"{family + ':':17} {change:.3f}")
    return "mixes" if change > 0.01 else "keeps apart" if change < 1e-4 else str(change)


found = {family: measured(family) for family in FAMILIES}
expected = {"llama": "keeps apart", **dict.fromkeys(("bamba", "qwen3_next", "lfm2"), "raises")}
expected |= dict.fromkeys(("mamba", "jamba", "minimax", "recurrent_gemma"), "mixes")
print("unchanged" if found == expected else f"it behaves otherwise now: {found}")
sys.exit(found != expected)
PYTHON
