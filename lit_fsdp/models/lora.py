"""Adapters of ``peft`` on a model that is still on meta, and their initial values.

The layers are peft's and are inserted in place: the model stays a transformers model, so units, loss and names are
found as without adapters. Only parameter names change: the name ``q_proj.weight`` becomes ``q_proj.base_layer.weight``,
next to ``q_proj.lora_A.default.weight``. The base is read under its original names, shard by shard.
"""

import difflib
import functools
import logging
import math
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lit_fsdp.config.model import LoraConfig
from lit_fsdp.errors import ConfigError, require
from lit_fsdp.models.adapted import apply_one_function
from lit_fsdp.models.adapter_names import ADAPTER, base_name, is_adapter
from lit_fsdp.models.experts import fused_experts
from lit_fsdp.models.quantize import PackedExperts, apply_nf4, pack, pack_experts
from lit_fsdp.models.special_layers import ATTENTION, bypassed_layers, router_layers
from lit_fsdp.models.weights import Weights, seeded, tied_groups

_log = logging.getLogger(__name__)
_PATH = "model.lora"
_BITSANDBYTES = "bitsandbytes"
_HANDED = ("layers_to_transform", "layers_pattern", "exclude_modules", "rank_pattern", "alpha_pattern")
_GAUSSIAN = ("init_lora_weights", "gaussian")
_FIELDS = set(  # of adapter_config.json that model.lora has itself, or peft fills in
    "r lora_alpha lora_dropout target_modules target_parameters use_dora use_rslora modules_to_save task_type "
    "peft_type auto_mapping peft_version base_model_name_or_path revision inference_mode fan_in_fan_out".split()
)
_LAYERS = (nn.Linear, Conv1D, nn.Embedding)  # targeted as modules, not as parameters
_ADAPTER_PARTS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")


class LoraWeights:
    """Reads the tensors of a model with adapters: base weights as without them, adapters initialized by (seed, name).

    The factor ``A`` is initialized like a linear layer's weight (or gaussian, as in peft), ``B`` is zero, so that the
    first loss is the base model's. (In an embedding ``A`` is zero and ``B`` random, as in peft.) DoRA magnitudes are
    the norms of the base weights.

    The ``base`` has the weights before :func:`apply_lora`; the ``model`` is its result, on meta and not wrapped yet. A
    base is quantized on ``device``, one module at a time.
    """

    def __init__(self, base: Weights, model: nn.Module, seed: int, device: torch.device | None = None) -> None:
        self._base, self._seed, self._device = base, seed, device or torch.device("cpu")
        self._modules = dict(model.named_modules())
        settings: Any = model.peft_config
        self._is_gaussian = settings[ADAPTER].init_lora_weights == "gaussian"

    def read(self, module_name: str, module: nn.Module, attribute: str, rows: slice | None = None) -> torch.Tensor:
        """Same as :meth:`lit_fsdp.models.weights.Weights.read`, with names of the model with adapters.

        For a quantized layer the whole weight is read, whichever rows of the packed weight are requested.
        """
        if attribute == "weight" and hasattr(module, "quant_state"):
            owner, _, own = base_name(module_name).rpartition(".")
            name = f"{owner}.{own}" if isinstance(module, PackedExperts) else f"{owner}.{own}.{attribute}"
            by_rows = functools.partial(self._base.read_named, name)
            read = by_rows if self._base.is_stored(name) else self._base.read_named(name).__getitem__
            packed = pack(read, module, self._device)
            return packed if rows is None else packed[rows].clone()
        parts = module_name.split(".")
        part = next((part for part in parts if part in _ADAPTER_PARTS), None)
        if part is None:
            return self._base.read(base_name(module_name), module, attribute, rows)
        if part == "lora_magnitude_vector":
            weight = self._base.read(".".join(parts[: parts.index(part)]), module, "weight").float()
            values = torch.linalg.norm(weight, dim=0 if module.fan_in_fan_out else 1)
        else:
            values = torch.zeros(getattr(self._modules[module_name], attribute).shape)
            with seeded(self._seed, module_name):
                if part == "lora_A" and self._is_gaussian:
                    nn.init.normal_(values, std=1 / len(values))
                elif part == "lora_A":
                    nn.init.kaiming_uniform_(values, a=math.sqrt(5))
                elif part == "lora_embedding_B":
                    nn.init.normal_(values)
        return values if rows is None else values[rows].clone()


