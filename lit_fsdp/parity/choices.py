"""The choices in which two recipes differ, and how a recipe is turned from one towards the other."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lit_fsdp.config.data import DEFAULT_BATCH, DataConfig
from lit_fsdp.config.model import ADAMW, ModelConfig
from lit_fsdp.config.parser import OWN_CLASSES
from lit_fsdp.config.run import STRATEGY

MODEL, DATA, PRECISION = "model.init_args", "data.init_args", f"{STRATEGY}.precision"
_CLASS = "trainer.strategy.class_path"
_GROUPS = {
    "precision": (PRECISION,),
    "attention": (f"{MODEL}.attn_implementation",),
    "loss backend": (f"{MODEL}.loss",),
    "packing": (f"{DATA}.packing",),
    "activation checkpointing": (f"{STRATEGY}.activation_checkpointing",),
    "compile": (f"{STRATEGY}.compile",),
    "accumulation": (f"{DATA}.micro_batch_size", "trainer.accumulate_grad_batches"),
    "sharding": tuple(
        f"{STRATEGY}.{name}" for name in ("sharding", "shard_degree", "replicate_degree", "wrap", "cpu_offload")
    ),
    "ranks": ("trainer.devices", "trainer.num_nodes"),
    "engine": (f"{STRATEGY}.engine",),
}
"""Those with a name of their own, in the order in which they are turned: one rank before the engine that takes one."""
SHARED = (
    "seed_everything",
    *(f"{MODEL}.{name}" for name in ("name", "tokenizer", "miniature", "trust_remote_code")),
    *(f"{DATA}.{name}" for name in ("train", "format", "columns", "val_split", "seed", "shuffle", "streaming")),
)
"""The model and the rows, which both sides have from the first recipe."""
_QUIET = {
    "ckpt_path": None,
    "trainer.logger": False,
    "trainer.profiler": None,
    "trainer.enable_checkpointing": False,
    "trainer.enable_progress_bar": False,
    "trainer.limit_val_batches": 0,
    "samples.prompts": None,
    **{f"{DATA}.{name}": None for name in ("val", "test", "predict")},
}
"""What does not change how a recipe trains."""
PLAIN = {
    "model.class_path": OWN_CLASSES["model"],
    "data.class_path": OWN_CLASSES["data"],
    "trainer.callbacks": None,
    "trainer.num_nodes": 1,
    "trainer.devices": 1,
    PRECISION: "fp32",
    f"{STRATEGY}.engine": "single",
    f"{STRATEGY}.sharding": "full_shard",
    f"{STRATEGY}.shard_degree": None,
    f"{STRATEGY}.replicate_degree": None,
    f"{STRATEGY}.wrap": "auto",
    f"{STRATEGY}.cpu_offload": False,
    f"{STRATEGY}.activation_checkpointing": "none",
    f"{STRATEGY}.compile": False,
    f"{MODEL}.attn_implementation": None,
    f"{MODEL}.loss.backend": "plain",
    f"{MODEL}.loss.chunk_tokens": None,
    f"{MODEL}.loss.z_loss": 0.0,
    f"{MODEL}.loss.label_smoothing": 0.0,
    f"{MODEL}.neftune_alpha": None,
    f"{MODEL}.optim.optimizer": ADAMW,
    f"{MODEL}.optim.optimizer_args": None,
    f"{MODEL}.lora.dropout": 0.0,
}
"""A recipe that has switched nothing on, as far as that is a choice: what the plain loop does, by way of lit_fsdp."""


@dataclass(frozen=True)
class Choice:
    """One thing that two recipes do differently."""

    name: str
    before: str
    after: str
    changes: dict[str, Any]
    """Values by full key that make it the second recipe's; :data:`MISSING` takes a key away."""


MISSING = object()
"""In place of a value that a recipe does not have."""


