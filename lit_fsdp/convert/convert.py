"""One file of another library as a recipe; torch is not imported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lit_fsdp.config.data import DataConfig, accumulation_steps
from lit_fsdp.config.model import ModelConfig
from lit_fsdp.config.run import CheckpointConfig
from lit_fsdp.config.strategy import mesh_shape, strategy_config
from lit_fsdp.config.typed import build
from lit_fsdp.convert.accelerate import convert_accelerate
from lit_fsdp.convert.deepspeed import convert_deepspeed
from lit_fsdp.convert.deepspeed_auto import defaults
from lit_fsdp.convert.hf_trainer import convert_hf_trainer
from lit_fsdp.convert.read import read_mapping
from lit_fsdp.convert.result import STRATEGY, Conversion
from lit_fsdp.errors import ConfigError

FORMATS = ("accelerate", "hf-trainer", "deepspeed")
_STRATEGY_ORDER = ("engine", "sharding", "shard_degree", "replicate_degree", "wrap", "precision",
                   "activation_checkpointing", "compile", "cpu_offload", "backward_prefetch", "forward_prefetch",
                   "limit_all_gathers", "sync_module_states", "cpu_ram_efficient_loading", "nonfinite_gradients",
                   "process_group_backend", "timeout_seconds", "state_dict")  # fmt: skip
_DEFAULTS = {"backward_prefetch": "pre", "forward_prefetch": False, "limit_all_gathers": True, "compile": False,
             "cpu_offload": False, "sync_module_states": True, "cpu_ram_efficient_loading": True}  # fmt: skip


def convert_file(kind: str, path: Path, ranks: int | None = None, num_nodes: int = 1) -> Conversion:
    """The recipe of a configuration file, and what became of each of its keys.

    Args:
        kind: ``accelerate``, ``hf-trainer`` or ``deepspeed``.
        path: YAML or JSON; ``-`` is standard input.
        ranks: Ranks of the run, which the files of Transformers and DeepSpeed do not hold.
        num_nodes: Nodes of the run, for the same two.

    Raises:
        ConfigError: The file cannot be read, a value is none the library accepts, or values do not go together.
    """
    values = read_mapping(path)
    conversion = Conversion()
    if kind == "accelerate":
        if ranks or num_nodes != 1:
            raise ConfigError("--ranks", ranks or num_nodes, "nothing: num_processes is in the file", "drop it")
        convert_accelerate(conversion, values, path.parent)
    elif kind == "hf-trainer":
        convert_hf_trainer(conversion, values, path.parent, ranks, num_nodes)
    else:
        _deepspeed_alone(conversion, values, ranks, num_nodes)
    conversion.say_empty(values)
    _complete(conversion)
    try:
        _check(conversion)
    except ConfigError as error:
        raise _in_words_of_the_input(conversion, error) from None
    return conversion


def _deepspeed_alone(conversion: Conversion, values: dict[str, Any], ranks: int | None, num_nodes: int) -> None:
    if ranks and ranks % num_nodes:
        raise ConfigError("--ranks", f"{ranks} on {num_nodes} nodes", f"a multiple of {num_nodes}", "mend --num_nodes")
    conversion.put("trainer.num_nodes", num_nodes)
    conversion.put("trainer.devices", ranks // num_nodes if ranks else "auto")
    convert_deepspeed(conversion, values, defaults(), ranks)
    if conversion.get("trainer.max_steps") is None:
        conversion.to_give.append("Set trainer.max_steps or max_epochs as your script does.")


def _complete(conversion: Conversion) -> None:
    given = dict(conversion.get(STRATEGY, {}))
    if given["engine"] in ("fsdp1", "fsdp2"):
        for field, value in _DEFAULTS.items():
            given.setdefault(field, value)
    given = {field: given[field] for field in _STRATEGY_ORDER if field in given}
    trainer = conversion.recipe["trainer"]
    trainer.pop("strategy")
    trainer["strategy"] = {"class_path": "lit_fsdp.fsdp_strategy", "init_args": given}
    missing = [f"{section}.{field}" for section, field in (("model", "name"), ("data", "train"))
               if conversion.get(f"{section}.{field}") is None]  # fmt: skip
    if missing:
        conversion.to_give.insert(0, f"Set {' and '.join(missing)}: the input does not name them.")


def _in_words_of_the_input(conversion: Conversion, error: ConfigError) -> ConfigError:
    """The error of the recipe with the key of the input that it is from."""
    key = conversion.source_of(error.field)
    if key is None:
        return error
    fix = f"mend {key} (in the recipe: {error.fix})"
    return ConfigError(key, f"{error.given} as {error.field}", error.allowed, fix)


def _check(conversion: Conversion) -> None:
    """The sections that are there must be right by the recipe's own rules."""
    recipe, trainer = conversion.recipe, conversion.recipe["trainer"]
    strategy = strategy_config(trainer["strategy"]["init_args"], STRATEGY)
    build(ModelConfig, recipe.get("model"), "model")
    data = build(DataConfig, recipe.get("data"), "data")
    build(CheckpointConfig, recipe.get("checkpoint"), "checkpoint")
    devices = len(trainer["devices"]) if isinstance(trainer["devices"], list) else trainer["devices"]
    if isinstance(devices, int):
        world = devices * trainer["num_nodes"]
        mesh_shape(strategy, trainer["num_nodes"], world, STRATEGY)
        if "global_batch_size" in recipe.get("data", {}):
            accumulation_steps(data.global_batch_size, data.micro_batch_size, world)
