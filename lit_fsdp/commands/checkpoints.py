"""``ckpt ls`` and ``ckpt verify``: which checkpoints a run has, and whether they are what was written; no torch.

``ckpt import`` stands in :mod:`lit_fsdp.commands.importing`.
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lit_fsdp.checkpoint.find import FOLDER, folder_of_checkpoints, looks_like_one, survey
from lit_fsdp.checkpoint.manifest import read_manifest
from lit_fsdp.checkpoint.staging import unfinished
from lit_fsdp.checkpoint.verify import Difference, describe, find_differences
from lit_fsdp.commands.importing import run_import
from lit_fsdp.commands.listing import Rule, list_run, notes, rule_of_run, size_words, table
from lit_fsdp.commands.parsing import parse, run_one_of, verb_parser
from lit_fsdp.errors import CheckpointError, ConfigError

_USAGE = """usage: lit-fsdp ckpt ls RUN [--json] [--verify]
       lit-fsdp ckpt verify PATH [--json]
       lit-fsdp ckpt import SOURCE -o FOLDER --model MODEL [options]

  ls        step, time, size, metric, complete and verified of every checkpoint of a run
  verify    compare every file of a checkpoint, or of all those of a run, with its manifest
  import    a checkpoint of Lightning, Accelerate or the Transformers Trainer as one of ours

lit-fsdp ckpt VERB --help explains one of them
"""


def run_ckpt(argv: Sequence[str]) -> int:
    """Run ``lit-fsdp ckpt …`` and return the exit code."""
    return run_one_of("ckpt", {"ls": _ls, "verify": _verify, "import": run_import}, _USAGE, argv)


def _ls(argv: Sequence[str]) -> int:
    parser = verb_parser("ckpt ls", "The checkpoints of a run: step, time, size, metric, complete, verified.")
    parser.add_argument("run", metavar="RUN", type=Path, help="run folder, or its checkpoints folder")
    parser.add_argument("--json", action="store_true", help="JSON instead of a table, with all metrics")
    parser.add_argument("--verify", action="store_true", help="hash every file; exit code 1 if anything differs")
    parser.add_argument("--monitor", help="metric that decides which is the best; default: as in the run's recipe")
    parser.add_argument("--mode", choices=("min", "max"), help="which value of it is better; default: as in the recipe")
    options = parse(parser, argv)
    parent = _checkpoints_in("RUN", options.run)
    if looks_like_one(options.run):
        raise ConfigError(
            "RUN", f"{options.run}, which is a checkpoint", "a run folder", f"write {_run_of(options.run)}"
        )
    entries = survey(parent)
    by_recipe = rule_of_run(parent, entries)
    rule = Rule(options.monitor or by_recipe.monitor, options.mode or by_recipe.mode)
    rows = list_run(entries, rule, options.verify)
    for line in notes(parent, rows):
        print(line, file=sys.stderr)
    if options.json:
        making = [{"path": str(u.path), "kind": u.kind, "live": u.is_live} for u in unfinished(parent)]
        record = {"folder": str(parent), "monitor": rule.monitor, "mode": rule.mode}
        print(json.dumps({**record, "checkpoints": [row.record() for row in rows], "unfinished": making}, indent=1))
    elif rows:
        print(table(rows, rule.monitor))
    return 1 if any(row.differences for row in rows) else 0


def _verify(argv: Sequence[str]) -> int:
    parser = verb_parser("ckpt verify", "Compare every file of a checkpoint, or of all of a run, with its manifest.")
    parser.add_argument("path", metavar="PATH", type=Path, help="checkpoint, run folder, or its checkpoints folder")
    parser.add_argument("--json", action="store_true", help="JSON instead of words")
    options = parse(parser, argv)
    results = {path: find_differences(path) for path in _to_verify(options.path)}
    if options.json:
        print(json.dumps([_record(path, found) for path, found in results.items()], indent=1))
    else:
        for path, found in results.items():
            print(describe(path, found, shown=len(found)) if found else f"{path}: {_sound_words(path)}")
    return 1 if any(results.values()) else 0


def _to_verify(path: Path) -> list[Path]:
    parent = _checkpoints_in("PATH", path)
    if looks_like_one(path):
        return [path]
    entries = survey(parent)
    if not entries:
        raise CheckpointError(f"{path}: nothing to verify: there is no checkpoint in {parent}")
    return [entry.path for entry in entries]


def _record(path: Path, found: Sequence[Difference]) -> dict[str, Any]:
    return {"path": str(path), "verified": not found, "differences": {d.file: d.problem for d in found}}


def _sound_words(path: Path) -> str:
    manifest = read_manifest(path)
    return f"{len(manifest.files)} files, {size_words(manifest.num_bytes)}, all as in the manifest"


def _checkpoints_in(what: str, path: Path) -> Path:
    """The folder of checkpoints that ``path``, which must be a folder, means."""
    if path.is_dir():
        return folder_of_checkpoints(path)
    near = difflib.get_close_matches(path.name, _folders_in(path.parent), n=3, cutoff=0.4)
    there = ", ".join(str(path.parent / name) for name in near) or f"no folder of a similar name in {path.parent}"
    given = f"{path}, which is no folder" if path.exists() else f"{path}, which does not exist"
    raise ConfigError(what, given, f"a folder: {there}", f"write {path.parent / near[0]}" if near else "check the path")


def _run_of(checkpoint: Path) -> Path:
    parent = checkpoint.absolute().parent
    return parent.parent if parent.name == FOLDER else parent


def _folders_in(parent: Path) -> list[str]:
    return [entry.name for entry in parent.iterdir() if entry.is_dir()] if parent.is_dir() else []
