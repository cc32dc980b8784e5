"""Adapters of ``peft`` on a model that is still on meta, and the values they start from.

The layers are peft's own and are put into the model in place: it stays a transformers model, so units, loss and
names are found as ever. Only names grow: ``q_proj.weight`` becomes ``q_proj.base_layer.weight`` beside
``q_proj.lora_A.default.weight``. The base is read under its old names, shard by shard.
"""

from __future__ import annotations

import difflib
import logging
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lit_fsdp.config.model import LoraConfig
from lit_fsdp.errors import ConfigError
from lit_fsdp.models.initial import seeded
from lit_fsdp.models.names import tied_groups
from lit_fsdp.models.weights import Weights

_log = logging.getLogger(__name__)
_PATH = "model.lora"
_ADAPTER = "default"
_ADAPTER_PARTS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")


class LoraWeights:
    """Where the tensors of a model with adapters come from: the base as ever, the adapters from (seed, name).

    ``A`` is random as a linear layer's weight is, ``B`` is zero, so that the first loss is the base model's. (In an
    embedding ``A`` is zero and ``B`` random, as in peft.) DoRA's lengths are those of the base weights.

    Args:
        base: The weights of the model before :func:`apply_lora`.
        model: After it, on meta and not wrapped yet.
        seed: Of random initialization.
    """

    def __init__(self, base: Weights, model: nn.Module, seed: int) -> None:
        self._base, self._seed = base, seed
        self._modules = dict(model.named_modules())

    def read(self, module_name: str, module: nn.Module, attribute: str, rows: slice | None = None) -> torch.Tensor:
        """As :meth:`lit_fsdp.models.weights.Weights.read`, by the names of the model with adapters."""
        layer, part = split_adapter(module_name)
        if part is None:
            return self._base.read(base_name(module_name), module, attribute, rows)
        if part == "lora_magnitude_vector":
            return self._lengths(layer, module, rows)
        shape = getattr(self._modules[module_name], attribute).shape
        values = torch.zeros(shape)
        with seeded(self._seed, module_name):
            if part == "lora_A":
                nn.init.kaiming_uniform_(values, a=math.sqrt(5))
            elif part == "lora_embedding_B":
                nn.init.normal_(values)
        return values if rows is None else values[rows].clone()

    def _lengths(self, layer: str, magnitude: Any, rows: slice | None) -> torch.Tensor:
        """2-norms of the base weight's rows, or of its columns where it is stored transposed."""
        base_layer = self._modules[f"{layer}.base_layer"]
        if magnitude.fan_in_fan_out:
            weight = self._base.read(layer, base_layer, "weight").float().T
            lengths = torch.linalg.norm(weight, dim=1)
            return lengths if rows is None else lengths[rows].clone()
        return torch.linalg.norm(self._base.read(layer, base_layer, "weight", rows).float(), dim=1)


def apply_lora(model: PreTrainedModel, config: LoraConfig, base: str | None = None) -> dict[str, Any]:
    """Freeze ``model`` and put adapters into it, in place.

    Args:
        model: On meta, in train mode.
        config: Which layers, how large.
        base: Hub name or folder of the base model, noted in the adapter's own configuration.

    Returns:
        The content of ``adapter_config.json``, from which peft builds the same adapters again.

    Raises:
        ConfigError: peft is missing, a name fits no layer, a layer shares its weight with another one, or an adapter
            would stand on single parameters (experts kept in one tensor).
    """
    peft = _peft()
    known = peft.utils.constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    targets = config.target_modules
    if targets is None and model.config.model_type not in known:
        targets = "all-linear"
    for field in ("target_modules", "modules_to_save"):
        names = getattr(config, field)
        _check_names(model, names if isinstance(names, list) else [], f"{_PATH}.{field}")
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        r=config.r,
        lora_alpha=int(config.alpha) if config.alpha == int(config.alpha) else config.alpha,
        lora_dropout=config.dropout,
        target_modules=targets,
        use_dora=config.use_dora,
        use_rslora=config.use_rslora,
        modules_to_save=config.modules_to_save,
        bias=config.bias,
    )
    try:
        _inject(model, settings)
    except (ValueError, NotImplementedError) as error:
        text = " ".join(str(error).split())[:200]
        raise _refused("target_modules", f"{config.target_modules} ({text})", _layer_names(model)) from error
    model.train()
    return _plain(settings)


