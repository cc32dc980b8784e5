"""Random recipes for the fuzz test: mostly right ones, then bent in the ways people and machines bend them."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import math
import random
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, Union

from lit_fsdp.config.data import DataConfig
from lit_fsdp.config.model import ModelConfig
from lit_fsdp.config.run import FACTORY, CheckpointConfig, ResumeConfig
from lit_fsdp.config.slurm import SlurmConfig
from lit_fsdp.config.strategy import StrategyConfig
from lit_fsdp.errors import ConfigError

SECTIONS: dict[str, type] = {
    **{"model": ModelConfig, "data": DataConfig},
    **{"checkpoint": CheckpointConfig, "resume": ResumeConfig, "slurm": SlurmConfig},
}
CANARY = "fuzz_untrusted_canary"
UNTRUSTED = (
    f"{CANARY}.Logger",
    "os.system",
    "subprocess.Popen",
    "builtins.eval",
    "builtins.exec",
    "antigravity.fly",
    "this.s",
    "turtle.Turtle",
    "wsgiref.simple_server.make_server",
    "lit_fsdp.errors.ConfigError",
    "torch.hub.load",
    "lightning.pytorch.Trainer",
    "..os.system",
    "__import__('os').system",
    "☃.❄",
    "",
)
_ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, -2, 3, 8, 10**30, -(10**30), 2**63, 0.5, 1.0, 2.5, -0.0, 1e-400, 1e308),
    *(math.nan, math.inf, -math.inf, "nan", "inf", "1e-4", "1_000", "0x10", "08", "12:30", "yes", "null", "None"),
    *(
        "",
        " ",
        "\n",
        "\x00",
        "☃",
        "ＦＳＤＰ2",
        "fsdp2 ",
        "FSDP2",
        "full",
        "auto",
        "a" * 3000,
        "../../etc/passwd",
        "${HOME}",
    ),
    *([], [None], [[]], [1, "a"], ["☃"], {}, {"": 1}, {"a": {"b": {}}}, {1: 2}, {None: None}, {True: "x"}, (1, 2)),
    *(b"bytes", {"a", "b"}, datetime.date(2020, 1, 1), datetime.datetime(2020, 1, 1, 12)),
    *({"class_path": path} for path in UNTRUSTED[:4]),
    *({"mode": "mixed"}, {"mode": []}, {"mode": {"mode": "full"}}, {"classes": "Block"}, {"patterns": ["a..b", "*"]}),
)
_WORDS = ("rows.jsonl", "LlamaDecoderLayer", "model.layers.*.mlp", "gloo", "nccl", "aten.mm", "lm_head", "val_loss")
_TRAINER: dict[str, tuple[Any, ...]] = {
    "devices": (1, 2, 3, 4, 5, 6, 7, 8, "auto", [0, 1], "2", -1, 0),
    "num_nodes": (1, 2, 4, 0, "2"),
    "max_steps": (1, 60, -1, "60", 2.5),
    "max_epochs": (1, 2, -1, None),
    "max_time": ("00:01:00:00", None, {"hours": 1}),
    "accelerator": ("cpu", "auto", "cup", None),
    "precision": ("32-true", "bf16-mixed", 16, None),
    "gradient_clip_val": (1.0, 0, "1.0", -1),
    "accumulate_grad_batches": (1, 2, 3, None, "2", {4: 2}),
    "limit_train_batches": (1.0, 1, 0.5, None, "1.0"),
    "limit_val_batches": (2, 0.5, 1.0),
    "overfit_batches": (0, 0.0, 2, 0.5),
    "fast_dev_run": (False, True, 2),
    "val_check_interval": (1.0, 4, 0.25),
    "default_root_dir": ("runs/x", None),
    "enable_checkpointing": (True, False),
    "logger": (False, True, *({"class_path": path} for path in UNTRUSTED)),
    "callbacks": (None, [], *([{"class_path": path, "init_args": {"command": "true"}}] for path in UNTRUSTED)),
    "plugins": (None, *({"class_path": path} for path in UNTRUSTED[:6])),
    "profiler": (None, "simple", *({"class_path": path} for path in UNTRUSTED[:6])),
}


def random_recipe(rng: random.Random) -> dict[str, Any]:
    """A recipe that is right in about one of three cases, with zero to three things bent."""
    values = _right_recipe(rng)
    for _ in range(rng.choice((0, 0, 0, 0, 1, 1, 2, 3))):
        _bend(values, rng)
    return values


def refusal_of(attempt: Callable[[], Any], what: Any) -> ConfigError | None:
    """The ConfigError of an attempt, if it raises one; anything else that it raises fails the test with ``what``."""
    try:
        attempt()
    except ConfigError as error:
        return error
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error}\n{what!r}") from error
    return None


def lacking(error: ConfigError) -> list[str]:
    """The parts that this error should have and has not."""
    parts = {"field": error.field, "allowed": error.allowed, "fix": error.fix}
    return [name for name, part in parts.items() if not str(part).strip()]


def leaves(values: Mapping[Any, Any], path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every key with its value, mappings and what is inside them."""
    for key, value in values.items():
        yield (*path, key), value
        if isinstance(value, Mapping):
            yield from leaves(value, (*path, key))