def apply_lora(model: PreTrainedModel, config: LoraConfig, base: str | None = None) -> dict[str, Any]:
    """Freeze ``model`` and insert adapters, in place.

    Returns the content of ``adapter_config.json``, from which peft rebuilds the same adapters; it names ``base``.
    """
    peft = _peft()
    more = _peft_args(config, peft)
    is_known = model.config.model_type in peft.utils.constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    layers = ", ".join(sorted({name.rpartition(".")[2] for name in [*_linears(model), *fused_experts(model)]}))
    targets, parameters = _targets(model, config, is_known, more, layers)
    _check_names(model, "modules_to_save", config.modules_to_save or [], layers)
    if config.quantize is not None:
        apply_nf4(model, config.modules_to_save or [], config.double_quantization)
    try:
        settings = peft.LoraConfig(
            task_type="CAUSAL_LM",
            base_model_name_or_path=base,
            r=config.r,
            lora_alpha=int(config.alpha) if config.alpha == int(config.alpha) else config.alpha,
            lora_dropout=config.dropout,
            target_modules=targets,
            target_parameters=parameters or None,
            use_dora=config.use_dora,
            use_rslora=config.use_rslora,
            modules_to_save=config.modules_to_save,
            **more,
        )
        _inject(model, settings)
    except (ValueError, TypeError, NotImplementedError, Warning, re.error) as error:
        field, chosen = ("peft_args", more) if more else ("target_modules", config.target_modules)
        given = f"{chosen} ({' '.join(str(error).split())[:200]})"
        raise ConfigError(f"{_PATH}.{field}", given, f"layers of this model: {layers}") from error
    layers_of_peft = {n: m for n, m in model.named_modules() if hasattr(m, "lora_A")}
    adapted = [base_name(f"{n}.{getattr(m, 'parameter_name', '')}".rstrip(".")) for n, m in layers_of_peft.items()]
    for field in ("rank_pattern", "alpha_pattern"):  # peft's warning is wrong for parameters
        keys, allowed = more.get(field) or {}, f"layers of this model: {layers}"
        unused = [key for key in keys if not any(re.match(rf"(.*\.)?({key})$", name) for name in adapted)]
        require(not unused, f"{_PATH}.peft_args.{field}", f"{unused}, which match nothing", allowed)
    for number in _numbers(more):  # peft ignores missing layers
        given, fits = f"{number}, but that layer has no adapter", any(f".{number}." in n for n in adapted)
        require(fits, f"{_PATH}.peft_args.layers_to_transform", given, "numbers of layers, from 0")
    if config.quantize is not None:
        owners = {n: model.get_submodule(n.rpartition(".")[0]) for n in fused_experts(model) if not is_adapter(n)}
        pack_experts(owners, config.double_quantization)
    for layer in layers_of_peft.values():
        if type(layer).__name__ in ("Linear", "Linear4bit"):
            apply_one_function(layer)
    model.train()
    # same as peft's save_pretrained writes it, for inference
    values = {key: sorted(v) if isinstance(v, set) else v for key, v in settings.to_dict().items()}
    return {**values, "peft_type": "LORA", "inference_mode": True}


