"""``ckpt ls`` and ``ckpt verify``, which need no torch, and ``ckpt import``, which makes others' checkpoints ours."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from lit_fsdp.checkpoint.files import MANIFEST, hidden_folders
from lit_fsdp.checkpoint.manifest import read_manifest
from lit_fsdp.checkpoint.run_folder import folder_of_checkpoints, looks_like_one, moved_aside, ranked, survey
from lit_fsdp.checkpoint.verify import describe, sha256_of, verify
from lit_fsdp.commands.parsing import columns, parse, run_one_of, size_words, verb_parser
from lit_fsdp.config.run import CheckpointConfig
from lit_fsdp.errors import CheckpointError, require

if TYPE_CHECKING:
    from lit_fsdp.checkpoint.importing import Target

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
_IMPORT = (
    "Write a checkpoint of Lightning (file, FSDPStrategy, ModelParallelStrategy), Accelerate or the Transformers "
    "Trainer as a folder for lit-fsdp fit --ckpt_path. Nothing in it is run. To start from a Hugging Face folder, "
    "name it as model.name in the recipe instead."
)


def run_ckpt(argv: Sequence[str]) -> int:
    """Run ``lit-fsdp ckpt …`` and return the exit code."""
    return run_one_of("ckpt", {"ls": _ls, "verify": _verify, "import": _import}, _USAGE, argv)


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


def _import(argv: Sequence[str]) -> int:
    example = "lit-fsdp ckpt import out/checkpoint-500 -o imported --model out/checkpoint-500"
    parser = verb_parser("ckpt import", _IMPORT, example)
    parser.add_argument("source", metavar="SOURCE", type=Path, help="file or folder that the other tool wrote")
    parser.add_argument("-o", "--out", required=True, type=Path, help="folder to create")
    parser.add_argument("--model", required=True, help="the model it is of: folder, hub name or config .json")
    parser.add_argument("--tokenizer", help="folder or hub name of the tokenizer; default: the model's")
    parser.add_argument("--prefix", help="what stands before the model's names in it; default: found by matching")
    parser.add_argument("--step", type=int, help="optimizer steps done; default: what the source says")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), help="dtype of weights and moments; default: the source's")
    parser.add_argument("--allow-surplus", action="store_true", help="leave out what the model does not have")
    parser.add_argument("--trust_remote_code", action="store_true", help="run the model's own code from the hub")
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    options = parse(parser, argv)
    require(options.step is None or options.step >= 0, "--step", options.step, ">= 0", "write 0, or leave it out")
    from lit_fsdp.checkpoint.importing import import_checkpoint, open_source

    source = open_source(options.source)  # before a model is looked for
    target = _target(options.model, options.tokenizer, options.trust_remote_code)
    choices = {name: getattr(options, name) for name in ("prefix", "allow_surplus", "step", "dtype")}
    report = import_checkpoint(source, options.out, target, **choices)
    print(json.dumps(vars(report), indent=1) if options.json else report)
    return 0


def _target(model: str, tokenizer: str | None, trust_remote_code: bool) -> Target:
    """Names, shapes and ties of the model, with its config and tokenizer; nothing of it is in memory."""
    from lit_fsdp.checkpoint.importing import Target
    from lit_fsdp.models.export_files import model_entry
    from lit_fsdp.module import CausalLMModule
    from lit_fsdp.parallel.units import tied_names

    module = CausalLMModule(name=model, tokenizer=tokenizer, trust_remote_code=trust_remote_code).build()
    built = module.model
    assert built is not None
    ties = tied_names(built)
    shapes = {name: tuple(tensor.shape) for name, tensor in built.state_dict().items() if name not in ties}
    entry = model_entry(module.source, {}, None)
    return Target(shapes=shapes, ties=ties, files=module.checkpoint_files(), entry=entry)
