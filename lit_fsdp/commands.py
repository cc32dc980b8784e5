"""The verbs of ``lit-fsdp``. Nothing heavy is imported before the words are understood."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from lit_fsdp.errors import ConfigError
from lit_fsdp.host import is_first_process

_TRAINER_VERBS = {
    "fit": "train a model by a recipe",
    "validate": "loss, perplexity and token accuracy on data.val",
    "test": "the same on data.test",
    "predict": "score every row of data.predict into predictions.jsonl",
}
_OTHER_VERBS = {
    "convert": "a configuration of Accelerate, Transformers or DeepSpeed as a recipe",
    "audit": "what a recipe would do on so many ranks: FSDP units, mesh, dtypes, bytes per rank",
    "export": "a checkpoint as a Hugging Face folder",
    "generate": "ask an exported model",
}
_USAGE = """usage: lit-fsdp VERB [options]

{verbs}

lit-fsdp fit --config RECIPE.yaml [--config FRAGMENT.yaml ...] [--key value ...] [--ckpt_path last|best|PATH]
  files are merged in order, later wins, flags last; --print_config shows the result, --help every key
lit-fsdp VERB --help explains a verb; recipes/ and configs/ hold complete runs and fragments
"""


def run(argv: list[str]) -> int:
    """Understand the command line, run the verb and return the exit code.

    Raises:
        ConfigError: A verb, key or value that does not exist, or a rule that does not hold.
    """
    if not argv or argv[0] in ("-h", "--help", "help"):
        verbs = "\n".join(f"  {verb:<10}{text}" for verb, text in {**_TRAINER_VERBS, **_OTHER_VERBS}.items())
        print(_USAGE.format(verbs=verbs), end="", file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    if argv[0] == "--version":
        import lit_fsdp

        print(f"lit_fsdp {lit_fsdp.__version__}")
        return 0
    verb, rest = argv[0], argv[1:]
    if verb in _TRAINER_VERBS:
        return _trainer_verb(verb, rest)
    others: dict[str, Callable[[list[str]], int]] = {
        "audit": _audit,
        "convert": _convert,
        "export": _export,
        "generate": _generate,
    }
    if verb in others:
        return others[verb](rest)
    known = [*_TRAINER_VERBS, *_OTHER_VERBS]
    near = difflib.get_close_matches(verb, known, n=1) or ["fit"]
    raise ConfigError("command line", verb, ", ".join(known), f"lit-fsdp {near[0]} ...")


def _trainer_verb(verb: str, argv: list[str]) -> int:
    """Check the recipe before anything heavy is imported, then hand it to Lightning's command line."""
    from lit_fsdp.config.miniature import adapt_to_miniature
    from lit_fsdp.config.recipe import read_recipe
    from lit_fsdp.config.run import check_recipe

    recipe = read_recipe(argv)
    values = recipe.values
    if "-h" not in recipe.flags and "--help" not in recipe.flags:
        replaced = adapt_to_miniature(values, recipe.replaced)
        trainer = {} if values.get("trainer") is None else values["trainer"]
        if isinstance(trainer, dict) and trainer.get("default_root_dir") is None:
            stem = recipe.files[0].stem if recipe.files else "run"
            values["trainer"] = {**trainer, "default_root_dir": f"runs/{stem}"}
        check_recipe(values, verb)
        if not recipe.only_shows:
            for line in replaced if is_first_process() else ():
                print(f"miniature: {line}", file=sys.stderr)
            _resolve_checkpoint(verb, values)
    from lit_fsdp.cli import run_verb

    return run_verb(verb, values, recipe.flags)


def _resolve_checkpoint(verb: str, values: dict[str, Any]) -> None:
    """``last`` and ``best`` become the path they stand for; a used run folder is refused without one of them."""
    from lit_fsdp.checkpoint.find import checkpoints, resolve_ckpt_path
    from lit_fsdp.config.checkpoint import CheckpointConfig
    from lit_fsdp.config.typed import build

    run_folder = Path(values["trainer"]["default_root_dir"])
    checkpoint = build(CheckpointConfig, values.get("checkpoint"), "checkpoint")
    if values.get("ckpt_path"):
        found = resolve_ckpt_path(str(values["ckpt_path"]), run_folder, checkpoint.monitor, checkpoint.mode)
        values["ckpt_path"] = str(found)
    elif verb == "fit" and is_first_process():
        there = checkpoints(run_folder)
        if there:
            raise ConfigError(
                "trainer.default_root_dir",
                f"{run_folder}, which holds {len(there)} checkpoint(s), the newest of step {there[-1].step}",
                "a new run folder, or a resume",
                "add --ckpt_path last, or name another --trainer.default_root_dir",
            )


