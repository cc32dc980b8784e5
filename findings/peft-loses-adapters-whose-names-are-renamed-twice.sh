#!/usr/bin/env bash
# peft 0.21.2 with transformers 5.24.0 and torch 2.15.0, CPU; run on 2026-11-30.
#
# LoRA adapters on the shared experts of Laguna are saved, but `PeftModel.from_pretrained` on the same base leaves them
# at zero. The loaded model differs from the trained one, and only a warning lists the missing keys. The saved keys have
# the names of the modules. On loading, peft applies to them the renames by which transformers reads published weights.
# The rename `mlp.shared_expert.` to `mlp.shared_experts.` is a regular expression with unescaped dots, so its last dot
# also fits the `s` of the new name: the key becomes `mlp.shared_experts..up_proj`, which no module has. With escaped
# dots nothing is lost.
#
# Inkling 2 loses the adapters on `sconv.weight_proj`: its rename fits the new name, too, and adds `.weight` to it.
# Other renames put a part before a name that has it already, such as `mlp.mlp.shared_experts` in Mistral Large 4. The
# last lines count the families whose keys change, by names alone, among those that have renames and default sizes.
#
# Seen:
#   qwen3_moe: 0 of 8 adapters are zero, logits change by 0%, no warning
#   hy_v3: 0 of 14 adapters are zero, logits change by 0%, no warning
#   laguna: 3 of 16 adapters are zero, logits change by 36%, a warning
#   inkling2_text: 2 of 16 adapters are zero, logits change by 50%, a warning
#   inkling2_loop_text: 2 of 16 adapters are zero, logits change by 51%, a warning
#   inkling2_text: self_attn.k_proj.sconv.weight_proj -> self_attn.k_proj.sconv.weight_proj.weight
#   laguna: mlp.shared_experts.down_proj -> mlp.shared_experts..down_proj
#   causal: keys change in 3 of 60: inkling2_loop_text, inkling2_text, laguna
#   mistral_large4: mlp.shared_experts.down_proj -> mlp.mlp.shared_experts.down_proj
#   image: keys change in 5 of 39: inkling2, inkling2_loop, mistral_large4, pi0, unlimited_ocr
#   laguna with escaped dots: 0 of 16 adapters are zero, logits change by 0%, no warning
#   unchanged
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.15.0 transformers==5.24.0 peft==0.21.2
cd "$folder"
HF_HUB_OFFLINE=1 venv/bin/python -W ignore - <<'PYTHON'
import copy
import logging
import sys
import tempfile
import warnings

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils.transformers_weight_conversion import convert_peft_adapter_state_dict_for_transformers as as_loaded
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.models.auto import modeling_auto

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 32, "head_dim": 16}
SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts": 4}
SIZES |= {"num_experts_per_tok": 2, "shared_expert_intermediate_size": 32, "num_attention_heads_per_layer": [2, 2]}
SIZES |= {"mlp_layer_types": ["dense", "sparse"], "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
LAYERS = {"laguna": ["full_attention"] * 2, "inkling2_text": ["hybrid_sliding", "hybrid"]}
LAYERS["inkling2_loop_text"] = LAYERS["inkling2_text"]
KINDS = {"causal": (AutoModelForCausalLM, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)}
KINDS["image"] = (AutoModelForImageTextToText, modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
CHANGED = {"causal": ["inkling2_loop_text", "inkling2_text", "laguna"]}
CHANGED["image"] = ["inkling2", "inkling2_loop", "mistral_large4", "pi0", "unlimited_ocr"]
IDS = torch.arange(1, 33).reshape(1, 32)


def linear_layers(model):
    return [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and name != "lm_head"]


@torch.no_grad()
def lost(family, what=""):
    """The adapters of a random model that are zero after it is saved and loaded, and the change of its logits."""
    torch.manual_seed(0)
    known = AutoConfig.for_model(family).to_dict()
    given = {key: value for key, value in SIZES.items() if key in known}
    given |= {"layer_types": LAYERS[family]} if family in LAYERS else {}
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **given)).eval()
    same_base = copy.deepcopy(base)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=linear_layers(base))).eval()
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.5)
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        model.save_pretrained(place)
        loaded = PeftModel.from_pretrained(same_base, place).eval()
    adapters = {name: weight for name, weight in loaded.named_parameters() if "lora_B" in name}
    zero = [name for name, weight in adapters.items() if not weight.any()]
    right, found = model(input_ids=IDS).logits, loaded(input_ids=IDS).logits
    change = float((found - right).norm() / right.norm())
    told = "a warning" if any("missing adapter keys" in str(entry.message) for entry in warned) else "no warning"
    text = f"{len(zero)} of {len(adapters)} adapters are zero, logits change by {change:.0%}, {told}"
    print(f"{family + what}: {text}")
    return len(zero), change > 0.01, told


def keys_as_loaded(model):
    """The keys that are saved for a LoRA on each linear layer, and those that loading looks for instead."""
    keys = {f"base_model.model.{name}.lora_A.weight": torch.zeros(1, 1) for name in linear_layers(model)}
    return set(keys), set(as_loaded(model, LoraConfig(), dict(keys)))


def changed(kind):
    built, families = 0, []
    for family in KINDS[kind][1]:
        if get_checkpoint_conversion_mapping(family) is None:
            continue
        try:
            with torch.device("meta"):
                model = KINDS[kind][0].from_config(AutoConfig.for_model(family))
        except Exception:  # families without default sizes
            continue
        built += 1
        saved, loaded = keys_as_loaded(model)
        families += [family] if saved - loaded else []
        if family in ("laguna", "inkling2_text", "mistral_large4"):
            first = [min(keys).removesuffix(".lora_A.weight") for keys in (saved - loaded, loaded - saved)]
            before, after = (key.split(".layers.")[1].split(".", 1)[1] for key in first)
            print(f"{family}: {before} -> {after}")
    print(f"{kind}: keys change in {len(families)} of {built}: {', '.join(sorted(families))}")
    return sorted(families)


logging.disable(logging.WARNING)
found = [lost(family) for family in ("qwen3_moe", "hy_v3", "laguna", "inkling2_text", "inkling2_loop_text")]
families = {kind: changed(kind) for kind in KINDS}
rules = get_checkpoint_conversion_mapping("laguna")
rules = [rule for rule in rules if rule.source_patterns != ["mlp.shared_expert."]]
rules += [WeightRenaming(r"mlp\.shared_expert\.", "mlp.shared_experts.")]
register_checkpoint_conversion_mapping("laguna", rules, overwrite=True)
found.append(lost("laguna", " with escaped dots"))
none, some = (0, False, "no warning"), [(3, True, "a warning")] + [(2, True, "a warning")] * 2
is_same = found == [none, none, *some, none] and families == CHANGED
print("unchanged" if is_same else "it behaves otherwise now")
sys.exit(not is_same)
PYTHON
