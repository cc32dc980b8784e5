#!/usr/bin/env bash
# jsonargparse 4.53.0 with lightning 2.6.6 (LightningCLI); run on 2026-11-29.
#
# An argument of a class that accepts text or a list of dataclasses (`str | list[Source]`), as data modules have for
# files of rows, loses its text if that is the name of a file that exists: in its place stands what is in the file,
# parsed as YAML, or as one text. A file of prose becomes the value, a JSON list of names becomes these names, an empty
# file becomes null. LightningCLI asks for this for all classes in subclass mode (`sub_configs`), so that a list of
# dataclasses may stand in a file of its own; that the text is a valid value by itself does not matter. The same happens
# to a word (`str | Options`), such as "full", if a file of this name lies in the current folder. No message says so.
#
# Seen (value of the argument in the data module):
#   rows.txt: 'first line of prose\nsecond line\n'
#   names.json: ['a.jsonl', 'b.jsonl']
#   empty.jsonl: None
#   missing.txt: 'missing.txt'
#   mode=full, with a file of this name: 'a word of that file\n'
#   unchanged
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q lightning==2.6.6 jsonargparse[signatures]==4.53.0 numpy
cd "$folder"
cat > read.py <<'PYTHON'
import sys
from dataclasses import dataclass

from lightning.pytorch import LightningDataModule
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel


@dataclass
class Source:
    path: str
    weight: float = 1.0


@dataclass
class Options:
    depth: int = 1


class Rows(LightningDataModule):
    def __init__(self, train: str | list[str | Source] | None = None, mode: str | Options = "none"):
        super().__init__()
        self.train, self.mode = train, mode


def value(name, text):
    words = ["--data=Rows", f"--data.{name}={text}"]
    cli = LightningCLI(
        BoringModel, Rows, subclass_mode_data=True, run=False, args=words, save_config_callback=None,
        trainer_defaults={"accelerator": "cpu", "logger": False, "enable_checkpointing": False},
    )
    return getattr(cli.datamodule, name)


for file, text in (
    ("rows.txt", "first line of prose\nsecond line\n"), ("names.json", '["a.jsonl", "b.jsonl"]'), ("empty.jsonl", ""),
    ("full", "a word of that file\n"),
):
    with open(file, "w") as out:
        out.write(text)
seen = [f"{file}: {value('train', file)!r}" for file in ("rows.txt", "names.json", "empty.jsonl", "missing.txt")]
seen.append(f"mode=full, with a file of this name: {value('mode', 'full')!r}")
print(*seen, sep="\n")
expected = [
    r"rows.txt: 'first line of prose\nsecond line\n'", "names.json: ['a.jsonl', 'b.jsonl']", "empty.jsonl: None",
    "missing.txt: 'missing.txt'", r"mode=full, with a file of this name: 'a word of that file\n'",
]
print("unchanged" if seen == expected else f"CHANGED: {set(seen) ^ set(expected)}")
sys.exit(seen != expected)
PYTHON
"$folder/venv/bin/python" read.py 2> err.txt || { tail -5 err.txt; exit 1; }