def is_visible(given: Any, resolved: Any) -> bool:
    """Whether a value of a recipe is what the resolved configuration holds; a number and its text are the same."""
    if isinstance(given, Mapping):
        if dataclasses.is_dataclass(resolved):
            resolved = {field.name: getattr(resolved, field.name) for field in dataclasses.fields(resolved)}
        return isinstance(resolved, Mapping) and all(
            k in resolved and is_visible(v, resolved[k]) for k, v in given.items()
        )
    if isinstance(given, (list, tuple)):
        same = isinstance(resolved, (list, tuple)) and len(given) == len(resolved)
        return same and all(is_visible(a, b) for a, b in zip(given, resolved, strict=True))
    if isinstance(given, bool) or isinstance(resolved, bool) or given is None or resolved is None:
        return given is resolved
    if isinstance(resolved, (int, float)) and isinstance(given, (int, float, str)):
        return given == resolved or float(given) == resolved
    if isinstance(given, (int, float)) and isinstance(resolved, str):
        return str(given) == resolved
    return bool(given == resolved) and isinstance(given, str) == isinstance(resolved, str)


def _right_recipe(rng: random.Random) -> dict[str, Any]:
    ranks, nodes, micro = rng.randint(1, 8), rng.choice((1, 1, 1, 2)), rng.choice((1, 2))
    keys = typing.get_type_hints(StrategyConfig)
    chosen = rng.sample(sorted(keys), rng.choice((0, 1, 1, 2, 2, 3, 6)))
    values: dict[str, Any] = {
        "trainer": {
            "devices": ranks,
            "num_nodes": nodes,
            "max_steps": rng.choice((1, 60, 1000)),
            "strategy": {"class_path": FACTORY, "init_args": {key: _value(keys[key], rng) for key in chosen}},
        },
        "model": {"name": "some/model", **_some(ModelConfig, rng, 2), "miniature": rng.random() < 0.3},
        "data": {
            "train": "rows.jsonl",
            **_some(DataConfig, rng, 2),
            "micro_batch_size": micro,
            "global_batch_size": micro * ranks * nodes * rng.choice((1, 2, 3)),
        },
        "checkpoint": _some(CheckpointConfig, rng, 2),
        "resume": _some(ResumeConfig, rng, 2),
        "slurm": _some(SlurmConfig, rng, 2),
    }
    if rng.random() < 0.2:
        values["seed_everything"] = rng.choice((0, 1234, True))
    return values


def _some(cls: type, rng: random.Random, most: int) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {
        name: _value(hints[name], rng) for name in rng.sample(sorted(hints), rng.randint(0, most)) if name != "name"
    }


def _value(hint: Any, rng: random.Random) -> Any:
    """A value of this type; not every one of them obeys the rules of its field."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return _value(rng.choice(args), rng)
    if origin is Literal:
        return rng.choice(args)
    if origin is dict:
        return {rng.choice(("A", "prompt", "messages")): _value(args[1], rng)}
    if origin is list:
        return [_value(args[0], rng) for _ in range(rng.randint(1, 2))]
    if dataclasses.is_dataclass(hint):
        return _some(typing.cast(type, hint), rng, 3)
    plain = {
        bool: (True, False),
        int: (1, 1, 2, 2, 4, 8, -1, 3),
        float: (0.0, 0.1, 0.5, 0.9, 1.0, 1e-5, "1e-4", 30.0),
        str: _WORDS,
        type(None): (None,),
        dict: ({"model_type": "llama"},),
    }
    return rng.choice(plain[hint])


def _bend(values: dict[str, Any], rng: random.Random) -> None:
    """One thing wrong, or only strange, in place."""
    places = [(path, value) for path, value in leaves(values) if len(path) > 0]
    if not places:
        return
    path, value = rng.choice(places)
    parent = values
    for key in path[:-1]:
        parent = parent[key]
    key = path[-1]
    mappings = [values, *(v for _, v in places if isinstance(v, dict))]
    kind = rng.randrange(8)
    if kind == 0:
        parent[key] = copy.deepcopy(rng.choice(_ODD))
    elif kind == 1 and isinstance(key, str):
        parent[_misspelt(key, rng)] = parent.pop(key)
    elif kind == 2 and isinstance(key, str):
        parent[key[: max(1, len(key) - rng.randint(1, 4))]] = parent.pop(key)
    elif kind == 3:
        rng.choice(mappings)[key] = copy.deepcopy(value)  # the right key in the wrong place
    elif kind == 4:
        rng.choice(mappings)[rng.choice((1, None, True, 2.5, "", "☃", "class_path", "a.b", (1, 2)))] = 1
    elif kind == 5 and isinstance(values.get("trainer"), dict):
        name = rng.choice(sorted(_TRAINER))
        values["trainer"][name] = copy.deepcopy(rng.choice(_TRAINER[name]))
    elif kind == 6:
        values["trainer"] = {
            **_TRAINER_BASE,
            "strategy": rng.choice((*UNTRUSTED, {"class_path": rng.choice(UNTRUSTED)})),
        }
    else:
        name = rng.choice(("trainer", "model", "data", "checkpoint", "resume", "seed_everything", "ckpt_path", "lr"))
        values[name] = copy.deepcopy(rng.choice(_ODD))


_TRAINER_BASE = {"devices": 2, "max_steps": 4}


def _misspelt(key: str, rng: random.Random) -> str:
    at = rng.randrange(max(1, len(key)))
    return rng.choice(
        (key[:at] + key[at + 1 :], key[:at] + key[at : at + 1] + key[at:], key.upper(), key.replace("_", "-"))
    )


def with_classes(values: dict[str, Any], rng: random.Random) -> str:
    """Let a recipe name a class that it may not name where the Trainer takes one; returns its path."""
    name = rng.choice(("logger", "callbacks", "plugins", "profiler"))
    path = rng.choice(UNTRUSTED)
    given: dict[str, Any] = {"class_path": path, "init_args": rng.choice(({}, {"command": "true"}, {"args": ["true"]}))}
    # profiler and plugins take words too, which are text until the Trainer looks them up in its own registry
    values["trainer"][name] = rng.choice((given, [given]) if name in ("profiler", "plugins") else (given, path, [path]))
    return path
