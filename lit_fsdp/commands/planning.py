"""``audit``: what a recipe would do, before anything is trained; ``model prepare``: fetch its model ahead of a run."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from lit_fsdp.commands.parsing import RECIPE, example_lines, flags_of, options_and_recipe, run_one_of, verb_parser
from lit_fsdp.errors import ConfigError, require


def run_audit(argv: Sequence[str]) -> int:
    """Run ``lit-fsdp audit`` and return the exit code."""
    text = "The FSDP units, mesh, dtypes and bytes per rank of a recipe, without weights and without training."
    example = "lit-fsdp audit --config recipes/llama3.1-8b_full_fsdp2_8x80gb.yaml --ranks 16"
    parser = verb_parser("audit", text, example, RECIPE)
    parser.add_argument("--ranks", type=int, help="all ranks of the run; default: the recipe's devices and nodes")
    parser.add_argument("--nodes", type=int, help="nodes they are spread over; default: 1 with --ranks")
    parser.add_argument("--json", action="store_true", help="JSON instead of tables on standard output")
    options, words = options_and_recipe(parser, argv)
    if options is None:
        return 0
    from lit_fsdp.config.data import accumulation_steps
    from lit_fsdp.config.parser import load_recipe
    from lit_fsdp.config.run import STRATEGY

    run = load_recipe([*words, *_rank_flags(options.ranks, options.nodes)], "audit", flags_of(parser)).run
    ranks, devices = run.world_size, run.trainer["devices"]
    if ranks is None:
        raise ConfigError("trainer.devices", devices, "a number of ranks", "add --ranks N to the command")
    ours = not run.foreign - {"data"}
    require(ours, "audit", f"somebody else's {', '.join(run.foreign)}", "lit_fsdp's own model and strategy")
    try:
        accumulation_steps(run.data, ranks, run.trainer["accumulate_grad_batches"])
    except ConfigError as error:  # on other ranks than the recipe's: the tables do not depend on it
        if not options.ranks:
            raise
        print(f"note: a run on {ranks} ranks would need other batch sizes: {error}", file=sys.stderr)
    from lit_fsdp.audit import audit_recipe, print_recipe_audit

    if run.trainer["accelerator"] == "cpu":
        from lit_fsdp.parallel.precision import check_device

        check_device(run.strategy, "cpu", STRATEGY)
    record = audit_recipe(run)
    print(json.dumps(record, indent=1)) if options.json else print_recipe_audit(record)
    return 0


def _rank_flags(ranks: int | None, nodes: int | None) -> list[str]:
    require(ranks or not nodes, "--nodes", f"{nodes} without --ranks", "both, or neither", "add --ranks N")
    if ranks is None:
        return []
    nodes = nodes or 1
    spread = ranks >= nodes >= 1 and ranks % nodes == 0
    require(spread, "--nodes", f"{nodes} for {ranks} ranks", f"a divisor of {ranks}, both >= 1")
    return [f"--trainer.devices={ranks // nodes}", f"--trainer.num_nodes={nodes}"]


_PREPARE = "lit-fsdp model prepare --name HuggingFaceTB/SmolLM2-135M-Instruct"
_USAGE = f"""usage: lit-fsdp model prepare {RECIPE}

  prepare   fetch or convert a model ahead of a run, on a login node say

{example_lines(_PREPARE)}"""


def run_model(argv: Sequence[str]) -> int:
    """Run ``lit-fsdp model prepare`` and return the exit code."""
    return run_one_of("model", {"prepare": _prepare}, _USAGE, argv)


def _prepare(argv: Sequence[str]) -> int:
    text = (
        "Fetch a model and its tokenizer from the hub, or convert them, into the caches that a run reads: on a login \
node, say, for compute nodes without a network. What is there already is only looked at."
    )
    parser = verb_parser("model prepare", text, _PREPARE, RECIPE)
    parser.add_argument("--name", help="hub name, folder or GGUF file; default: model.name of the recipe")
    parser.add_argument("--json", action="store_true", help="JSON instead of lines on standard output")
    options, words = options_and_recipe(parser, argv)
    if options is None:
        return 0
    from lit_fsdp.config.parser import load_recipe

    words += [f"--model.name={options.name}"] if options.name else []
    config = load_recipe(words, "model", flags_of(parser)).run.model
    from lit_fsdp.models.resolve import prepare_model
    from lit_fsdp.speak import speak

    speak()
    record = prepare_model(config)
    if options.json:
        print(json.dumps(record, indent=1))
        return 0
    for what in ("weights", "tokenizer"):
        print(f"{what:<10}{record[what] or 'made here, nothing to fetch'}")
    return 0
