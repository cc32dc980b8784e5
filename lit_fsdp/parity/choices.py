"""Settings in which two recipes differ, and runs that change one recipe to the other, one setting at a time.

Here a recipe is a flat mapping from full key to value, with ``class_path`` and ``init_args`` also for our own classes.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jsonargparse import Namespace

from lit_fsdp.config.command_line import OWN_CLASSES
from lit_fsdp.config.data import DEFAULT_BATCH, DataConfig
from lit_fsdp.config.model import ADAMW, ModelConfig
from lit_fsdp.config.run import STRATEGY
from lit_fsdp.config.sections import leaves
from lit_fsdp.parity.trace import Comparison, Trace, compare

Recipe = dict[str, Any]
MODEL, DATA, DEVICES = "model.init_args", "data.init_args", "trainer.devices"
_SHARED = (
    "seed_everything",
    *(f"{MODEL}.{key}" for key in ("name", "tokenizer", "miniature", "trust_remote_code")),
    *(f"{DATA}.{key}" for key in ("train", "format", "columns", "turns", "seed", "shuffle", "streaming")),
    *(f"{DATA}.{key}" for key in ("val", "val_split", "test", "predict")),
    *(f"trainer.{key}" for key in ("profiler", "default_root_dir", "val_check_interval", "check_val_every_n_epoch")),
)
"""Model, rows, and keys that do not affect training: both sides use those of the first recipe."""
_NONE = ("attn_implementation", "neftune_alpha", "loss.chunk_tokens", "optim.optimizer_args")
_OFF = {
    "trainer.callbacks": None,
    f"{STRATEGY}.precision": "fp32",
    **{f"{MODEL}.{key}": None for key in _NONE},
    f"{MODEL}.loss.backend": "plain",
    f"{MODEL}.lora.dropout": 0.0,
    f"{MODEL}.optim.optimizer": ADAMW,
    f"{STRATEGY}.activation_checkpointing": "none",
    f"{STRATEGY}.compile": False,
    f"{STRATEGY}.cpu_offload": False,
    f"{STRATEGY}.sharding": "full_shard",
    f"{STRATEGY}.shard_degree": None,
    f"{STRATEGY}.replicate_degree": None,
    DEVICES: 1,
    f"{STRATEGY}.engine": "single",
}
"""All optional features off: the settings of lit_fsdp that match the plain loop."""


class RunRefused(Exception):
    """A failed run, with its error."""


def flat(values: Mapping[str, Any]) -> Recipe:
    """Flatten a resolved recipe by full key; devices and the global batch (independent of devices) become numbers."""
    found = {}
    for key, value in leaves(values):
        section, _, rest = key.partition(".")
        short = section in OWN_CLASSES and "class_path" not in values[section]
        found[f"{section}.init_args.{rest}" if short else key] = value
    if found[DEVICES] in ("auto", -1):
        found[DEVICES] = max(1, torch.cuda.device_count())
    steps, size = found.pop("trainer.accumulate_grad_batches", None), f"{DATA}.global_batch_size"
    if found.get(size, 0) is None:
        ranks = len(found[DEVICES]) if isinstance(found[DEVICES], list) else found[DEVICES]
        found[size] = steps * found[f"{DATA}.micro_batch_size"] * ranks if steps else DEFAULT_BATCH
    if type(found["seed_everything"]) is not int:
        found["seed_everything"] = 0
    return {f"{name}.class_path": path for name, path in OWN_CLASSES.items()} | found


def nested(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe as nested mappings, as in a file."""
    found = Namespace()
    for key, value in recipe.items():
        found[key] = value
    return found.as_dict()


def with_shared(recipe: Recipe, first: Recipe) -> Recipe:
    """Return the recipe with the model and the rows of the first recipe."""
    return _turned(recipe, first, [key for key in recipe | first if _is_in(key, _SHARED)])


def plain_side(recipe: Recipe) -> Recipe:
    """Return the recipe closest to the plain loop, with only those class arguments that our own classes take."""
    changes = _OFF | {f"{DATA}.micro_batch_size": recipe.get(f"{DATA}.global_batch_size")}
    kept = {key: value for key, value in recipe.items() if not _is_in(key, changes)}
    found = kept | {key: new for key, new in changes.items() if any(_is_in(one, [key]) for one in recipe)}
    for section, own in (("model", ModelConfig), ("data", DataConfig)):
        known = [f"{section}.init_args.{field.name}" for field in dataclasses.fields(own)]
        found = {key: value for key, value in found.items() if not _is_in(key, [section]) or _is_in(key, known)}
        found[f"{section}.class_path"] = OWN_CLASSES[section]
    return found


def _is_in(key: str, sections: Iterable[str]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def _turned(recipe: Recipe, other: Recipe, keys: Iterable[str]) -> Recipe:
    kept = {key: value for key, value in recipe.items() if key not in keys}
    return kept | {key: other[key] for key in keys if key in other}


def differing(one: Recipe, other: Recipe) -> dict[str, list[str]]:
    """Return the keys in which two recipes differ, grouped by choice.

    A choice is a key of the Trainer, of the strategy or of a class, with all nested keys. Degrees and offload belong to
    the sharding; arguments that only one of two classes has belong to the class.
    """
    keys = [key for key in one | other if key not in one or key not in other or one[key] != other[key]]
    found: dict[str, list[str]] = {}
    for key in sorted(keys, key=lambda key: key.startswith("trainer.")):  # last, because they are rarely the reason
        section, *rest = key.split(".")
        if section not in ("trainer", "model", "data"):
            continue
        depth = 3 if key.startswith(f"{STRATEGY}.") else 1 if section == "trainer" else 2
        name = ".".join([section, *rest[:depth]]).replace(".init_args", "")
        if f"{section}.class_path" in keys and not (key in one and key in other):
            name = f"{section}.class_path"
        if rest[-1] in ("shard_degree", "replicate_degree", "cpu_offload"):
            name = "trainer.strategy.sharding"
        found.setdefault(name, []).append(key)
    return found


@dataclass(frozen=True)
class Turn:
    """Two runs between which one choice, or all remaining choices, changed."""

    name: str
    before: str
    after: str
    found: Comparison


def turns(one: Recipe, other: Recipe, goal: Trace, run: Callable[[Recipe], Trace]) -> list[Turn]:
    """Change one recipe to another, choice by choice, until a run equals the last run.

    The effect of a choice is the difference between its two consecutive runs, so that every effect is found. A rejected
    choice is retried later: for example, an engine for a single rank only works after the change to one rank. The
    ``goal`` is the run of ``other``, or of the plain loop closest to it.
    """
    here, trace, found, left = one, run(one), [], differing(one, other)
    waiting = list(left)
    while waiting and compare(trace, goal).first is not None:
        name = waiting.pop(0)
        turned = _turned(here, other, left[name])
        try:
            now = run(turned)
        except RunRefused:
            continue
        keys = left.pop(name)
        found.append(Turn(name, _text(one, keys), _text(other, keys), compare(trace, now)))
        here, trace, waiting = turned, now, list(left)
    last = compare(trace, goal)
    return found if last.first is None else [*found, Turn(" + ".join([*left, "all else"]), "", "", last)]


def _text(recipe: Recipe, keys: list[str]) -> str:
    return ", ".join(f"{key.rpartition('.')[2]} {recipe[key]}" for key in keys if recipe.get(key) is not None)
