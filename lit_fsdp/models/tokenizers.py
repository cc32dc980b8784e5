"""Tokenizers: the model's own, and a tiny one made in memory for trying recipes out."""

from __future__ import annotations

import logging
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from lit_fsdp.config.model import ModelConfig
from lit_fsdp.errors import ConfigError
from lit_fsdp.models.hub import fetch_tokenizer
from lit_fsdp.models.source import ModelSource

_log = logging.getLogger(__name__)

CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML with the assistant's words and its end mark as the part that is learnt."""

_FILES = ("tokenizer*", "vocab.*", "*.model", "*.tiktoken", "tekken.json")
_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
_MERGED = (
    *(" the", " of", " and", " to", " in", " is", " you", " for", " that", " it", " with", " as", " are", " this"),
    *("ing", "ion", "ent", "er", "ed", "es", "ly", "assistant", "user", "system", "\n\n", "  "),
)


def load_tokenizer(source: ModelSource, config: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer that goes with a model, with a pad token.

    Without a pad token of its own it gets the end-of-sequence token as one, which is logged: labels must then be
    masked by position, never by token.

    Raises:
        ConfigError: There is no tokenizer, it cannot be read, or it has more tokens than the model has embeddings.
    """
    if source.tokenizer_source is None:
        if not config.miniature:
            raise ConfigError("model.tokenizer", None, "a tokenizer folder or hub name", "set model.tokenizer")
        return miniature_tokenizer()
    tokenizer = read_tokenizer(source.tokenizer_source, config.trust_remote_code)
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            fix = "add eos_token and pad_token to its tokenizer_config.json"
            raise ConfigError("model.tokenizer", source.tokenizer_source, "a tokenizer with an eos or pad token", fix)
        tokenizer.pad_token = tokenizer.eos_token
        _log.info("%s has no pad token: padding with %s", source.tokenizer_source, tokenizer.eos_token)
    embeddings = source.hf_config.get_text_config().vocab_size
    if len(tokenizer) > embeddings:
        raise ConfigError(
            "model.tokenizer",
            f"{source.tokenizer_source} with {len(tokenizer)} tokens",
            f"at most the {embeddings} embeddings of {source.label}",
            "name the tokenizer that belongs to the model",
        )
    return tokenizer


def miniature_tokenizer() -> PreTrainedTokenizerBase:
    """A byte-level BPE of under 512 tokens: every byte, some frequent pieces, ChatML marks and a chat template.

    The same on every machine: the merges are written here, not trained.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    vocab = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges: list[tuple[str, str]] = []
    for text in _MERGED:
        # a piece as the pre-tokenizer writes it: one printable symbol per byte
        symbols = "".join(piece for piece, _ in pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(text))
        left = symbols[0]
        for right in symbols[1:]:
            if left + right not in vocab:
                vocab[left + right] = len(vocab)
                merges.append((left, right))
            left += right
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIALS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHATML_TEMPLATE
    return fast


def read_tokenizer(name: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or hub repository as it is there.

    Raises:
        ConfigError: It cannot be found or read.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        folder = fetch_tokenizer(name, trust_remote_code)
    if not any(path for pattern in _FILES for path in folder.glob(pattern)):
        # transformers may make an empty tokenizer up from config.json
        fix = "set model.tokenizer to a folder or hub name that has one"
        raise ConfigError("model.tokenizer", f"{folder}, without tokenizer files", "a folder with tokenizer.json", fix)
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (ImportError, OSError, ValueError, KeyError, TypeError) as error:
        text = " ".join(str(error).split())[:200]
        raise ConfigError(
            "model.tokenizer",
            f"{name} ({type(error).__name__}: {text})",
            "a folder with tokenizer.json, or a hub name",
            "set model.tokenizer to a folder that AutoTokenizer can load",
        ) from error
