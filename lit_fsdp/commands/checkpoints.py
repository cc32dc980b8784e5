"""``ckpt ls`` and ``ckpt verify``, which need no torch, and ``ckpt import`` for checkpoints of other frameworks."""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lit_fsdp.checkpoint.manifest import read_manifest
from lit_fsdp.checkpoint.run_folder import FOLDER, look_at, ranked, saved_config, survey
from lit_fsdp.checkpoint.verify import sha256_of, verify
from lit_fsdp.commands.parsing import columns, parse, run_one_of, verb_parser
from lit_fsdp.errors import CheckpointError, require
from lit_fsdp.host import heavy_imports, size_words
from lit_fsdp.models.adapter_names import CONFIG_FILE, WEIGHTS_FILE, base_name, is_adapter, read_adapter_config

_IMPORT = (
    "Convert a checkpoint of Lightning (file, FSDPStrategy, ModelParallelStrategy), Accelerate or the Transformers "
    "Trainer, or a LoRA adapter of peft, to a folder for lit-fsdp fit --ckpt_path. No code in it is executed. To start "
    "from a full Hugging Face model, set model.name in the recipe instead."
)


def run_ckpt(argv: Sequence[str]) -> int:
    """Run ``lit-fsdp ckpt …`` and return the exit code."""
    verbs = {
        "ls": ("list step, time, size, metric and damage of each checkpoint", _ls),
        "verify": ("list checkpoints and compare every file with its manifest", _verify),
        "import": ("convert checkpoints of Lightning, Accelerate, the Trainer or peft", _import),
    }
    return run_one_of("ckpt", verbs, argv)


def _ls(argv: Sequence[str]) -> int:
    parser = verb_parser("ckpt ls", "List the checkpoints of a run and their state.", "lit-fsdp ckpt ls runs/smoke")
    _show(parser, argv, hashes=False)
    return 0


def _verify(argv: Sequence[str]) -> int:
    text = "Compare every file of one or all checkpoints of a run with the manifest; exit code 1 if any differs."
    parser = verb_parser("ckpt verify", text, "lit-fsdp ckpt verify runs/smoke --sha256")
    parser.add_argument("--sha256", action="store_true", help="also print a SHA-256 per checkpoint, to store elsewhere")
    return 1 if any(row["differences"] for row in _show(parser, argv, hashes=True)) else 0


def _show(parser: Any, argv: Sequence[str], hashes: bool) -> list[dict[str, Any]]:
    """Print and return a row per checkpoint, complete or not, oldest first."""
    parser.add_argument("path", metavar="PATH", type=Path, help="run folder, its checkpoints folder, or one checkpoint")
    parser.add_argument("--json", action="store_true", help="JSON instead of a table, with all metrics")
    options = parse(parser, argv)
    path = options.path
    require(path.is_dir(), "PATH", f"{path}, which is not a folder", "a run folder, or a checkpoint", "check the path")
    folder = path / FOLDER if (path / FOLDER).is_dir() else path
    entries = survey(folder)
    config = saved_config((folder if entries else folder.parent).parent)
    complete = [entry for entry in entries if entry.damage is None]
    means = {"last": complete[-1:], "best": ranked(complete, config.monitor, config.mode)[:1]}
    if not entries:
        if folder != path:
            raise CheckpointError(f"{folder}: no checkpoints yet")
        read_manifest(path)  # raises if there is none
        entries = [look_at(path)]  # without the other checkpoints of the run, last and best are unknown
    rows = []
    for entry in entries:
        differences = verify(entry.path, hashes) if hashes or entry.damage else {}  # sizes were already compared
        is_summed = getattr(options, "sha256", False) and not differences
        rows.append(
            {
                "step": None if entry.step < 0 else entry.step,
                "path": str(entry.path),
                "created": entry.created,
                "bytes": entry.num_bytes,
                "metrics": entry.metrics,
                "means": [word for word, meant in means.items() if entry in meant],
                "verified": hashes and not differences,
                "differences": differences,
                "sha256": sha256_of(read_manifest(entry.path)) if is_summed else None,
            }
        )
    head = {"monitor": config.monitor, "mode": config.mode}
    print(json.dumps({**head, "checkpoints": rows}, indent=1) if options.json else _table(rows, config.monitor))
    return rows


