"""``fit``, ``validate``, ``test`` and ``predict``: check a recipe before torch is imported, then run it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_fsdp.commands.parsing import example_lines
from lit_fsdp.config.data import STAGES
from lit_fsdp.host import is_launched_by_lightning, pause_collection
from lit_fsdp.launch.ranks import LAUNCHED_RANKS
from lit_fsdp.signals import SIGNAL_FLAGS

if TYPE_CHECKING:
    from lit_fsdp.config.parser import LoadedRecipe

EXAMPLES = {
    "fit": "lit-fsdp fit -c recipes/quickstart.yaml -c configs/debug/smoke.yaml",
    "validate": "lit-fsdp validate --config runs/smoke/recipe.yaml --ckpt_path last",
    "test": "lit-fsdp test --config runs/smoke/recipe.yaml --ckpt_path last",
    "predict": "lit-fsdp predict --config runs/smoke/recipe.yaml --ckpt_path last",
}


def run_training_verb(verb: str, argv: list[str], callbacks: Callable[[], list[Any]] = list) -> int:
    """Check the recipe, run the verb and return the exit code.

    Args:
        verb: One of :data:`EXAMPLES`.
        argv: The command line after the verb.
        callbacks: Builds further callbacks for the Trainer; called once torch may be imported.

    Raises:
        ConfigError: A key or value does not exist, or a rule is violated.
    """
    SIGNAL_FLAGS.can_save = verb == "fit"
    # srun ends all tasks when a signal kills one
    if "SLURM_PROCID" in os.environ or is_launched_by_lightning():
        SIGNAL_FLAGS.install()
    shows = any(word in ("-h", "--help", "--print_config") or word.endswith(".help") for word in argv)
    if "--print_config" in argv:
        from lit_fsdp.config.parser import check_keys

        check_keys(argv)
    if not shows and not is_launched_by_lightning():  # the parent process has already checked the recipe
        recipe = _check(verb, argv)
        SIGNAL_FLAGS.install()
        if "trainer.strategy" not in recipe.run.foreign:
            SIGNAL_FLAGS.before_exit = lambda: LAUNCHED_RANKS.end(grace_seconds=0)
            LAUNCHED_RANKS.start(recipe.run.trainer)
    pause_collection()  # until the CLI has built everything
    from lit_fsdp.cli import RecipeCLI

    if {"-h", "--help"} & set(argv):
        with contextlib.suppress(SystemExit):  # jsonargparse exits here
            RecipeCLI(args=[verb, *argv], auto_configure_optimizers=False)
        print(f"\n{example_lines(EXAMPLES[verb])}", end="")
        return 0
    beside = {"callbacks": callbacks()}
    return RecipeCLI(args=[verb, *argv], auto_configure_optimizers=False, trainer_defaults=beside).exit_code


def _check(verb: str, argv: list[str]) -> LoadedRecipe:
    """Check everything that does not need torch."""
    from lit_fsdp.checkpoint.run_folder import find_resume
    from lit_fsdp.config.parser import load_recipe
    from lit_fsdp.data.sources import check_files
    from lit_fsdp.launch.launcher import adopt_step, check_launch, drop_used_port

    recipe = load_recipe(argv, verb)
    if "data" not in recipe.run.foreign:
        check_files(recipe.run.data, STAGES[verb])
    adopt_step(os.environ)
    drop_used_port(os.environ)
    check_launch(recipe.run.trainer, os.environ)
    run, values = recipe.run, recipe.values
    if "trainer.strategy" not in run.foreign:
        folder = Path(run.trainer["default_root_dir"])
        find_resume(verb, values.get("ckpt_path"), folder, run.checkpoint, run.resume.fallback).check(run)
    return recipe