def _targets(
    model: PreTrainedModel, config: LoraConfig, is_known: bool, more: Mapping[str, Any], layers: str
) -> tuple[list[str] | str | None, list[str]]:
    """``target_modules`` and ``target_parameters`` for peft, whose all-linear would include routers."""
    linears, fused, path = _linears(model), fused_experts(model), f"{_PATH}.target_modules"
    chosen = config.target_modules
    mistaken, routers, bypassed = _mistaken(model, linears), router_layers(model), bypassed_layers(model)
    lost = _lost(model, linears)
    unusable = routers | bypassed | lost
    usable = [n for n in linears if n not in unusable and n.rpartition(".")[2] not in mistaken]
    if routers and not fused and not any("expert" in name for name in linears):
        whose = f"for {model.config.model_type}, whose experts are neither layers nor stacked tensors"
        given, fix = f"all-linear {whose}", "write attention-only"
        require(chosen != "all-linear", path, given, "attention-only, or names of layers", fix)
        require(not config.quantize, f"{_PATH}.quantize", f"nf4 {whose}", "null", "drop quantize")
    targets: list[str] | str | None = chosen
    parameters: list[str] = []
    if chosen == "all-linear" or (chosen is None and not is_known):
        targets, parameters = usable, list(fused) if chosen else []
        confused = {name for name in linears if name.rpartition(".")[2] in mistaken}
        used = (bypassed & {*linears}) - routers
        for names, why in (
            (confused, "peft mistakes them for routed experts"),
            (used, "the model's code uses their weight directly"),
            (lost - used, "peft would not find them in the adapter's folder"),
        ):
            if names:
                _log.warning("model.lora: layers without adapters, because %s: %s", why, _ends(names))
    elif chosen == "attention-only":
        targets = [name for name in usable if ATTENTION.search(name)]
        given = f"attention-only for {model.config.model_type}, which has no linear layer named attn or attention"
        require(targets, path, given, f"layers of this model: {layers}")
    elif isinstance(chosen, str):
        targets, parameters = _by_pattern(model, chosen, layers)
    elif chosen is not None:
        targets, parameters = _by_name(model, chosen, layers)
    listed = targets if isinstance(targets, list) else []
    unfound = sorted({_end(name) for name in lost if f".{name}".endswith(tuple(f".{wanted}" for wanted in listed))})
    given = f"{', '.join(unfound[:3])}, which peft would not find in the adapter's folder ({model.config.model_type})"
    require(not unfound, path, given, "other layers", "write all-linear, which leaves them out")
    wrong = [name for name in listed if name.rpartition(".")[2] in mistaken]
    given = f"{', '.join(wrong[:3])}, which peft mistakes for routed experts of {model.config.model_type}"
    fix = f"name the experts' tensors: {_ends(fused)}"
    require(not wrong, path, given, "other layers", fix)
    if more.get("layers_to_transform") is not None:  # peft applies full names, and parameters, to every layer
        if targets is usable:
            targets = sorted({name.rpartition(".")[2] for name in targets})
        parameters = [name for name in parameters if any(f".{number}." in name for number in _numbers(more))]
    excluded = more.get("exclude_modules")
    for_layers = {"dropout": config.dropout, "use_dora": config.use_dora, "peft_args.exclude_modules": excluded}
    for field in (field for field, value in for_layers.items() if value):
        given = f"a value, with adapters on fused experts of {model.config.model_type}"
        fix = f"drop {field}, or set target_modules: attention-only"
        require(not parameters, f"{_PATH}.{field}", given, "none: peft supports it for layers only", fix)
    return targets, parameters


def _by_pattern(model: PreTrainedModel, chosen: str, layers: str) -> tuple[list[str] | str, list[str]]:
    """``target_modules`` and ``target_parameters`` whose full names match the pattern."""
    fused = fused_experts(model)
    parameters = [name for name in fused if re.fullmatch(chosen, name)]
    names = [name for name, _ in model.named_modules()]
    found = [name for name in names if re.fullmatch(chosen, name)]
    given = f"{chosen!r}, which matches no full name"
    is_end = any(name.endswith(f".{chosen}") for name in names)
    fix = f"write [{chosen}], or '.*{chosen}'" if is_end else ""
    require(found or parameters, f"{_PATH}.target_modules", given, f"names such as {_linears(model)[0]}", fix)
    _check_names(model, "target_modules", found, layers)
    return found if fused or not found else chosen, parameters  # in mixtures peft extends a pattern to all layers