def _table(rows: Sequence[dict[str, Any]], monitor: str) -> str:
    lines = [["checkpoint", "time (UTC)", "size", monitor, "state", ""]]
    for row in rows:
        value, found = row["metrics"].get(monitor), "; ".join(f"{n}: {text}" for n, text in row["differences"].items())
        lines.append(
            [
                Path(row["path"]).name,
                row["created"].replace("T", " ").removesuffix("+00:00"),
                size_words(row["bytes"]),
                "-" if value is None else f"{value:.6g}",
                "damaged" if found else "verified" if row["verified"] else "complete",
                found or row["sha256"] or ", ".join(row["means"]),
            ]
        )
    return columns(lines, right=("size", monitor))


def _import(argv: Sequence[str]) -> int:
    example = "lit-fsdp ckpt import out/checkpoint-500 -o imported --model out/checkpoint-500"
    parser = verb_parser("ckpt import", _IMPORT, example)
    parser.add_argument("source", metavar="SOURCE", type=Path, help="file or folder written by the other tool")
    parser.add_argument("-o", "--out", required=True, type=Path, help="folder to create")
    parser.add_argument("--model", required=True, help="model of the checkpoint: folder, hub name or config .json")
    parser.add_argument("--prefix", help="prefix of its parameter names; default: detected by matching")
    parser.add_argument("--allow-surplus", action="store_true", help="skip tensors that the model does not have")
    parser.add_argument("--trust_remote_code", action="store_true", help="run Python code of the model")
    options = parse(parser, argv)
    with heavy_imports():
        from lit_fsdp.checkpoint.importing import import_checkpoint, open_source
        from lit_fsdp.models.export_files import model_entry
        from lit_fsdp.module import CausalLMModule
        from lit_fsdp.parallel.units import tied_names

    if (options.source / CONFIG_FILE).is_file():
        print(_import_adapter(options))
        return 0
    source = open_source(options.source)  # before the model is resolved
    module = CausalLMModule(name=options.model, trust_remote_code=options.trust_remote_code).build()
    built = module.model
    assert built is not None
    ties = tied_names(built)
    shapes = {name: tuple(tensor.shape) for name, tensor in built.state_dict().items() if name not in ties}
    of_model = (shapes, ties, module.checkpoint_files(), model_entry(module.source, {}, None))
    print(import_checkpoint(source, options.out, *of_model, options.prefix, options.allow_surplus))
    return 0


def _import_adapter(options: argparse.Namespace) -> str:
    """Write peft's adapter in the source folder as a checkpoint without optimizer state, with the model as its base."""
    from lit_fsdp.checkpoint.export import adapter_sources
    from lit_fsdp.checkpoint.importing import Source, import_checkpoint, read_safetensors, trainer_step
    from lit_fsdp.config.model import LoraConfig
    from lit_fsdp.models.base import describe_base
    from lit_fsdp.models.export_files import model_entry
    from lit_fsdp.models.lora import apply_saved_lora, check_saved_lora
    from lit_fsdp.models.weights import open_weights
    from lit_fsdp.module import CausalLMModule

    folder = options.source
    settings = read_adapter_config(folder)
    kind = settings.get("peft_type")
    require(kind == "LORA", "ckpt import", f"{folder}, an adapter of type {kind}", "LORA", "merge it with peft first")
    check_saved_lora(settings, folder / CONFIG_FILE)
    stored = read_safetensors(folder / WEIGHTS_FILE)
    module = CausalLMModule(name=options.model, trust_remote_code=options.trust_remote_code).build()
    built: Any = module.model
    of_base = open_weights(module.source, built, 0)
    apply_saved_lora(built, settings)
    whole = built.state_dict()
    buffers = {name for name, _ in built.named_buffers()} & whole.keys()  # a run saves them, too
    shapes = {name: tuple(tensor.shape) for name, tensor in whole.items() if is_adapter(name) or name in buffers}
    names = adapter_sources({name: name for name in shapes}, ())
    weights = {name: of_base.read_named(base_name(name)) for name in buffers}
    weights |= {names.get(name, name): tensor for name, tensor in stored.items()}
    source = Source(folder, weights, step=trainer_step(folder))
    base = describe_base(module.source, dataclasses.replace(module.config, lora=LoraConfig()), 0)
    entry = model_entry(module.source, {}, settings, (), base)
    files = module.checkpoint_files()
    return import_checkpoint(source, options.out, shapes, {}, files, entry, "", options.allow_surplus)
