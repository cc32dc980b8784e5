"""Files of a model that a checkpoint keeps besides tensors, so that it can be exported on its own."""

import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import custom_object_save, get_relative_import_files

from lit_fsdp.errors import require
from lit_fsdp.host import json_bytes
from lit_fsdp.models.hub import reading
from lit_fsdp.models.tokenizers import end_of_turn_id, pad_id
from lit_fsdp.models.weights import ModelSource

GENERATION = "generation_config.json"
"""File name of the generation config."""
_KEPT = "leave out values that cannot be written to a file: every checkpoint saves them"


def model_files(
    source: ModelSource, tokenizer: PreTrainedTokenizerBase, model: nn.Module | None = None
) -> dict[str, bytes]:
    """Return config, generation config, tokenizer, chat template and custom code of a model folder, under ``hf/``.

    The generation config is copied from ``source``, valid for transformers or not, else taken from its config or the
    live ``model``. If it has no pad token it gets the tokenizer's, and the template's end of a turn is added to its end
    tokens, because a fine-tuned model ends its answers with that token. The file ``config.json`` keeps its
    ``pad_token_id``, whose embedding row gets no gradient.

    Raises:
        ConfigError: The config or the tokenizer cannot be saved, or the generation config is not a JSON object.
    """
    generation = generation_values(source.weights_folder, getattr(model, "generation_config", None))
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        with reading(type(source.hf_config).__name__, fix=_KEPT):
            (folder / "config.json").write_bytes(_config_bytes(source.hf_config, folder))
            for code in _code_of(model):
                shutil.copyfile(code, folder / code.name)
        with reading(f"tokenizer {source.tokenizer_source}", "model.tokenizer", _KEPT):
            tokenizer.save_pretrained(folder)
        if generation is not None:
            if generation.get("pad_token_id") is None:
                generation["pad_token_id"] = pad_id(tokenizer, source.num_embeddings)
            given, turn = generation.get("eos_token_id"), end_of_turn_id(tokenizer)
            stops = given if isinstance(given, list) else [] if given is None else [given]
            if turn is not None and turn not in stops:
                generation["eos_token_id"] = [*stops, turn] if stops else turn
            (folder / GENERATION).write_bytes(json_bytes(generation))
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        return {f"hf/{path.relative_to(folder)}": path.read_bytes() for path in files}


def generation_values(folder: Path | None, live: GenerationConfig | None) -> dict[str, Any] | None:
    """Generation config of the model in ``folder``, else of the ``live`` model; None if it does not generate.

    Handled as plain JSON, because transformers cannot read or save all published files.
    """
    if folder is not None and (folder / GENERATION).is_file():
        return _json_object(folder / GENERATION)
    if live is None:
        return None
    stored = _json_object(folder / "config.json") if folder is not None else {}
    # older models have sampling values in config.json, which a loaded config drops
    own = {key: stored[key] for key in GenerationConfig().to_dict() if stored.get(key) is not None}
    with reading("its generation config", fix=_KEPT):
        return {**json.loads(live.to_json_string()), **own}


def _json_object(path: Path) -> dict[str, Any]:
    with reading(path):
        values = json.loads(path.read_bytes())
    require(isinstance(values, dict), "model.name", f"{path} with {type(values).__name__}", "a JSON object")
    return dict(values)


def _code_of(model: nn.Module | None) -> set[Path]:
    """Python files of a model with custom code, wrapped by an engine or not, and those that they import."""
    classes = {base for module in (() if model is None else model.modules()) for base in type(module).__mro__}
    modules = {one.__module__ for one in classes if vars(one).get("_auto_class")} - {"__main__"}
    found: set[Path] = set()
    for file in (str(sys.modules[name].__file__) for name in modules):
        try:
            found |= {Path(one) for one in (file, *get_relative_import_files(file))}
        except FileNotFoundError:  # transformers takes imports within a package for files beside this one
            found.add(Path(file))
    return {path for path in found if path.is_file()}


def _config_bytes(config: PretrainedConfig, folder: Path) -> bytes:
    """``config.json``; custom code goes into ``folder``. Not ``save_pretrained``, whose validation may refuse it."""
    if config._auto_class is not None:
        custom_object_save(config, folder, config=config)  # type: ignore[arg-type]
    values = json.loads(config.to_json_string())
    values.pop("transformers_weights", None)  # names a file of the base
    return json_bytes(values)


def model_entry(
    source: ModelSource,
    ties: dict[str, str],
    adapter_config: dict[str, Any] | None,
    kept_with_adapter: Sequence[str] = (),
    base: dict[str, Any] | None = None,
    experts: dict[str, list[str]] | None = None,
) -> dict[str, Any]:
    """The ``model`` entry of a checkpoint's manifest: how the tensors map to the transformers model.

    The ``ties`` are names inside the LightningModule; the tensors ``kept_with_adapter`` are exported with the adapters;
    the ``experts`` are :attr:`lit_fsdp.models.weights.Weights.experts_apart`.
    """
    return {
        "prefix": "model.",
        "tied": {a.removeprefix("model."): b.removeprefix("model.") for a, b in ties.items()},
        "base": base,
        "hub_name": source.hub_name,
        "adapter": adapter_config,
        "kept_with_adapter": list(kept_with_adapter),
        "experts": experts or {},
    }
