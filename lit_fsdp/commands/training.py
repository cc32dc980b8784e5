"""``fit``, ``validate``, ``test`` and ``predict``: a recipe, checked, for Lightning's command line."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_fsdp.errors import ConfigError
from lit_fsdp.host import is_first_process, is_launched_by_lightning, is_requeued
from lit_fsdp.signals import SignalFlags

if TYPE_CHECKING:
    from lit_fsdp.checkpoint.manifest import Manifest


def run_training_verb(verb: str, argv: list[str]) -> int:
    """Check the recipe before anything heavy is imported, then hand it to Lightning's command line."""
    from lit_fsdp.config.miniature import adapt_to_miniature
    from lit_fsdp.config.recipe import read_recipe
    from lit_fsdp.config.run import check_recipe
    from lit_fsdp.launch.launcher import adopt_step, check_launch

    signals = SignalFlags(can_save=verb == "fit")
    if "SLURM_PROCID" in os.environ:  # one task that dies of a signal makes srun end the others
        signals.install()
    recipe = read_recipe(argv)
    values = recipe.values
    others: Sequence[Path] = ()
    word = values.get("ckpt_path")
    if "-h" not in recipe.flags and "--help" not in recipe.flags:
        replaced = adapt_to_miniature(values, recipe.replaced)
        trainer = {} if values.get("trainer") is None else values["trainer"]
        if isinstance(trainer, dict) and trainer.get("default_root_dir") is None:
            stem = recipe.files[0].stem if recipe.files else "run"
            values["trainer"] = {**trainer, "default_root_dir": f"runs/{stem}"}
        if not recipe.only_shows and isinstance(values["trainer"], dict):  # first: other rules count the ranks
            adopt_step(os.environ)
            check_launch(values["trainer"], os.environ)
        check_recipe(values, verb)
        if not recipe.only_shows:
            for line in replaced if is_first_process() else ():
                print(f"miniature: {line}", file=sys.stderr)
            others = _resolve_checkpoint(verb, values)
            signals.install()
    from lit_fsdp.cli import run_verb

    def choose_again() -> tuple[str, Sequence[Path]]:
        again = {**values, "ckpt_path": word}
        found = _resolve_checkpoint(verb, again)
        return again["ckpt_path"], found

    return run_verb(verb, values, recipe.flags, others, signals, choose_again if word else None)


def _resolve_checkpoint(verb: str, values: dict[str, Any]) -> Sequence[Path]:
    """``last`` and ``best`` become the path they stand for; a used run folder is refused without one of them.

    Returns:
        With ``resume.fallback``: what may take the place of that path, should its hashes show that it is damaged.
    """
    from lit_fsdp.checkpoint.find import FOLDER, choose, survey
    from lit_fsdp.checkpoint.manifest import read_manifest
    from lit_fsdp.config.checkpoint import CheckpointConfig
    from lit_fsdp.config.resume import ResumeConfig
    from lit_fsdp.config.typed import build

    run_folder = Path(values["trainer"]["default_root_dir"])
    checkpoint = build(CheckpointConfig, values.get("checkpoint"), "checkpoint")
    fallback = build(ResumeConfig, values.get("resume"), "resume").fallback
    if values.get("ckpt_path"):
        word = str(values["ckpt_path"])
        if word == "last" and is_requeued() and not survey(run_folder / FOLDER):
            values["ckpt_path"] = None  # put back into the queue before anything was saved
            return ()
        choice = choose(word, run_folder, checkpoint.monitor, checkpoint.mode, fallback)
        _check_goes_on(verb, values, read_manifest(choice.path))
        values["ckpt_path"] = str(choice.path)
        for entry in choice.damaged if is_first_process() else ():
            print(f"{entry.path} is damaged: {entry.reason}", file=sys.stderr)
        if choice.damaged and is_first_process():
            print(f"going on from {choice.path} as {word} (resume.fallback)", file=sys.stderr)
        return choice.others if fallback else ()
    if verb == "fit" and not is_launched_by_lightning():  # every rank by itself: none waits for one that is gone
        there = survey(run_folder / FOLDER)
        if there:
            raise ConfigError(
                "trainer.default_root_dir",
                f"{run_folder}, which holds {len(there)} checkpoint(s), the newest of step {there[-1].step}",
                "a new run folder, or a resume",
                "add --ckpt_path last, or name another --trainer.default_root_dir",
            )
    return ()


def _check_goes_on(verb: str, values: dict[str, Any], manifest: Manifest) -> None:
    """Raise ConfigError where a recipe cannot go on from a checkpoint, though its tensors would fit."""
    from lit_fsdp.config.model import ModelConfig
    from lit_fsdp.config.typed import build

    lora = build(ModelConfig, values.get("model"), "model").lora
    if lora is not None:
        lora.check_checkpoint(manifest)
    limit, step = values["trainer"].get("max_steps"), manifest.global_step
    if verb == "fit" and isinstance(limit, int) and 0 < limit < step:
        allowed = f"at least {step}, from which the run goes on"
        fix = f"set trainer.max_steps: {2 * step}, or give an earlier checkpoint"
        raise ConfigError("trainer.max_steps", f"{limit} with {manifest.folder}", allowed, fix)
