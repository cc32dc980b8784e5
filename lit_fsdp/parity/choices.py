"""The choices in which two recipes differ, and the way from one to the other, choice by choice.

A recipe is a flat mapping here, value by full key, with ``class_path`` and ``init_args`` for our own classes too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lit_fsdp.config.data import DEFAULT_BATCH, DataConfig
from lit_fsdp.config.model import ADAMW, ModelConfig
from lit_fsdp.config.parser import OWN_CLASSES, leaves
from lit_fsdp.config.run import STRATEGY
from lit_fsdp.parity.trace import Comparison, Trace, compare

Recipe = dict[str, Any]
MODEL, DATA, DEVICES, PRECISION = "model.init_args", "data.init_args", "trainer.devices", f"{STRATEGY}.precision"
_NAMES = {
    PRECISION: "precision",
    "trainer.precision": "precision",
    f"{MODEL}.attn_implementation": "attention",
    f"{MODEL}.loss": "loss backend",
    f"{DATA}.packing": "packing",
    f"{STRATEGY}.activation_checkpointing": "activation checkpointing",
    f"{STRATEGY}.compile": "compile",
    f"{DATA}.micro_batch_size": "accumulation",
    **{f"{STRATEGY}.{key}": "sharding" for key in ("sharding", "shard_degree", "replicate_degree", "cpu_offload")},
    DEVICES: "ranks",
    f"{STRATEGY}.engine": "engine",
}
"""In the order in which they are turned, after all others: one rank before the engine that takes only one."""
_SHARED = (
    "seed_everything",
    *(f"{MODEL}.{key}" for key in ("name", "tokenizer", "miniature", "trust_remote_code")),
    *(f"{DATA}.{key}" for key in ("train", "format", "columns", "val_split", "seed", "shuffle", "streaming")),
)
"""The model and the rows, which both sides have from the first recipe."""
_QUIET = {
    **{"trainer.logger": False, "trainer.enable_checkpointing": False, "trainer.enable_progress_bar": False},
    **{"trainer.profiler": None, "trainer.default_root_dir": None, "trainer.log_every_n_steps": 1},
    **{"trainer.limit_val_batches": 0, "trainer.val_check_interval": None, "trainer.check_val_every_n_epoch": 1},
    **{"samples.prompts": None, "ckpt_path": None},
    **{f"{DATA}.{split}": None for split in ("val", "test", "predict")},
}
"""What does not change how a recipe trains."""
_OFF = {
    **{"model.class_path": OWN_CLASSES["model"], "data.class_path": OWN_CLASSES["data"], "trainer.callbacks": None},
    **{PRECISION: "fp32", f"{MODEL}.attn_implementation": None, f"{MODEL}.neftune_alpha": None},
    **{f"{MODEL}.loss.backend": "plain", f"{MODEL}.loss.chunk_tokens": None, f"{MODEL}.lora.dropout": 0.0},
    **{f"{MODEL}.optim.optimizer": ADAMW, f"{MODEL}.optim.optimizer_args": None},
    **{f"{STRATEGY}.activation_checkpointing": "none", f"{STRATEGY}.compile": False, f"{STRATEGY}.cpu_offload": False},
    **{f"{STRATEGY}.sharding": "full_shard", f"{STRATEGY}.shard_degree": None, f"{STRATEGY}.replicate_degree": None},
    **{DEVICES: 1, f"{STRATEGY}.engine": "single"},
}
"""Nothing switched on that is a choice: what the plain loop does, by way of lit_fsdp."""


class RunRefused(Exception):
    """A run that did not come to its end, with what it said and its exit code."""


def flat(values: Mapping[str, Any]) -> Recipe:
    """A resolved recipe by full key, without what does not change how it trains."""
    found = {}
    for key, value in leaves(values):
        section, _, rest = key.partition(".")
        short = section in OWN_CLASSES and "class_path" not in values[section]
        found[f"{section}.init_args.{rest}" if short else key] = value
    steps, size = found.pop("trainer.accumulate_grad_batches", None), f"{DATA}.global_batch_size"
    if found.get(size, 0) is None:  # which must not change with the ranks
        found[size] = steps * found[f"{DATA}.micro_batch_size"] * num_ranks(found) if steps else DEFAULT_BATCH
    if type(found["seed_everything"]) is not int:
        found["seed_everything"] = 0
    return _replaced({f"{name}.class_path": path for name, path in OWN_CLASSES.items()} | found, _QUIET)


def nested(recipe: Recipe) -> dict[str, Any]:
    """The recipe as a file has it."""
    found: dict[str, Any] = {}
    for key, value in recipe.items():
        *parents, last = key.split(".")
        section = found
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    return found


def num_ranks(recipe: Recipe) -> int:
    """Processes of a recipe, all on this machine."""
    devices = recipe[DEVICES]
    return len(devices) if isinstance(devices, list) else int(devices)


def with_shared(recipe: Recipe, first: Recipe) -> Recipe:
    """The recipe with the model and the rows of the first one."""
    return _turned(recipe, first, [key for key in recipe | first if _is_in(key, _SHARED)])


def plain_side(recipe: Recipe) -> Recipe:
    """The recipe that comes nearest to the plain loop; of its classes' arguments only what ours take is kept."""
    found = _replaced(recipe, _OFF | {f"{DATA}.micro_batch_size": recipe.get(f"{DATA}.global_batch_size")})
    for section, own in ((MODEL, ModelConfig), (DATA, DataConfig)):
        known = [f"{section}.{field.name}" for field in dataclasses.fields(own)]
        found = {key: value for key, value in found.items() if not _is_in(key, [section]) or _is_in(key, known)}
    return found


