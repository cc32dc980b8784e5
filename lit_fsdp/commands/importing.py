"""``ckpt import``: resume from a checkpoint that another tool wrote."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lit_fsdp.commands.parsing import parse, verb_parser
from lit_fsdp.errors import ConfigError

if TYPE_CHECKING:
    from lit_fsdp.checkpoint.importing.convert import Target

_TEXT = (
    "Write a checkpoint of Lightning (file, FSDPStrategy, ModelParallelStrategy), Accelerate or the Transformers "
    "Trainer as a folder for lit-fsdp fit --ckpt_path. Nothing in it is run. To start from a Hugging Face folder, "
    "name it as model.name in the recipe instead."
)


def run_import(argv: Sequence[str]) -> int:
    """Run ``lit-fsdp ckpt import`` and return the exit code."""
    example = "lit-fsdp ckpt import out/checkpoint-500 -o imported --model out/checkpoint-500"
    parser = verb_parser("ckpt import", _TEXT, example)
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
    if options.step is not None and options.step < 0:
        raise ConfigError("--step", options.step, ">= 0", "write --step 0, or leave it out")
    from lit_fsdp.checkpoint.importing.convert import import_checkpoint
    from lit_fsdp.checkpoint.importing.sources import open_source

    source = open_source(options.source)  # before a model is looked for
    target = _target(options.model, options.tokenizer, options.trust_remote_code)
    choices = {name: getattr(options, name) for name in ("prefix", "allow_surplus", "step", "dtype")}
    report = import_checkpoint(source, options.out, target, **choices)
    print(json.dumps(vars(report), indent=1) if options.json else report)
    return 0


def _target(model: str, tokenizer: str | None, trust_remote_code: bool) -> Target:
    """Names, shapes and ties of the model, with its config and tokenizer; nothing of it is in memory."""
    from lit_fsdp.checkpoint.importing.convert import Target
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
