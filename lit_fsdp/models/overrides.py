"""``model.config_overrides``: values that replace those in a model's config."""

import contextlib
import copy
import difflib
import inspect
import logging
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PretrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lit_fsdp.errors import require
from lit_fsdp.models.build import build_on_meta
from lit_fsdp.models.hub import reading
from lit_fsdp.models.loss import owner_of_head
from lit_fsdp.models.weights import tied_groups

_FIELD = "model.config_overrides"
ROPE_OF_A_MODEL = ("rope_theta", "partial_rotary_factor")
"""Rotary parameters of a model that do not depend on the scaling."""
_STRETCHED = ("llama3", "yarn", "longrope")  # their scaling depends on the original length
_NOT_HERE = {*PretrainedConfig().to_dict(), *ROPE_OF_A_MODEL, "use_cache", "quantization_config", "auto_map"}
_SPLITS = ("num_attention_heads", "num_key_value_heads", "head_dim")  # they split weights without changing shapes
_LEAST = re.compile(r"eps$|coef$|max_position|sliding_window")
_OF_TRAINING = re.compile("drop|router|aux_loss")


def overridden(
    config: PretrainedConfig, given: Mapping[str, Any], has_weights: bool, trust_remote_code: bool
) -> PretrainedConfig:
    """Copy ``config`` with these values in the config of its language model, validated by transformers.

    Rotary parameters keep the model's ``rope_theta`` and original length unless the values set them: without them
    transformers silently uses 10,000 and the new ``max_position_embeddings``.

    Raises:
        ConfigError: The config class lacks a key, refuses a value, or ignores it; or with ``has_weights`` a key changes
            names or shapes of weights.
    """
    text: Any = config.get_text_config()
    known = {*type(text)().to_dict(), *text.attribute_map} - _NOT_HERE
    has_rope = "rope_parameters" in known
    for key in given:
        near = difflib.get_close_matches(key, known, n=1)
        fix = f"write {near[0]}" if near else "leave it out"
        fix = "write it into rope_parameters, next to rope_type" if has_rope and key in ROPE_OF_A_MODEL else fix
        allowed = f"keys of {type(text).__name__}: {', '.join(sorted(known))}"
        fits = key in known or (has_rope and key == "rope_scaling" and "rope_parameters" not in given)
        require(fits, f"{_FIELD}.{key}", "a key that cannot be overridden", allowed, fix)
    names = {**text.attribute_map, "rope_scaling": "rope_parameters"}
    values = {names.get(key, key): copy.deepcopy(value) for key, value in given.items()}
    if "rope_parameters" in values:
        values["rope_parameters"] = _rope(text, values["rope_parameters"])
    own, before = text.to_dict(), text.to_dict()
    own.pop("layer_types", None)  # in some models they are derived from other keys
    result = copy.deepcopy(config)
    _check_values(text, values)
    with reading(str(given), _FIELD, "correct that value", "values that transformers accepts for this model"):
        if getattr(type(text).from_dict(copy.deepcopy(own)), "layer_types", None) != before.get("layer_types"):
            own = before
        with _warnings_raised():
            new = type(text).from_dict({**own, **copy.deepcopy(values)})
        new.name_or_path = text.name_or_path
        if text is config:
            result = new
        else:
            setattr(result, next(name for name, part in vars(config).items() if part is text), new)
        model = build_on_meta(result, "eager", trust_remote_code)
    _check_experts(new, values, model)
    tensors = _tensors(model)
    for key, value in values.items():
        live, is_share = getattr(new, key, None), "drop" not in key or not value or 0 <= value < 1
        allowed = "0 to 1, without 1" if live == value else f"a value with an effect: transformers changes it to {live}"
        require(_contains(live, value) and is_share, f"{_FIELD}.{key}", value, allowed)
    if has_weights:
        stored = _tensors(build_on_meta(config, "eager", trust_remote_code))
        changed = sorted(name for name in stored | tensors if stored.get(name) != tensors.get(name))
        got = f"{given}, which changes names, shapes or meaning of weights, such as {', '.join(changed[:1])}"
        fix = "for random init name a config .json with these values"
        require(not changed, _FIELD, got, "keys that do not change the stored weights", fix)
    return result


def check_overrides(saved: Mapping[str, Any] | None, now: Mapping[str, Any] | None, checkpoint: Any) -> None:
    """Refuse overrides that give a different model than ``saved``; training options (dropout, routers) may change.

    The value ``saved`` is None if the overrides are unknown, as in imported checkpoints.
    """
    one, other = ({k: v for k, v in (each or {}).items() if not _OF_TRAINING.search(k)} for each in (saved, now))
    allowed = f"{one or 'null'}, as in {checkpoint}: overrides are part of the model"
    require(saved is None or one == other, _FIELD, other or "null", allowed, "set the same, or start a new run")


