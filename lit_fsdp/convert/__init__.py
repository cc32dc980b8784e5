"""Convert configurations of other libraries to recipes, and report the result for every key; without torch."""

import shlex
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lit_fsdp.config.parser import load_recipe
from lit_fsdp.config.run import FACTORY, STRATEGY
from lit_fsdp.convert.accelerate import convert_accelerate
from lit_fsdp.convert.axolotl import convert_axolotl
from lit_fsdp.convert.conversion import Conversion, Given, read_mapping
from lit_fsdp.convert.deepspeed import convert_deepspeed, put_ranks
from lit_fsdp.convert.hf_trainer import convert_hf_trainer
from lit_fsdp.convert.torchtune import convert_torchtune
from lit_fsdp.errors import ConfigError, require

_CONVERTERS: dict[str, Callable[[Conversion, dict[str, Any], Path, int | None], None]] = {
    "accelerate": convert_accelerate, "hf-trainer": convert_hf_trainer, "deepspeed": convert_deepspeed,
    "axolotl": convert_axolotl, "torchtune": convert_torchtune,
}  # fmt: skip
"""Each takes the recipe, the values of a file, the folder of further files, and the ranks, if known."""
FORMATS = tuple(_CONVERTERS)
_NEEDED = (
    "model.name", "data.train", "data.max_seq_length", "data.global_batch_size data.micro_batch_size", "model.optim.lr",
    "trainer.max_steps trainer.max_epochs",
)  # fmt: skip
_MARKS = {
    "accelerate": "distributed_type compute_environment",
    "hf-trainer": "per_device_train_batch_size model_name_or_path num_train_epochs",
    "deepspeed": "zero_optimization train_micro_batch_size_per_gpu",
    "axolotl": "base_model sequence_len",
    "torchtune": "model._component_ dataset._component_ tokenizer._component_",
}
"""Keys that only files of this format have."""
_OF_LLAMA_FACTORY = {"stage", "finetuning_type", "template", "cutoff_len", "lora_rank", "lora_target", "dataset_dir"}
_ONE_NODE = {"hybrid_shard": "full_shard", "hybrid_shard_zero2": "shard_grad_op"}


def convert_file(kind: str, path: Path, ranks: int | None = None, num_nodes: int = 1) -> Conversion:
    """Convert a configuration file to a recipe, with a report for each of its keys.

    The arguments ``ranks`` and ``num_nodes`` describe the run; only Accelerate files contain them.

    Raises:
        ConfigError: The file cannot be read, the library would not accept a value, or values conflict.
    """
    fix = "write the arguments that the script sets into a YAML file, by their names"
    require(path.suffix != ".py", "file", f"{path}, a script", "a YAML or JSON file", fix)
    values, conversion = read_mapping("file", str(path)), Conversion()
    _check_format(kind, path, values)
    if kind != "accelerate":
        put_ranks(conversion, ranks, num_nodes)
    _CONVERTERS[kind](conversion, values, path.parent, ranks)
    _finish(conversion)
    missing = [" or ".join(paths.split()) for paths in _NEEDED if not any(map(conversion.get, paths.split()))]
    autos = dict.fromkeys(fate.key for fate in conversion.fates if "(auto: " in fate.text)
    conversion.to_give += [f"Set {', '.join(missing)}: missing in the input."] if missing else []
    conversion.to_give += [f"Check the values that replace auto in {', '.join(autos)}."] if autos else []
    _check(conversion)
    places = {str(key): place for place, key in enumerate(values)}
    conversion.fates.sort(key=lambda fate: places.get(fate.key.partition(".")[0], len(places)))
    return conversion


def _check_format(kind: str, path: Path, values: dict[str, Any]) -> None:
    """Refuse a file that has keys of another format and none of this one."""
    sections = {key: value for key, value in values.items() if isinstance(value, dict)}
    keys = {*map(str, values), *(f"{key}.{inner}" for key, section in sections.items() for inner in section)}
    found = {name: sorted(keys.intersection(marks.split())) for name, marks in _MARKS.items()}
    foreign = sorted(_OF_LLAMA_FACTORY.intersection(keys))
    given = f"{path}, with {', '.join(foreign)}, which looks like LLaMA-Factory's configuration"
    fix = "rename its keys to those of TRL (cutoff_len to max_length, lora_rank to lora_r) and use hf-trainer"
    require(len(foreign) < 2, "file", given, f"a file of {' | '.join(FORMATS)}", fix)
    likely = max(found, key=lambda name: len(found[name]))
    given = f"{path}, with {', '.join(found[likely])}, as files of {likely} have"
    fix = f"write lit-fsdp convert {likely} {shlex.quote(str(path))}"
    require(found[kind] or not found[likely], f"lit-fsdp convert {kind}", given, f"a file of {kind}", fix)


def _finish(conversion: Conversion) -> None:
    """Use fsdp2 where fsdp1 does not support the settings, and hybrid sharding only with several copies."""
    strategy, sharding = conversion.get(STRATEGY), conversion.get("sharding")
    offloads = strategy.get("cpu_offload") and (conversion.get("trainer.accumulate_grad_batches") or 1) > 1
    for why, applies in (("a 4-bit base", conversion.get("model.lora.quantize")),
                         ("offload with several micro-batches per step", offloads)):  # fmt: skip
        if applies and strategy.get("engine") == "fsdp1":
            strategy.update(engine="fsdp2", backward_prefetch="pre")
            key = conversion.by.get(f"{STRATEGY}.engine", "engine (fsdp1 by default)")
            words = f"replaced by engine: fsdp2 (fsdp1 does not support {why})"
            conversion.replace(Given(key, None), "engine: fsdp1", words)
    if strategy.get("replicate_degree", 1) > 1:
        strategy["sharding"] = "hybrid_shard" if sharding == "full_shard" else "hybrid_shard_zero2"
    elif sharding in _ONE_NODE and conversion.get("trainer.num_nodes") == 1:
        strategy["sharding"] = _ONE_NODE[sharding]
        given = Given(conversion.by[f"{STRATEGY}.sharding"], sharding)
        conversion.say(given, f"replaced by sharding: {_ONE_NODE[sharding]} ({sharding} has one copy per node)")
    for field in ("precision", "activation_checkpointing"):
        if list(strategy.get(field, ())) == ["mode"]:
            strategy[field] = strategy[field]["mode"]
    conversion.recipe["trainer"]["strategy"] = {"class_path": FACTORY, "init_args": strategy}


def _check(conversion: Conversion) -> None:
    """Check the recipe like ``audit``, without fields that only a run needs; errors name the input's key."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "recipe.yaml"
        flags = [] if conversion.get("model.name") else ["--model.name", "unnamed"]
        file.write_text(conversion.as_yaml("a file"), encoding="utf-8")
        try:
            load_recipe(["--config", str(file), *flags], "audit")
        except ConfigError as error:
            key = next((key for path, key in conversion.by.items() if error.field.startswith(path)), None)
            if key is None:
                raise
            fix = f"change {key}" + (f" (in the recipe: {error.fix})" if error.fix else "")
            raise ConfigError(key, f"{error.given} as {error.field}", error.allowed, fix) from None
