#!/usr/bin/env bash
# jsonargparse 4.53.0, with Python 3.11; run on 2026-11-30.
#
# A parameter of type dict can be changed by flags below it. One key deep (--overrides.theta=1e6) the other keys of the
# mapping stay, also those of a configuration file. Two keys deep (--overrides.rope.factor=8) the inner mapping is
# replaced by one with this key alone, whose value is text: its other keys are lost without a warning. So a flag that is
# to change one value of a nested mapping, such as the RoPE parameters of a model's configuration, removes the rest of
# that mapping. Below an optional dataclass of a class, null for a field arrives as the text "None", and is refused
# although the field accepts null. An earlier form of the first is jsonargparse#388.
#
# Seen:
#   file alone: {'theta': 500000.0, 'rope': {'type': 'yarn', 'factor': 4.0, 'length': 2048}}
#   --overrides.theta=1e6: {'theta': 1000000.0, 'rope': {'type': 'yarn', 'factor': 4.0, 'length': 2048}}
#   --overrides.rope.factor=8: {'theta': 500000.0, 'rope': {'factor': '8'}}
#   --adapter.bits=null within a class: refused, given value: None of type str
#   unchanged
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q jsonargparse==4.53.0 PyYAML==6.0.4
cd "$folder"
cat > recipe.yaml <<'YAML'
overrides:
  theta: 500000.0
  rope: {type: yarn, factor: 4.0, length: 2048}
YAML
cat > show.py <<'PYTHON'
import re
from dataclasses import dataclass
from typing import Any

from jsonargparse import ArgumentParser


@dataclass
class Adapter:
    rank: int = 16
    bits: int | None = 4


class Model:
    def __init__(self, adapter: Adapter | None = None):
        pass


def overrides(*flags):
    parser = ArgumentParser()
    parser.add_argument("--config", action="config")
    parser.add_argument("--overrides", type=dict[str, Any])
    return parser.parse_args(["--config=recipe.yaml", *flags]).overrides


print("file alone:", overrides())
print("--overrides.theta=1e6:", overrides("--overrides.theta=1e6"))
print("--overrides.rope.factor=8:", overrides("--overrides.rope.factor=8"))
parser = ArgumentParser(exit_on_error=False)
parser.add_subclass_arguments(Model, "model")
try:
    parser.parse_args(["--model=__main__.Model", "--model.adapter.bits=null"])
    print("--adapter.bits=null within a class: accepted")
except Exception as error:
    found = re.search(r"Given value type: <class 'str'>\s+Given value: None", str(error))
    print("--adapter.bits=null within a class: refused" + (", given value: None of type str" if found else ""))
lost = overrides("--overrides.rope.factor=8")["rope"] == {"factor": "8"}
print("unchanged" if lost and overrides("--overrides.theta=1e6")["rope"]["type"] == "yarn" else "CHANGED")
PYTHON
"$folder/venv/bin/python" show.py | tee seen.txt
tail -1 seen.txt | grep -qx unchanged
