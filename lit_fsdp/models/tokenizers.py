"""Tokenizers: the model's own, and a tiny one made in memory for trying recipes out."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from lit_fsdp.config.model import ModelConfig
from lit_fsdp.errors import ConfigError
from lit_fsdp.models.gguf_tokenizer import gguf_tokenizer
from lit_fsdp.models.hub import TOKENIZER_FILES, fetch_tokenizer
from lit_fsdp.models.quiet import reading
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
"""ChatML with the assistant's words and its end mark as the part that is supervised."""

_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
_MERGED = (
    *(" the", " of", " and", " to", " in", " is", " you", " for", " that", " it", " with", " as", " are", " this"),
    *("ing", "ion", "ent", "er", "ed", "es", "ly", "assistant", "user", "system", "\n\n", "  "),
)


def load_tokenizer(source: ModelSource, config: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer that goes with a model, with the tokens of ``model.add_tokens`` and a pad token.

    Args:
        source: Where it is, and the vocabulary it must fit.
        config: The ``model`` section.

    Raises:
        ConfigError: There is no tokenizer, it cannot be read, has more tokens than the model has embeddings, or lacks
            what it would be padded with.
    """
    label = source.tokenizer_source or "the miniature's tokenizer"
    if source.tokenizer_source is not None:
        tokenizer = read_tokenizer(source.tokenizer_source, config.trust_remote_code)
    elif config.miniature:
        tokenizer = miniature_tokenizer()
    else:
        raise ConfigError("model.tokenizer", None, "a tokenizer folder or hub name", "set model.tokenizer")
    if config.add_tokens:
        fresh = add_special_tokens(tokenizer, config.add_tokens)
        if fresh:
            _log.info("model.add_tokens: added to %s as special tokens: %s", label, " ".join(fresh))
        if len(fresh) < len(config.add_tokens):
            there = " ".join(token for token in config.add_tokens if token not in fresh)
            _log.info("model.add_tokens: in %s already, under their old numbers: %s", label, there)
    set_pad_token(tokenizer, config.pad_token, label)
    embeddings = source.hf_config.get_text_config().vocab_size
    if len(tokenizer) > embeddings:
        raise ConfigError(
            "model.tokenizer",
            f"{label} with {len(tokenizer)} tokens",
            f"at most the {embeddings} embeddings of {source.label}",
            "name the tokenizer that belongs to the model, or in model.add_tokens the tokens that have no embedding",
        )
    return tokenizer


def add_special_tokens(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str]) -> list[str]:
    """Make ``tokens`` special tokens of a tokenizer, in place: never split, and left out of decoded text.

    Returns:
        Those that have a new number; pieces of text that were in the vocabulary keep theirs.

    Raises:
        ConfigError: The tokenizer does not read one of them as one token afterwards.
    """
    from tokenizers import AddedToken

    vocabulary = tokenizer.get_vocab()
    marked = [AddedToken(t, special=True, normalized=False) for t in tokens if t not in tokenizer.added_tokens_encoder]
    tokenizer.add_tokens(marked, special_tokens=True)
    for token in tokens:
        if tokenizer.encode(token, add_special_tokens=False) != [tokenizer.convert_tokens_to_ids(token)]:
            fix = "leave it out of add_tokens, or write it as in the model's own vocabulary"
            raise ConfigError("model.add_tokens", repr(token), "text that the tokenizer reads as one token", fix)
    return [token for token in tokens if token not in vocabulary]


def set_pad_token(tokenizer: PreTrainedTokenizerBase, pad_token: str | None, label: str) -> None:
    """Give a tokenizer the pad token that the recipe names, or its end of text if it has none, in place, and say so.

    No token is made up for it, so the vocabulary stays as it is. Labels are masked by position, never by token, so
    the end of text is supervised although it is padded with.

    Raises:
        ConfigError: ``pad_token`` is no token, or there is neither a pad token nor an end of text.
    """
    if pad_token is not None:
        if pad_token not in tokenizer.get_vocab():
            raise ConfigError(
                "model.pad_token",
                f"{pad_token!r}, which {label} does not have",
                "one of its tokens, or one that is added",
                f"write add_tokens: ['{pad_token}'] beside it, or drop pad_token",
            )
        if tokenizer.pad_token != pad_token:
            _log.info("%s: padding with %s (model.pad_token), was %s", label, pad_token, tokenizer.pad_token)
        tokenizer.pad_token = pad_token
    elif tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            fix = "set model.pad_token to one of its tokens"
            raise ConfigError("model.tokenizer", label, "a tokenizer with an eos or pad token", fix)
        tokenizer.pad_token = tokenizer.eos_token
        _log.info("%s has no pad token: padding with %s", label, tokenizer.eos_token)


def pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The number put where a batch has no token: the pad token's, of a foreign tokenizer without one its end's, or 0.

    Nothing is supervised there and nothing looks there, so any number will do.
    """
    for number in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if number is not None:
            return int(number)
    return 0


def end_of_turn_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token that its chat template writes after what the assistant says; None if it writes none.

    Found by rendering a placeholder; templates that refuse such a conversation have none here.
    """
    word = "qzx0xzq"
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": word}]
    try:
        text = str(tokenizer.apply_chat_template(talk, tokenize=False))
    except Exception:  # Jinja's errors, whatever a template raises, and ValueError where there is none
        return None
    after = text.partition(word)[2].lstrip()
    special = {str(token): int(number) for token, number in tokenizer.added_tokens_encoder.items() if token}
    mark = max((token for token in special if after.startswith(token)), key=len, default=None)
    return None if mark is None else special[mark]


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


def find_tokenizer(name: str, trust_remote_code: bool) -> Path:
    """The folder or GGUF file of a tokenizer, fetched from the hub if there is none of that name."""
    path = Path(name).expanduser()
    return path if path.exists() else fetch_tokenizer(name, trust_remote_code)


def read_tokenizer(name: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder, GGUF file or hub repository as it is there.

    Raises:
        ConfigError: It cannot be found or read.
    """
    folder = find_tokenizer(name, trust_remote_code)
    if folder.suffix == ".gguf" and folder.is_file():
        with reading(folder):
            return gguf_tokenizer(folder)
    if not any(path for pattern in TOKENIZER_FILES for path in folder.glob(pattern)):
        # transformers may make an empty tokenizer up from config.json
        fix = "set model.tokenizer to a folder or hub name that has one"
        raise ConfigError("model.tokenizer", f"{folder}, without tokenizer files", "a folder with tokenizer.json", fix)
    try:
        try:
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        except ImportError:  # of Mistral models: mistral-common, if it stands there without its dependencies
            if not (folder / "tokenizer.json").is_file():
                raise
            return PreTrainedTokenizerFast.from_pretrained(folder)
    except (ImportError, OSError, ValueError, KeyError, TypeError) as error:
        text = " ".join(str(error).split())[:200]
        raise ConfigError(
            "model.tokenizer",
            f"{name} ({type(error).__name__}: {text})",
            "a folder with tokenizer.json, or a hub name",
            "set model.tokenizer to a folder that AutoTokenizer can load",
        ) from error
