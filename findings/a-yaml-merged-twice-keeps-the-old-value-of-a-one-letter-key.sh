#!/usr/bin/env bash
# PyYAML 6.0.4 (6.0.3 does not), CPython 3.11; run on 2026-11-29.
#
# A mapping that merges another one (`<<: *base`) and overrides a key has the new value. If this mapping is merged in
# turn, the result has the old value, but only of keys of a single letter: of `r: 64, lora_alpha: 128` over
# `r: 8, lora_alpha: 16`, an experiment that merges it trains with r = 8 and lora_alpha = 128. No message says so.
#
# Since 6.0.4 the safe loaders skip keys that they have merged already, which they recognize by the identity of the
# strings. Equal keys are different strings, except those of one Latin-1 character, which CPython keeps only once; the
# first value, the overridden one, then wins. See https://github.com/yaml/pyyaml/pull/937.
#
# Seen:
#   PyYAML 6.0.3: {'r': 64, 'lora_alpha': 128}
#   PyYAML 6.0.4: {'r': 8, 'lora_alpha': 128}
#   unchanged
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/read.py" <<'PYTHON'
import yaml

TEXT = """
base: &base {r: 8, lora_alpha: 16}
large: &large
  <<: *base
  r: 64
  lora_alpha: 128
experiment:
  <<: *large
"""
print(f"PyYAML {yaml.__version__}: {yaml.safe_load(TEXT)['experiment']}")
PYTHON
python3 -m venv "$folder/before"
"$folder/before/bin/pip" install -q pyyaml==6.0.3
python3 -m venv "$folder/now"
"$folder/now/bin/pip" install -q pyyaml==6.0.4
for one in before now; do
  "$folder/$one/bin/python" "$folder/read.py" | tee -a "$folder/seen.txt"
done
cat > "$folder/expected.txt" <<'TEXT'
PyYAML 6.0.3: {'r': 64, 'lora_alpha': 128}
PyYAML 6.0.4: {'r': 8, 'lora_alpha': 128}
TEXT
diff "$folder/expected.txt" "$folder/seen.txt" && echo unchanged