def _audit(argv: Sequence[str]) -> int:
    text = "The FSDP units, mesh, dtypes and bytes per rank of a recipe, without weights and without training."
    parser = _parser("audit", text)
    parser.usage = "lit-fsdp audit --config RECIPE.yaml [--config FRAGMENT.yaml ...] [--key value ...] [options]"
    parser.add_argument("--ranks", type=int, help="all ranks of the run; default: the recipe's devices and nodes")
    parser.add_argument("--nodes", type=int, help="nodes they are spread over; default: 1 with --ranks")
    parser.add_argument("--json", action="store_true", help="JSON instead of tables on standard output")
    if "-h" in argv or "--help" in argv:
        parser.print_help()
        return 0
    try:
        options, rest = parser.parse_known_args(list(argv))
    except argparse.ArgumentError as error:
        raise ConfigError(parser.prog, str(error), "--ranks N, --nodes M", f"see {parser.prog} --help") from None
    from lit_fsdp.config.data import accumulation_steps
    from lit_fsdp.config.miniature import adapt_to_miniature
    from lit_fsdp.config.ranks import put_ranks
    from lit_fsdp.config.recipe import read_recipe
    from lit_fsdp.config.run import STRATEGY, check_recipe

    recipe = read_recipe(rest, also=("ranks", "nodes", "json"))
    put_ranks(recipe.values, options.ranks, options.nodes)
    for line in adapt_to_miniature(recipe.values, recipe.replaced):
        print(f"miniature: {line}", file=sys.stderr)
    run = check_recipe(recipe.values, "audit" if options.ranks else "fit")
    assert run.world_size is not None
    try:
        accumulation_steps(run.data.global_batch_size, run.data.micro_batch_size, run.world_size)
    except ConfigError as error:  # on other ranks than the recipe's: the tables do not depend on it
        print(f"note: a run on {run.world_size} ranks would need other batch sizes: {error}", file=sys.stderr)
    from lit_fsdp.audit import audit_recipe, print_recipe_audit
    from lit_fsdp.cli import check_parses

    check_parses(recipe.values, recipe.flags)
    if run.trainer.get("accelerator") == "cpu":
        from lit_fsdp.parallel.devices import check_device

        check_device(run.strategy, "cpu", STRATEGY)
    record = audit_recipe(run)
    if options.json:
        print(json.dumps(record, indent=1))
    else:
        print_recipe_audit(record)
    return 0


def _convert(argv: Sequence[str]) -> int:
    from lit_fsdp.convert.convert import FORMATS, convert_file

    parser = _parser("convert", "Write a recipe that trains as another library's configuration file does.")
    parser.add_argument("format", choices=FORMATS, help="whose configuration it is")
    parser.add_argument("file", type=Path, help="its YAML or JSON file; - reads standard input")
    parser.add_argument("-o", "--out", type=Path, help="file to create; default: standard output")
    parser.add_argument("--ranks", type=int, help="ranks of the run, where the file does not say")
    parser.add_argument("--num_nodes", type=int, default=1, help="nodes of the run, where the file does not say")
    parser.add_argument(
        "--allow-differences", action="store_true", help="write the recipe although it trains differently"
    )
    options = _parse(parser, argv)
    for name, given in (("--ranks", options.ranks), ("--num_nodes", options.num_nodes)):
        if given is not None and given < 1:
            raise ConfigError(name, given, ">= 1", f"write {name} 1")
    if options.out and options.out.exists():
        raise ConfigError("--out", str(options.out), "a file that does not exist yet", "name another, or remove it")
    conversion = convert_file(options.format, options.file, options.ranks, options.num_nodes)
    for fate in conversion.fates:
        print(fate, file=sys.stderr)
    if conversion.differs and not options.allow_differences:
        print("no recipe: it would train differently; --allow-differences writes it all the same", file=sys.stderr)
        return 1
    name = "standard input" if str(options.file) in ("-", "/dev/stdin") else options.file.name
    text = conversion.as_yaml(f"{name} ({options.format})")
    if not options.out:
        print(text, end="")
        return 0
    try:
        with open(options.out, "x", encoding="utf-8") as handle:
            handle.write(text)
    except OSError as error:
        raise ConfigError(
            "--out", f"{options.out} ({error.strerror})", "a file that can be created", "name another"
        ) from None
    return 0


def _export(argv: Sequence[str]) -> int:
    parser = _parser("export", "Write a checkpoint, sharded or full, as a folder that plain transformers loads.")
    parser.add_argument("--ckpt", required=True, type=Path, help="checkpoint folder (runs/x/checkpoints/step-…)")
    parser.add_argument("--out", required=True, type=Path, help="folder to create")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), help="dtype of the weights; default: as saved")
    parser.add_argument("--max_shard_gib", type=float, default=5.0, help="largest weight file in GiB (default 5)")
    options = _parse(parser, argv)
    from lit_fsdp.checkpoint.hf_export import export

    report = export(options.ckpt, options.out, options.dtype, options.max_shard_gib)
    print(report)
    return 0


def _generate(argv: Sequence[str]) -> int:
    parser = _parser("generate", "Answer a prompt with an exported model and its chat template.")
    parser.add_argument("--model", required=True, help="model folder")
    parser.add_argument("--prompt", required=True, help="what the user says")
    parser.add_argument("--system", help="system message")
    parser.add_argument("--max_new_tokens", type=int, default=256, help="longest answer in tokens (default 256)")
    options = _parse(parser, argv)
    from lit_fsdp.models.generate import chat

    print(chat(options.model, options.prompt, options.system, options.max_new_tokens))
    return 0


class _Parser(argparse.ArgumentParser):
    """Raises whatever is wrong; ``exit_on_error=False`` alone still exits on a missing or surplus argument."""

    def error(self, message: str) -> NoReturn:
        raise argparse.ArgumentError(None, message)


def _parser(verb: str, text: str) -> argparse.ArgumentParser:
    return _Parser(
        f"lit-fsdp {verb}", description=text, allow_abbrev=False, exit_on_error=False, epilog="Exit codes: 0, 1, 2."
    )


def _parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Arguments, or a ConfigError that names the nearest flag."""
    flags = [flag for action in parser._actions for flag in action.option_strings]
    for word in argv:
        name = word.split("=")[0]
        if name.startswith("--") and name not in flags:
            near = difflib.get_close_matches(name, flags, n=1, cutoff=0.5) or flags[-1:]
            raise ConfigError(
                f"{parser.prog} {name}", "a flag that does not exist", ", ".join(flags), f"write {near[0]}"
            )
    try:
        return parser.parse_args(list(argv))
    except argparse.ArgumentError as error:
        usage = " ".join(parser.format_usage().split()).removeprefix("usage: ")
        raise ConfigError(parser.prog, str(error), usage, f"see {parser.prog} --help") from None
