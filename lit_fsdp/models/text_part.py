"""The language model inside of one that also sees: what text alone trains.

On the hub Gemma 3 4B and larger are ``gemma3``: a vision tower beside a language model, and transformers builds both
for a causal LM. Rows of text never reach the tower, whose weights would only cost memory, so the language model is
built alone, from the tensors below its prefix. What is saved and exported is that text model (``gemma3_text``).
"""

from __future__ import annotations

import logging

from transformers import PretrainedConfig

_log = logging.getLogger(__name__)
_TEXT_MODELS = {"gemma3": ("gemma3_text", "Gemma3ForCausalLM")}
_PREFIXES = {"gemma3_text": (("", "language_model."), ("model.", "model.language_model."))}


def text_part(hf_config: PretrainedConfig, where: str) -> PretrainedConfig:
    """The config of the language model alone, where it is known to work without the rest; else ``hf_config``.

    Args:
        hf_config: As the model names it.
        where: Of what, for the log.
    """
    model_type, architecture = _TEXT_MODELS.get(hf_config.model_type, ("", ""))
    text = hf_config.get_text_config()
    if text.model_type != model_type or getattr(hf_config, "quantization_config", None):
        return hf_config
    text.architectures = [architecture]
    _log.info("%s sees images too (%s): its text part is used alone (%s)", where, hf_config.model_type, text.model_type)
    return text


def names_in_whole_model(hf_config: PretrainedConfig, name: str) -> list[str]:
    """What a tensor of the text part may be called where the whole model was saved.

    ``model.norm.weight`` is ``language_model.model.norm.weight`` on the hub, and ``model.language_model.norm.weight``
    as transformers names it in memory.
    """
    pairs = _PREFIXES.get(hf_config.model_type, ())
    return [new + name.removeprefix(old) for old, new in pairs if name.startswith(old)]