def whole(values: Mapping[str, Any]) -> dict[str, Any]:
    """A resolved recipe with ``class_path`` and ``init_args`` for our own classes too, without what is not compared."""
    found = copy.deepcopy(dict(values))
    for name, path in OWN_CLASSES.items():
        if "class_path" not in found[name]:
            found[name] = {"class_path": path, "init_args": found[name]}
        found[name].setdefault("init_args", {})
    seed, trainer, data = found["seed_everything"], found["trainer"], found["data"]["init_args"]
    found["seed_everything"] = 0 if isinstance(seed, bool) or seed is None else seed
    if data.get("global_batch_size") is None and "micro_batch_size" in data:  # which must not change with the ranks
        devices = trainer["devices"]
        ranks = len(devices) if isinstance(devices, list) else int(devices)
        steps = trainer.get("accumulate_grad_batches")
        data["global_batch_size"] = steps * data["micro_batch_size"] * ranks if steps else DEFAULT_BATCH
    return turned(found, {key: value for key, value in _QUIET.items() if get(found, key) is not MISSING})


def get(values: Any, key: str) -> Any:
    """The value of a full key, or :data:`MISSING`."""
    for part in key.split("."):
        if not isinstance(values, Mapping) or part not in values:
            return MISSING
        values = values[part]
    return values


def turned(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a recipe with other values; sections that it does not have stay away."""
    found: dict[str, Any] = copy.deepcopy(dict(values))
    for key, value in changes.items():
        parent, _, last = key.rpartition(".")
        section = get(found, parent) if parent else found
        if isinstance(section, dict):
            section.pop(last, None)
            section.update({} if value is MISSING else {last: copy.deepcopy(value)})
    return found


def plain_side(values: Mapping[str, Any]) -> dict[str, Any]:
    """The whole recipe that comes nearest to the plain loop: of the recipe's classes only what ours take is kept."""
    found = turned(values, PLAIN)
    for name, own in (("model", ModelConfig), ("data", DataConfig)):
        known = {field.name for field in dataclasses.fields(own)}
        found[name]["init_args"] = {key: one for key, one in found[name]["init_args"].items() if key in known}
    return turned(found, {f"{DATA}.micro_batch_size": found["data"]["init_args"]["global_batch_size"]})


def in_fp32(values: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe computing in fp32; what it says of reductions alone holds."""
    given = get(values, PRECISION)
    reduce = given.get("reduce_dtype") if isinstance(given, Mapping) else None
    return turned(values, {PRECISION: {"mode": "fp32", "reduce_dtype": reduce} if reduce else "fp32"})


def choices(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[Choice]:
    """Where two whole recipes differ: arguments that only one of them has go with the class that takes them."""
    ours = get(one, _CLASS) == get(other, _CLASS)
    sections = ["trainer", *([STRATEGY] if ours else []), "model", MODEL, "data", DATA]
    keys = [f"{name}.{key}" for name in sections for values in (one, other) for key in get(values, name)]
    inner = {"trainer.strategy" if ours else "", MODEL, DATA}
    differing = [key for key in dict.fromkeys(keys) if key not in inner and get(one, key) != get(other, key)]
    groups: dict[str, list[str]] = {}
    for key in differing:
        section = key.partition(".")[0]
        only_one = MISSING in (get(one, key), get(other, key)) and f"{section}.class_path" in differing
        named = (name for name, members in _GROUPS.items() if key in members)
        title = f"{section}.class_path" if only_one else next(named, key.replace(".init_args", ""))
        groups.setdefault(title, []).append(key)
    order = [*(name for name in groups if name not in _GROUPS), *(name for name in _GROUPS if name in groups)]
    return [
        Choice(name, *_texts(one, other, groups[name]), {key: get(other, key) for key in groups[name]})
        for name in order
    ]


def _texts(one: Mapping[str, Any], other: Mapping[str, Any], keys: Sequence[str]) -> tuple[str, str]:
    """Both sides in short: of mappings only what differs, of several keys their names too."""
    shown: tuple[list[str], list[str]] = ([], [])
    for key in keys:
        values = get(one, key), get(other, key)
        is_mapping = all(isinstance(value, Mapping) for value in values)
        parts = {**values[0], **values[1]} if is_mapping else [""]
        for part in parts:
            sides = [value.get(part, MISSING) if is_mapping else value for value in values]
            if sides[0] != sides[1]:
                label = f"{part} " if part else f"{key.rpartition('.')[2]} " if len(keys) > 1 else ""
                for texts, side in zip(shown, sides, strict=True):
                    texts.append(label + _short(side))
    return ", ".join(shown[0]), ", ".join(shown[1])


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_short(one)}" for key, one in value.items() if one is not None) + "}"
    return "-" if value is MISSING or value is None else str(value)