def _check_values(text: Any, values: Mapping[str, Any]) -> None:
    """Refuse unknown activations, and numbers below what any model can compute with, which transformers accepts."""
    for key, value in values.items():
        before, path = getattr(text, key, None), f"{_FIELD}.{key}"
        if isinstance(before, str) and before in ACT2FN:
            require(isinstance(value, str) and value in ACT2FN, path, value, f"one of {', '.join(sorted(ACT2FN))}")
        if isinstance(value, int | float) and (least := _LEAST.search(key)):
            allowed = 1 if least[0] in ("max_position", "sliding_window") else 0
            require(value >= allowed, path, value, f">= {allowed}")


def _check_experts(text: Any, values: Mapping[str, Any], model: Any) -> None:
    """Refuse more choices than experts, and options of the router's loss in models that compute none."""
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    experts = next((n for n in (getattr(text, name, None) for name in names) if isinstance(n, int)), 0)
    experts += getattr(text, "zero_expert_num", None) or 0  # identity experts of LongCat-Flash
    for name in ("num_experts_per_tok", "top_k_experts", "moe_topk"):
        if experts and isinstance(chosen := getattr(text, name, None), int):
            key = text.attribute_map.get(name, name)
            require(1 <= chosen <= experts, f"{_FIELD}.{key}", chosen, f"1 to {experts}, the number of experts")
    option = "output_router_logits"
    if option in values or "router_aux_loss_coef" in values:
        # many config classes declare it although the model never reads it
        cls = type(owner_of_head(model) or model)
        reads = option in inspect.signature(cls.forward).parameters
        reads &= "load_balancing_loss_func" in vars(sys.modules[cls.__module__]) or "transformers" not in cls.__module__
        key = option if values.get(option) else "router_aux_loss_coef"
        given = f"{values.get(key)}, but {text.model_type} computes no router loss"
        require(reads or not values.get(key), f"{_FIELD}.{key}", given, "models whose code computes it", "leave it out")
        is_on = getattr(text, option, False) or not values.get("router_aux_loss_coef")
        given, fix = f"{values.get(key)} without {option}", f"add {option}: true"
        require(is_on, f"{_FIELD}.router_aux_loss_coef", given, f"with {option}: true, which adds that loss", fix)


def _rope(text: Any, given: Any) -> dict[str, Any]:
    own = text.rope_parameters or {}
    layers = [key for key, value in own.items() if isinstance(value, Mapping)]
    is_map = isinstance(given, Mapping) and bool(given)
    nested = [isinstance(value, Mapping) for value in given.values()] if is_map else []
    fits = is_map and own and (all(nested) and given.keys() <= {*layers} if layers else not any(nested))
    allowed = "a mapping such as {rope_type: yarn, factor: 4.0}"
    allowed += f" for each of {', '.join(layers)} that changes" if layers else ", of a model with rotary positions"
    require(fits, f"{_FIELD}.rope_parameters", given, allowed)
    if layers:
        return {**own, **{layer: _filled(text, own[layer], value) for layer, value in given.items()}}
    return _filled(text, own, given)


def _filled(text: Any, own: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: own[key] for key in ROPE_OF_A_MODEL if own.get(key) is not None} | dict(given)
    if "type" in found:
        found.setdefault("rope_type", found.pop("type"))
    if found.get("rope_type") in _STRETCHED:
        before = own.get("original_max_position_embeddings") or text.max_position_embeddings
        found.setdefault("original_max_position_embeddings", before)
    path, kinds, theta = f"{_FIELD}.rope_parameters", {"default", *ROPE_INIT_FUNCTIONS}, found.get("rope_theta", 1.0)
    kind = found.get("rope_type", "default")
    require(kind in kinds, f"{path}.rope_type", kind, " | ".join(sorted(kinds)))
    require(isinstance(theta, int | float) and theta > 0, f"{path}.rope_theta", theta, "a number > 0")
    return found


@contextlib.contextmanager
def _warnings_raised() -> Iterator[None]:
    """Raise transformers' warnings about rotary parameters as errors, except those that may be intended."""
    messages: list[str] = []
    logger, handler = logging.getLogger("transformers.modeling_rope_utils"), logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
    if wrong := [text for text in messages if re.search("field must|Unrecognized keys|Missing", text)]:
        raise ValueError(wrong[0])


def _contains(live: Any, wanted: Any) -> bool:
    if isinstance(wanted, Mapping) and isinstance(live, Mapping):
        return all(key in live and _contains(live[key], value) for key, value in wanted.items())
    return bool(live == wanted)


def _tensors(model: Any) -> dict[str, Any]:
    text = model.config.get_text_config()
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    found: dict[str, Any] = {name: (shapes[name], group) for group in tied_groups(model) for name in group}
    values = text.to_dict()
    return found | {name: values.get(text.attribute_map.get(name, name)) for name in _SPLITS}