def apply_saved_lora(model: PreTrainedModel, adapter_config: Mapping[str, Any]) -> Callable[[], PreTrainedModel]:
    """Put the adapters that ``adapter_config.json`` describes into ``model``, in place, frozen base and all.

    Returns:
        peft's own merge: adds the adapters to the weights of the base and gives the model without them.
    """
    settings = _peft().PeftConfig.from_peft_type(**adapter_config)
    return _inject(model, settings).merge_and_unload


def load_adapter_folder(model: PreTrainedModel, folder: Any) -> nn.Module:
    """``peft.PeftModel.from_pretrained`` on a model that has its weights, as a user of the folder would."""
    peft = _peft()
    return peft.PeftModel.from_pretrained(model, str(folder), local_files_only=True)


def split_adapter(module_name: str) -> tuple[str, str | None]:
    """``a.q_proj.lora_A.default`` → (``a.q_proj``, ``lora_A``); of a module that is no adapter (its name, None)."""
    parts = module_name.split(".")
    for index, part in enumerate(parts):
        if part in _ADAPTER_PARTS:
            return ".".join(parts[:index]), part
    return module_name, None


def base_name(name: str) -> str:
    """The name that a module or tensor of the base, or a whole copy of it, has in the model without adapters."""
    copies = (".base_layer", ".original_module", f".modules_to_save.{_ADAPTER}")
    for inner in copies:
        name = f"{name}.".replace(f"{inner}.", ".").removesuffix(".")
    return name


def _inject(model: PreTrainedModel, settings: Any) -> Any:
    """Put peft's adapters in on meta, in place, and give its tuner; what it warns of is logged."""
    peft = _peft()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tuner = peft.LoraModel(model, settings, _ADAPTER, low_cpu_mem_usage=True)
    for text in {str(warning.message) for warning in caught}:
        if "fan_in_fan_out" not in text:  # it is set as the layer needs it, and says so
            _log.warning("peft: %s", text)
    wrapped = [name for name, module in model.named_modules() if type(module).__name__ == "ParamWrapper"]
    if wrapped:
        raise ValueError(f"{wrapped[0]} keeps several weights in one tensor")
    return tuner


def _check_names(model: PreTrainedModel, names: list[str], path: str) -> None:
    """Every name fits a module, and none whose weight another one uses too."""
    modules = [name for name, _ in model.named_modules()]
    shared = {n.rpartition(".")[0]: group for group in tied_groups(model) if len(group) > 1 for n in group}
    for wanted in names:
        found = [name for name in modules if name == wanted or name.endswith(f".{wanted}")]
        if not found:
            raise _refused(path.rpartition(".")[2], repr(wanted), _layer_names(model))
        for name in found:
            if name in shared:
                raise ConfigError(
                    path,
                    f"{wanted!r}, whose weight the model uses twice: {' and '.join(shared[name])}",
                    "modules that share no weight with another",
                    "name other modules; all-linear leaves embedding and head alone",
                )


def _refused(field: str, given: str, names: list[str]) -> ConfigError:
    close = difflib.get_close_matches(given.strip("'"), names, n=1, cutoff=0.5)
    fix = f"write {close[0]}" if close else "set target_modules: all-linear"
    return ConfigError(f"{_PATH}.{field}", given, f"layers of this model: {', '.join(names)}", fix)


def _layer_names(model: nn.Module) -> list[str]:
    """Last parts of the names of all modules that own a weight of two dimensions."""
    owners = [n for n, m in model.named_modules() if any(p is not None and p.ndim == 2 for p in m._parameters.values())]
    return sorted({name.rpartition(".")[2] for name in owners})


def _plain(settings: Any) -> dict[str, Any]:
    """A peft configuration as JSON, ready for inference, as peft's ``save_pretrained`` writes it."""
    values = {key: sorted(v) if isinstance(v, set) else v for key, v in settings.to_dict().items()}
    return {**values, "peft_type": "LORA", "inference_mode": True}


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ConfigError(_PATH, "adapters, but peft is not installed", "peft", "pip install lit-fsdp[lora]") from error
    return peft