def _by_name(model: PreTrainedModel, chosen: list[str], layers: str) -> tuple[list[str], list[str]]:
    """The names of modules, for ``target_modules``, and the parameters that the other names mean."""
    fused, modules = fused_experts(model), [f".{name}" for name, _ in model.named_modules()]
    others = [wanted for wanted in chosen if not any(name.endswith(f".{wanted}") for name in modules)]
    of_layers = {id(p) for m in model.modules() if isinstance(m, _LAYERS) for p in m.parameters()}
    matrices = [n for n, p in model.named_parameters() if id(p) not in of_layers and p.ndim in (2, 3)]
    parameters = [name for name in matrices if f".{name}".endswith(tuple(f".{wanted}" for wanted in others))]
    owners = {name.rpartition(".")[0] for name in fused}
    biases = [_end(name) for name in parameters if name not in fused and name.rpartition(".")[0] in owners]
    given, allowed = f"{biases[:1]}, which is no weight of experts", f"weights such as {_ends(fused)}"
    require(not biases, f"{_PATH}.target_modules", given, allowed)
    targets = [wanted for wanted in chosen if not any(f".{name}".endswith(f".{wanted}") for name in parameters)]
    _check_names(model, "target_modules", targets, layers)
    return targets, parameters


def _mistaken(model: PreTrainedModel, linears: list[str]) -> set[str]:
    """Last name parts of linear layers that peft mistakes for routed experts, because transformers 4 used these names.

    Source: https://github.com/huggingface/peft/issues/3711; once that is fixed, the result is empty.
    """
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    ends = {name.rpartition(".")[2] for name in linears}

    def is_converted(targets: set[str]) -> bool:
        probe = _peft().LoraConfig(target_modules=targets)
        try:
            convert_peft_config_for_transformers(probe, model, None)
        except ValueError:  # peft requires gate_proj and up_proj together
            return True
        return not targets <= set(probe.target_modules)

    return {end for end in ends if is_converted({end})} if is_converted(ends) else set()


def _lost(model: PreTrainedModel, linears: list[str]) -> set[str]:
    """Linear layers whose adapters peft would leave at zero on loading, because transformers renames their keys twice.

    Source: findings/peft-loses-adapters-whose-names-are-renamed-twice.sh; once that changes, the result is empty.
    """
    from peft.utils.transformers_weight_conversion import convert_peft_adapter_state_dict_for_transformers as as_loaded

    keys = {name: f"base_model.model.{name}.lora_A.weight" for name in linears}
    found = as_loaded(model, _peft().LoraConfig(), {key: torch.empty(1, 1) for key in keys.values()})
    return {name for name, key in keys.items() if key not in found}


def _end(name: str) -> str:
    """A name without its prefix up to the layer's index."""
    return re.sub(r".*\.\d+\.", "", name)


def _ends(names: Iterable[str]) -> str:
    return ", ".join(sorted({_end(name) for name in names}))


def _linears(model: PreTrainedModel) -> list[str]:
    head = model.get_output_embeddings()
    return [n for n, m in model.named_modules() if isinstance(m, (nn.Linear, Conv1D)) and m is not head]


def _numbers(more: Mapping[str, Any]) -> list[int]:
    numbers = more.get("layers_to_transform")
    return [numbers] if isinstance(numbers, int) else list(numbers or [])


def _peft_args(config: LoraConfig, peft: Any) -> dict[str, Any]:
    """Check ``model.lora.peft_args``, and return those that peft must get."""
    found = config.peft_args or {}
    _check_args(found, peft, f"{_PATH}.peft_args.")
    return {name: value for name, value in found.items() if name in _HANDED or (name, value) == _GAUSSIAN}


def _check_args(args: Mapping[str, Any], peft: Any, path: str, fix: str = "") -> None:
    """Check arguments of ``peft.LoraConfig``: weights, names and first losses must stay ours."""
    defaults, allowed = peft.LoraConfig().to_dict(), f"peft's defaults, except for {', '.join(_HANDED)}"
    instead = {"trainable_token_indices": "use model.add_tokens", "bias": "name modules in modules_to_save"}
    instead["init_lora_weights"] = "write true or gaussian"
    for name, value in args.items():
        field, near = f"{path}{name}", difflib.get_close_matches(name, defaults, n=1)
        nearest = f"write {near[0]}" if near else "drop it"
        require(name in defaults, field, "an argument that peft.LoraConfig lacks", allowed, fix or nearest)
        given = f"{value!r}, which lit_fsdp does not support in initialization, sharding, checkpoints or export"
        fine = name in _HANDED or (name, value) == _GAUSSIAN or value == defaults[name]
        require(fine, field, given, allowed, fix or instead.get(name, "drop it"))


