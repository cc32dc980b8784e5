"""The tokenizer inside a GGUF file.

transformers reads it too, but drops how digits are split (``tokenizer.ggml.pre``) and the context length, and some
versions take every llama for Code Llama, with its special tokens. So byte-level BPE is put together here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

_CONTROL, _USER_DEFINED = 3, 4  # token types of the GGUF specification
_KNOWN_SPLITS = ("smollm", "gpt-2")


def gguf_tokenizer(file: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a GGUF file with its special tokens, chat template and the context length as its limit.

    Byte-level BPE with a split that is known here is built from the file's own tables; the rest is left to
    transformers.

    Raises:
        ImportError: The ``gguf`` package is missing.
        ValueError: The file is no GGUF file.
    """
    from gguf import GGUFReader

    fields = GGUFReader(file).fields
    prefix = "tokenizer.ggml."
    values = {name.removeprefix(prefix): fields[name].contents() for name in fields if name.startswith(prefix)}
    if values.get("model") == "gpt2" and values.get("pre") in _KNOWN_SPLITS:
        tokenizer = _byte_level_bpe(values)
        if "tokenizer.chat_template" in fields:
            tokenizer.chat_template = fields["tokenizer.chat_template"].contents()
    else:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    for name, field in fields.items():
        if name.endswith(".context_length"):
            tokenizer.model_max_length = int(field.contents())
    return tokenizer


def _byte_level_bpe(values: dict[str, Any]) -> PreTrainedTokenizerBase:
    """GPT-2's kind of tokenizer from the tables of a GGUF file, by their names there."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    tokens: list[str] = values["tokens"]
    merges = [tuple(pair.split(" ", 1)) for pair in values["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=bool(values.get("add_space_prefix", False)))
    digits = pre_tokenizers.Digits(individual_digits=True)  # before spaces are joined to what follows them
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level]) if values["pre"] == "smollm" else byte_level
    tokenizer.decoder = decoders.ByteLevel()
    kinds = list(zip(tokens, values.get("token_type", []), strict=False))
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, k in kinds if k == _CONTROL])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t, k in kinds if k == _USER_DEFINED])
    roles = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    named = {role: tokens[values[f"{key}_token_id"]] for key, role in roles.items() if f"{key}_token_id" in values}
    if values.get("add_bos_token") and "bos_token" in named:
        bos = named["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, values["bos_token_id"])]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **named)
