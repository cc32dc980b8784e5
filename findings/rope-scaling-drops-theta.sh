#!/usr/bin/env bash
# rope_scaling beside rope_parameters: the base frequency becomes the architecture's default, in silence.
#
# Versions: transformers 5.23.0, torch 2.13.0 (Python 3.11)
# Behavior: transformers 5 saves `rope_parameters: {rope_type, rope_theta, ...}` into config.json. Model cards tell to
#   stretch the context by adding `rope_scaling: {rope_type: yarn, factor: 4.0, ...}` to config.json. Both together are
#   read without an error: `rope_scaling` takes the place of all of `rope_parameters`, so rope_theta (and a
#   partial_rotary_factor) is the default of the architecture, 10,000, where the model was trained with 1,000,000.
#   Where every kind of layer has rope_parameters of its own (OLMo 3), the old name `type: linear` changes no frequency.
# Seen 2026-11-27:
#   qwen2, as saved:               rope_theta 1000000
#   qwen2, rope_scaling added:     rope_theta 10000
#   olmo3, type: linear added:     rope_type default
# Exits with 1 when this is no longer so.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0
cat > "$work/see.py" <<'PY'
import sys

from transformers import AutoConfig, AutoModelForCausalLM

small = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 32}
small |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 4096}
plain = {"rope_type": "default", "rope_theta": 1000000.0}
layers = {"full_attention": dict(plain), "sliding_attention": dict(plain)}
yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
kinds = {"layer_types": ["sliding_attention", "full_attention"], "pad_token_id": 0, "eos_token_id": 0}


def of_folder(model_type, **values):
    """As config.json of a folder is read."""
    import json, pathlib, tempfile

    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "config.json").write_text(json.dumps({"model_type": model_type, **small, **values}))
        return AutoConfig.from_pretrained(folder)


def theta(config):
    """From the frequencies of the model itself: the second of 16 is theta ** (-1 / 16)."""
    frequencies = AutoModelForCausalLM.from_config(config).model.rotary_emb.original_inv_freq
    return round(float(frequencies[1]) ** -16)


before, after = of_folder("qwen2", rope_parameters=plain), of_folder("qwen2", rope_parameters=plain, rope_scaling=yarn)
olmo = of_folder("olmo3", rope_parameters=layers, rope_scaling={"type": "linear", "factor": 8.0}, **kinds)
seen = [round(theta(before), -3), round(theta(after), -1)]
seen.append(olmo.rope_parameters["full_attention"]["rope_type"])
print("qwen2, as saved:               rope_theta", seen[0])
print("qwen2, rope_scaling added:     rope_theta", seen[1])
print("olmo3, type: linear added:     rope_type", seen[2])
sys.exit(seen != [1000000, 10000, "default"])
PY
"$work/venv/bin/python" "$work/see.py"
