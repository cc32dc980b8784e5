"""``ckpt ls`` and ``ckpt verify``: which checkpoints a run has, and whether they are what was written; no torch.

``ckpt import`` stands in :mod:`lit_fsdp.commands.importing`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from lit_fsdp.checkpoint.manifest import MANIFEST, read_manifest
from lit_fsdp.checkpoint.run_folder import folder_of_checkpoints, looks_like_one, moved_aside, ranked, survey
from lit_fsdp.checkpoint.staging import hidden_folders
from lit_fsdp.checkpoint.verify import describe, sha256_of, verify
from lit_fsdp.commands.importing import run_import
from lit_fsdp.commands.parsing import columns, parse, run_one_of, size_words, verb_parser
from lit_fsdp.config.run import CheckpointConfig
from lit_fsdp.errors import CheckpointError, require

_USAGE = """usage: lit-fsdp ckpt ls RUN [--json] [--verify]
       lit-fsdp ckpt verify PATH [--json] [--sha256]
       lit-fsdp ckpt import SOURCE -o FOLDER --model MODEL [options]

  ls        step, time, size, metric, complete and verified of each checkpoint
  verify    compare every file of a checkpoint, or of all, with its manifest
  import    a checkpoint of Lightning, Accelerate or the Transformers Trainer as
            one of ours

lit-fsdp ckpt VERB --help explains one of them

example:
  lit-fsdp ckpt ls runs/smoke
"""


def run_ckpt(argv: Sequence[str]) -> int:
    """Run ``lit-fsdp ckpt …`` and return the exit code."""
    return run_one_of("ckpt", {"ls": _ls, "verify": _verify, "import": run_import}, _USAGE, argv)


def _ls(argv: Sequence[str]) -> int:
    text = "The checkpoints of a run: step, time, size, metric, complete, verified."
    parser = verb_parser("ckpt ls", text, "lit-fsdp ckpt ls runs/smoke")
    parser.add_argument("run", metavar="RUN", type=Path, help="run folder, or its checkpoints folder")
    parser.add_argument("--json", action="store_true", help="JSON instead of a table, with all metrics")
    parser.add_argument("--verify", action="store_true", help="hash every file; exit code 1 if anything differs")
    parser.add_argument("--monitor", help="metric that decides which is the best; default: as in the run's recipe")
    parser.add_argument("--mode", choices=("min", "max"), help="which value of it is better; default: as in the recipe")
    options = parse(parser, argv)
    folder = _checkpoints_in("RUN", options.run)
    given = f"{options.run}, which is a checkpoint"
    require(not looks_like_one(options.run), "RUN", given, "a run folder", "write the folder above its checkpoints")
    config = _config(folder.parent / "recipe.yaml")
    monitor, mode = options.monitor or config.monitor, options.mode or config.mode
    rows = _rows(folder, monitor, mode, options.verify)
    if options.json:
        print(json.dumps({"folder": str(folder), "monitor": monitor, "mode": mode, "checkpoints": rows}, indent=1))
    elif rows:
        print(_table(rows, monitor))
    if not any(row["complete"] for row in rows):
        print(f"{folder}: no complete checkpoint" if rows else f"{folder}: no checkpoints yet", file=sys.stderr)
    for path, _, _ in hidden_folders(folder):
        print(f"{path.name}: being written or removed, or left by a kill until the next run starts", file=sys.stderr)
    for path in moved_aside(folder):
        print(f"{path.name}: moved aside by a run that went on from an older step", file=sys.stderr)
    return 1 if any(row["differences"] for row in rows) else 0


def _rows(folder: Path, monitor: str, mode: Literal["min", "max"], hashed: bool) -> list[dict[str, Any]]:
    """One per checkpoint, complete or not, oldest first; with ``hashed`` every file is compared."""
    entries = survey(folder)
    complete = [entry for entry in entries if entry.damage is None]
    means = {"last": complete[-1:], "best": ranked(complete, monitor, mode)[:1]}
    rows = []
    for entry in entries:
        differences = verify(entry.path) if hashed else None
        rows.append(
            {
                "step": None if entry.step < 0 else entry.step,
                "path": str(entry.path),
                "created": entry.created,
                "bytes": entry.num_bytes,
                "metrics": entry.metrics,
                "complete": entry.damage is None,
                "reason": entry.damage and entry.damage.replace(f"{entry.path}/", ""),
                "verified": None if differences is None else not differences,
                "differences": differences,
                "means": [word for word, meant in means.items() if entry in meant],
            }
        )
    return rows


def _config(recipe: Path) -> CheckpointConfig:
    """The ``checkpoint`` section of a run's recipe; the defaults where there is none."""
    try:
        return CheckpointConfig(**yaml.safe_load(recipe.read_text(encoding="utf-8"))["checkpoint"])
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError):
        return CheckpointConfig()  # somebody else's file, or a section with keys of another version


def _table(rows: Sequence[dict[str, Any]], monitor: str) -> str:
    lines = [["step", "time (UTC)", "size", monitor, "complete", "verified", ""]]
    for row in rows:
        value, differences = row["metrics"].get(monitor), list(row["differences"] or ())
        lines.append(
            [
                Path(row["path"]).name if row["step"] is None else str(row["step"]),
                row["created"].replace("T", " ").removesuffix("+00:00") if row["complete"] else "-",
                size_words(row["bytes"]) if row["complete"] else "-",
                "-" if value is None else f"{value:.6g}",
                "yes" if row["complete"] else "no",
                f"no: {', '.join(differences[:2])}" if differences else "yes" if row["verified"] else "-",
                row["reason"] or ", ".join(row["means"]),
            ]
        )
    return columns(lines, right=("step", "size", monitor))


def _verify(argv: Sequence[str]) -> int:
    text = "Compare every file of a checkpoint, or of all of a run, with its manifest."
    parser = verb_parser("ckpt verify", text, "lit-fsdp ckpt verify runs/smoke --sha256")
    parser.add_argument("path", metavar="PATH", type=Path, help="checkpoint, run folder, or its checkpoints folder")
    parser.add_argument("--json", action="store_true", help="JSON instead of words")
    parser.add_argument("--sha256", action="store_true", help="also print one SHA-256 for each, to be kept elsewhere")
    options = parse(parser, argv)
    folder = _checkpoints_in("PATH", options.path)
    is_one = looks_like_one(options.path) or (options.path / MANIFEST).is_file()  # one that was moved aside
    paths = [options.path] if is_one else [entry.path for entry in survey(folder)]
    if not paths:
        raise CheckpointError(f"{options.path}: nothing to verify: there is no checkpoint in {folder}")
    records: list[dict[str, Any]] = []
    for path in paths:
        found = verify(path)
        records.append({"path": str(path), "verified": not found, "differences": found})
        lines = [describe(path, found)]
        if not found:
            manifest = read_manifest(path)
            lines = [f"{path}: {len(manifest.files)} files, {size_words(manifest.num_bytes)}, all as in the manifest"]
        if options.sha256:
            records[-1]["sha256"] = None if found else sha256_of(read_manifest(path))
            lines += [] if found else [f"{records[-1]['sha256']}  {path}"]
        if not options.json:
            print("\n".join(lines))
    if options.json:
        print(json.dumps(records, indent=1))
    return 0 if all(record["verified"] for record in records) else 1


def _checkpoints_in(field: str, path: Path) -> Path:
    """The folder of checkpoints that ``path`` means."""
    require(path.is_dir(), field, f"{path}, which is no folder", "a run folder, or a checkpoint", "check the path")
    return folder_of_checkpoints(path)