def in_fp32(recipe: Recipe) -> Recipe:
    """The recipe computing in fp32; what it says of reductions alone holds."""
    if not any(_is_in(key, [STRATEGY]) for key in recipe):  # a strategy of Lightning
        return _replaced(recipe, {"trainer.precision": "32-true"})
    has_own = recipe.get(f"{PRECISION}.reduce_dtype")
    changes = {f"{PRECISION}.mode": "fp32", f"{PRECISION}.fp8_skip": None} if has_own else {PRECISION: "fp32"}
    return _replaced(recipe, changes)


def _is_in(key: str, sections: Iterable[str]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def _replaced(recipe: Recipe, changes: Recipe) -> Recipe:
    """The recipe with other values where it has any at, or below, these keys."""
    kept = {key: value for key, value in recipe.items() if not _is_in(key, changes)}
    return kept | {key: new for key, new in changes.items() if any(_is_in(one, [key]) for one in recipe)}


def _turned(recipe: Recipe, other: Recipe, keys: Iterable[str]) -> Recipe:
    kept = {key: value for key, value in recipe.items() if key not in keys}
    return kept | {key: other[key] for key in keys if key in other}


def differing(one: Recipe, other: Recipe) -> dict[str, list[str]]:
    """Keys in which two recipes differ, by choice, in the order in which they are turned."""
    keys = [
        key
        for key in one | other
        if _is_in(key, ("trainer", "model", "data")) and (key not in one or key not in other or one[key] != other[key])
    ]
    found: dict[str, list[str]] = {}
    for key in keys:
        parts = key.split(".")
        depth = 4 if key.startswith(f"{STRATEGY}.") else 2 if parts[0] == "trainer" else 3
        name = ".".join(parts[:depth])
        of_class = f"{parts[0]}.class_path"
        if of_class in keys and not (key in one and key in other):
            name = of_class  # an argument of a class goes with it
        found.setdefault(_NAMES.get(name, name.replace(".init_args", "")), []).append(key)
    order = [*(name for name in found if name not in _NAMES.values()), *dict.fromkeys(_NAMES.values())]
    return {name: found[name] for name in order if name in found}


@dataclass(frozen=True)
class Turn:
    """Two runs between which one choice was turned, or several of which none could be turned alone."""

    name: str
    before: str
    after: str
    found: Comparison


def turns(one: Recipe, other: Recipe, goal: Trace, run: Callable[[Recipe], Trace]) -> list[Turn]:
    """Go from one recipe to another, choice by choice, until a run is equal to the last one.

    What a choice makes differ is what its two neighboring runs differ by, so that all of it is found on the way.
    ``goal`` is the run of ``other``, or of the loop that it comes nearest to.
    """
    here, trace, found, left = one, run(one), [], differing(one, other)
    while left:
        for names in [*([name] for name in left), list(left)]:  # all at once where none can be turned alone
            keys = [key for name in names for key in left[name]]
            try:
                now = run(_turned(here, other, keys))
            except RunRefused:
                continue  # tried again later, as what only the other engine takes
            break
        else:
            break
        before, after = _text(one, keys), _text(other, keys)
        found.append(Turn(" + ".join(names), before, after, compare(trace, now)))
        here, trace, left = _turned(here, other, keys), now, {name: left[name] for name in left if name not in names}
        if compare(trace, goal).first is None:
            return found
    return [*found, Turn(" + ".join([*left, "all else"]), "lit_fsdp", "the plain loop", compare(trace, goal))]


def _text(recipe: Recipe, keys: list[str]) -> str:
    given = {key.rpartition(".")[2]: recipe[key] for key in keys if recipe.get(key) is not None}
    return ", ".join(str(value) if len(keys) == 1 else f"{name} {value}" for name, value in given.items()) or "-"
