#!/usr/bin/env bash
# peft 0.21.2 with transformers 5.24.0 and torch 2.13.0, CPU; run on 2026-11-28.
#
# LoraConfig(target_modules=REGEX) adapts the modules whose whole name fits, in a dense model and in Qwen2-MoE. In the
# mixtures whose weights transformers converts by the rules of Qwen2-MoE (Qwen3-MoE, GLM-4-MoE, DeepSeek V3, Qwen3-Next,
# OLMoE, dots1, Ernie 4.5 MoE, ...) a regex for one layer adapts every layer: while the config is brought up to date for
# transformers 5, the regex is turned into the last parts of the names that it fits, and these are looked for everywhere.
# Nothing warns, the saved adapter_config.json lists the ends in place of the regex, and twice as many parameters or more
# are trained than were asked for. A list of whole names is left alone.
#
# Seen:
#   llama     layer 1 alone: layers [1]
#   qwen2_moe layer 1 alone: layers [1]
#   qwen3_moe layer 1 alone: layers [0, 1, 2]
#   glm4_moe  layer 1 alone: layers [0, 1, 2]
#   qwen3_moe by its whole name: layers [1]
#   unchanged
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0 peft==0.21.2
cd "$folder"
HF_HUB_OFFLINE=1 venv/bin/python -W ignore - <<'PYTHON'
import sys

from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "head_dim": 8}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
EXPERTS = {"qwen2_moe": {"num_experts": 4}, "qwen3_moe": {"num_experts": 4}}
EXPERTS["glm4_moe"] = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1}


def layers(family, targets):
    """The layers of a random model that get an adapter on their queries."""
    config = AutoConfig.for_model(family, **SIZES, **EXPERTS.get(family, {}))
    model = get_peft_model(AutoModelForCausalLM.from_config(config), LoraConfig(r=2, target_modules=targets))
    names = [name for name, _ in model.named_parameters() if "q_proj.lora_A" in name]
    return sorted(int(name.split(".layers.")[1].split(".")[0]) for name in names)


found = {}
for family in ("llama", "qwen2_moe", "qwen3_moe", "glm4_moe"):
    found[f"{family:9} layer 1 alone"] = layers(family, r".*\.layers\.1\.self_attn\.q_proj")
found["qwen3_moe by its whole name"] = layers("qwen3_moe", ["model.layers.1.self_attn.q_proj"])
for what, which in found.items():
    print(f"{what}: layers {which}")
same = list(found.values()) == [[1], [1], [0, 1, 2], [0, 1, 2], [1]]
print("unchanged" if same else "CHANGED")
sys.exit(not same)
PYTHON
