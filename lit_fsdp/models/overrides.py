"""``model.config_overrides``: values in place of those in a model's config, as if they had always stood there."""

from __future__ import annotations

import contextlib
import copy
import difflib
import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PretrainedConfig

from lit_fsdp.errors import require
from lit_fsdp.models.build import build_on_meta
from lit_fsdp.models.hub import reading
from lit_fsdp.models.weights import tied_groups

_FIELD = "model.config_overrides"
ROPE_OF_A_MODEL = ("rope_theta", "partial_rotary_factor")
"""Of rotary positions, what a model has whatever scales them."""
_STRETCHED = ("llama3", "yarn", "longrope")  # whose scaling depends on the length before it
_NOT_HERE = {*PretrainedConfig().to_dict(), *ROPE_OF_A_MODEL, "use_cache", "quantization_config", "auto_map"}
_SPLITS = ("num_attention_heads", "num_key_value_heads", "head_dim")  # which some weights of one shape are split by
_OF_TRAINING = re.compile("drop|router|aux_loss")


def overridden(
    config: PretrainedConfig, given: Mapping[str, Any], has_weights: bool, trust_remote_code: bool = False
) -> PretrainedConfig:
    """A copy of ``config`` with these values in that of its language model, checked by transformers as a file's are.

    Rotary parameters keep the model's ``rope_theta``, and the length before scaling, unless they say another: where
    these are left out transformers takes 10,000, and the new ``max_position_embeddings``, in silence.

    Raises:
        ConfigError: A key that its class has not, a value that it refuses or that has no effect; a key that gives the
            weights other names or shapes, if it ``has_weights``.
    """
    text: Any = config.get_text_config()
    known = {*type(text)().to_dict(), *text.attribute_map} - _NOT_HERE
    has_rope = "rope_parameters" in known
    for key in given:
        near = difflib.get_close_matches(key, known, n=1)
        fix = f"write {near[0]}" if near else "leave it out"
        fix = "write it into rope_parameters, beside rope_type" if has_rope and key in ROPE_OF_A_MODEL else fix
        allowed = f"keys of {type(text).__name__}: {', '.join(sorted(known))}"
        fits = key in known or (has_rope and key == "rope_scaling" and "rope_parameters" not in given)
        require(fits, f"{_FIELD}.{key}", "a key that cannot be given here", allowed, fix)
    names = {**text.attribute_map, "rope_scaling": "rope_parameters"}
    values = {names.get(key, key): copy.deepcopy(value) for key, value in given.items()}
    if "rope_parameters" in values:
        values["rope_parameters"] = _rope(text, values["rope_parameters"])
    own, before = text.to_dict(), text.to_dict()
    own.pop("layer_types", None)  # which follow from others, or not
    result = copy.deepcopy(config)
    with reading(str(given), _FIELD, "correct that value"):
        if getattr(type(text).from_dict(copy.deepcopy(own)), "layer_types", None) != before.get("layer_types"):
            own = before
        with _warnings_raised():
            new = type(text).from_dict({**own, **copy.deepcopy(values)})
        new.name_or_path = text.name_or_path
        if text is config:
            result = new
        else:
            setattr(result, next(name for name, part in vars(config).items() if part is text), new)
        tensors = _tensors(result, trust_remote_code)
    for key, value in values.items():
        live, is_share = getattr(new, key, None), "drop" not in key or not value or 0 <= value < 1
        allowed = "0 to 1, without 1" if live == value else f"what has an effect: transformers makes {live} of it"
        require(_contains(live, value) and is_share, f"{_FIELD}.{key}", value, allowed)
    if has_weights:
        stored = _tensors(config, trust_remote_code)
        changed = sorted(name for name in stored | tensors if stored.get(name) != tensors.get(name))
        got = f"{given}, with which weights have another name, shape or meaning, such as {', '.join(changed[:1])}"
        fix = "for random init name a config .json with these values"
        require(not changed, _FIELD, got, "what leaves the weights that are read as they are", fix)
    return result


def check_overrides(saved: Mapping[str, Any] | None, now: Mapping[str, Any] | None, checkpoint: Any) -> None:
    """Refuse overrides that make another model than ``saved`` ones; those of training (dropout, routers) may change.

    None is saved where nobody knows, as in imported checkpoints.
    """
    one, other = ({k: v for k, v in (each or {}).items() if not _OF_TRAINING.search(k)} for each in (saved, now))
    allowed = f"{one or 'null'}, as in {checkpoint}: it is a part of the model"
    require(saved is None or one == other, _FIELD, other or "null", allowed, "set the same, or begin a new run")


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
    return found


@contextlib.contextmanager
def _warnings_raised() -> Iterator[None]:
    """Raise what transformers warns of where it looks at rotary parameters, except for what may be meant."""
    said: list[str] = []
    logger, handler = logging.getLogger("transformers.modeling_rope_utils"), logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
    if wrong := [text for text in said if re.search("field must|Unrecognized keys|Missing", text)]:
        raise ValueError(wrong[0])


def _contains(live: Any, wanted: Any) -> bool:
    if isinstance(wanted, Mapping) and isinstance(live, Mapping):
        return all(key in live and _contains(live[key], value) for key, value in wanted.items())
    return bool(live == wanted)


def _tensors(config: PretrainedConfig, trust_remote_code: bool) -> dict[str, Any]:
    model, text = build_on_meta(config, "eager", trust_remote_code), config.get_text_config()
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    found: dict[str, Any] = {name: (shapes[name], group) for group in tied_groups(model) for name in group}
    values = text.to_dict()
    return found | {name: values.get(text.attribute_map.get(name, name)) for name in _SPLITS}
