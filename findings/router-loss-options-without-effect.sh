#!/usr/bin/env bash
# transformers 5.24.0 (torch 2.15.0); run on 2026-11-29.
#
# `output_router_logits: true` adds the load-balancing loss of a mixture of experts to `loss`, weighted by
# `router_aux_loss_coef`. It is a declared field of the configuration of 60 causal language models, but 31 of them, such
# as DeepSeek V3, GLM-4-MoE, dots1 and Llama 4 (which declares the coefficient, too), have no such loss. They accept the
# option without an error or a warning, return router logits as it says, and save it with the model: a run looks as if
# its experts were balanced, while `loss` is the same to the last bit.
#
# Seen:
#   mixtral: loss changes by 2.002, router logits of 2 layers
#   qwen3_moe: loss changes by 2.003, router logits of 2 layers
#   deepseek_v3: loss changes by 0.000, router logits of 2 layers
#   glm4_moe: loss changes by 0.000, router logits of 2 layers
#   dots1: loss changes by 0.000, router logits of 2 layers
#   llama4_text: loss changes by 0.000, router logits of 2 layers
#   60 configurations declare it, 29 models have that loss
#   unchanged
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.15.0 transformers==5.24.0 numpy
cd "$folder"
cat > measure.py <<'PYTHON'
import sys
import warnings

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 32, "head_dim": 16}
SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
GROUPS = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "n_shared_experts": 1, "q_lora_rank": None}
GROUPS |= {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16}
READS, IGNORES = ("mixtral", "qwen3_moe"), ("deepseek_v3", "glm4_moe", "dots1", "llama4_text")


def measured(family):
    torch.manual_seed(0)
    known = AutoConfig.for_model(family).to_dict()
    given = {k: v for k, v in {**SIZES, **EXPERTS, **GROUPS}.items() if k in known}
    given |= {"head_dim": 8} if "qk_rope_head_dim" in known else {}
    given |= {"router_aux_loss_coef": 1.0} if "router_aux_loss_coef" in known else {}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **given)).eval()
    ids, losses = torch.arange(1, 33).reshape(1, 32), []
    for is_on in (False, True):
        model.config.output_router_logits = is_on
        with torch.no_grad():
            out = model(input_ids=ids, labels=ids)
        losses.append(float(out.loss))
    change = losses[1] - losses[0]
    print(f"{family}: loss changes by {change:.3f}, router logits of {len(out.router_logits)} layers")
    return change != 0


warnings.simplefilter("ignore")
same = all(map(measured, READS)) and not any(map(measured, IGNORES))
declare, read = 0, 0
for family, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
    try:
        config = AutoConfig.for_model(family).get_text_config()
    except Exception:  # composed configurations that want their parts
        continue
    if "output_router_logits" in config.to_dict():
        declare += 1
        model = getattr(transformers, name if isinstance(name, str) else name[0])
        read += hasattr(sys.modules[model.__module__], "load_balancing_loss_func")
print(f"{declare} configurations declare it, {read} models have that loss")
sys.exit(not same or declare - read < 20)
PYTHON
if venv/bin/python -W ignore measure.py 2> errors.txt; then
  echo unchanged
else
  cat errors.txt
  echo "transformers behaves otherwise now"
  exit 1
fi