def check_saved_lora(adapter_config: Mapping[str, Any], path: Path) -> None:
    """Refuse an ``adapter_config.json`` of other software, at ``path``, with arguments that ``peft_args`` refuses."""
    fix = "merge the adapter with peft first, and train the merged model"
    if adapter_config.get("init_lora_weights", True) not in (True, False, "gaussian"):  # most others change the base
        fix += ", or convert it with path_initial_model_for_weight_conversion of peft's save_pretrained"
    given = {name: value for name, value in adapter_config.items() if value and name not in _FIELDS}  # others are off
    _check_args(given, _peft(), f"{path}: ", fix)


def apply_saved_lora(model: PreTrainedModel, adapter_config: Mapping[str, Any]) -> Callable[[], PreTrainedModel]:
    """Insert the adapters that ``adapter_config.json`` describes, in place; returns peft's merge function."""
    settings = _peft().PeftConfig.from_peft_type(**adapter_config)
    return _inject(model, settings).merge_and_unload


def load_adapter_folder(model: PreTrainedModel, folder: Any) -> nn.Module:
    """Call ``peft.PeftModel.from_pretrained`` on a model with loaded weights, as a user of the folder would."""
    with warnings.catch_warnings():
        # peft 0.21.2 reads a property that transformers 5.24 deprecates; it can go with the next peft
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        return _peft().PeftModel.from_pretrained(model, str(folder), local_files_only=True)


def _inject(model: PreTrainedModel, settings: Any) -> Any:
    """Insert peft's adapters on meta, in place; returns peft's tuner."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "You have passed exclude_modules")
        warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys did not match")  # checked by name
        warnings.filterwarnings("ignore", "fan_in_fan_out")  # peft sets it as the layer needs it, and warns
        peft = _peft()
        with _without_bitsandbytes():
            return peft.LoraModel(model, settings, ADAPTER, low_cpu_mem_usage=True)


def _check_names(model: PreTrainedModel, field: str, names: list[str], layers: str) -> None:
    """Require that every name matches a module (peft ignores others) and that no matched weight is shared."""
    modules = [name for name, _ in model.named_modules()]
    shared = {name.rpartition(".")[0] for group in tied_groups(model) if len(group) > 1 for name in group}
    for wanted in names:
        found = {name for name in modules if name == wanted or name.endswith(f".{wanted}")}
        near = difflib.get_close_matches(wanted, {name.rpartition(".")[2] for name in modules}, n=1)
        fix = f"write {near[0]}" if near else ""
        require(found, f"{_PATH}.{field}", repr(wanted), f"layers of this model: {layers}", fix)
        given = f"{wanted!r}, whose weight the model uses twice"
        fix = "name other modules; all-linear leaves embedding and head alone"
        require(not found & shared, f"{_PATH}.{field}", given, "modules that share no weight with another", fix)


@contextmanager
def _without_bitsandbytes() -> Iterator[None]:
    """Hide an installed bitsandbytes from peft, unless it is loaded: otherwise no layer can be one of its classes.

    peft imports it to compare classes, which takes a second of CPU time on every rank: it loads torch's compiler.
    Delete when peft imports it only for quantized models: https://github.com/huggingface/peft/issues/1665 (closed, but
    peft 0.21 imports it in helpers.py and for each insertion of adapters).
    """
    if _BITSANDBYTES in sys.modules:
        yield
        return
    sys.modules[_BITSANDBYTES] = None  # type: ignore[assignment]
    _forget_bitsandbytes()
    try:
        yield
    finally:
        del sys.modules[_BITSANDBYTES]
        _forget_bitsandbytes()


def _forget_bitsandbytes() -> None:
    """Let peft look again whether bitsandbytes is installed."""
    if utils := sys.modules.get("peft.import_utils"):
        utils.is_bnb_available.cache_clear()
        utils.is_bnb_4bit_available.cache_clear()


def _peft() -> Any:
    try:
        with _without_bitsandbytes():
            import peft
    except ImportError as error:
        fix = "pip install 'lit-fsdp[lora]'"
        raise ConfigError(_PATH, "adapters, but peft is not installed", "peft", fix) from error
    return peft
