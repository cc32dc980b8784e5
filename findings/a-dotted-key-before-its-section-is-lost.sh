#!/usr/bin/env bash
# jsonargparse 4.53.0 with PyYAML 6.0.4; run on 2026-11-29.
#
# A config file may write an argument of a nested group as one dotted key (model.size: 77) or within the mapping of its
# group (model: {size: 77}), and both forms in one file. Of a file that has both, the order decides: a dotted key after
# the mapping is added to it, but a dotted key before the mapping is lost without an error or a warning, because the
# mapping replaces the whole group, also the keys that it does not contain. The argument then has its default. The order
# of the keys of a YAML mapping has no meaning by the YAML specification.
#
# Seen:
#   mapping first: name=b size=77
#   dotted key first: name=b size=1
#   dotted key of a group inside a group first: name=a lr=1.0
#   unchanged
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q jsonargparse==4.53.0 PyYAML==6.0.4
cd "$folder"
cat > read.py <<'PYTHON'
from dataclasses import dataclass, field

from jsonargparse import ArgumentParser


@dataclass
class Optim:
    lr: float = 1.0


@dataclass
class Model:
    name: str = "a"
    size: int = 1
    optim: Optim = field(default_factory=Optim)


def read(text):
    with open("config.yaml", "w") as file:
        file.write(text)
    parser = ArgumentParser()
    parser.add_argument("--config", action="config")
    parser.add_class_arguments(Model, "model")
    return parser.parse_args(["--config", "config.yaml"]).model


first = read("model: {name: b}\nmodel.size: 77\n")
print(f"mapping first: name={first.name} size={first.size}")
lost = read("model.size: 77\nmodel: {name: b}\n")
print(f"dotted key first: name={lost.name} size={lost.size}")
inner = read("model.optim.lr: 7.0\nmodel: {size: 3}\n")
print(f"dotted key of a group inside a group first: name={inner.name} lr={inner.optim.lr}")
if (first.size, lost.size, inner.optim.lr) != (77, 1, 1.0):
    raise SystemExit("jsonargparse behaves otherwise now")
print("unchanged")
PYTHON
venv/bin/python read.py
