"""``audit``: what a recipe would do, before anything is trained."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from lit_fsdp.commands.parsing import verb_parser
from lit_fsdp.errors import ConfigError


def run_audit(argv: Sequence[str]) -> int:
    """Run ``lit-fsdp audit`` and return the exit code."""
    text = "The FSDP units, mesh, dtypes and bytes per rank of a recipe, without weights and without training."
    parser = verb_parser("audit", text)
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
    from lit_fsdp.cli_parse import check_parses

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
