"""Tokenizers: the model's own, and a tiny one made in memory for trying recipes out."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from lit_fsdp.config.model import ModelConfig
from lit_fsdp.errors import require
from lit_fsdp.models.hub import TOKENIZER_FILES, fetch, reading
from lit_fsdp.models.weights import ModelSource

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

_MERGED = (
    *(" the", " of", " and", " to", " in", " is", " you", " for", " that", " it", " with", " as", " are", " this"),
    *("ing", "ion", "ent", "er", "ed", "es", "ly", "assistant", "user", "system", "\n\n", "  "),
)


def load_tokenizer(source: ModelSource, config: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer that goes with a model, with the tokens of ``model.add_tokens`` and a pad token.

    Without one of its own it pads with its end of text: labels are masked by position, never by token. Added tokens
    may be without an embedding, as Gemma 3's for images: rows that hold one are refused.

    Raises:
        ConfigError: It is not there, cannot be read or padded with, or has other tokens without an embedding.
    """
    name, field = source.tokenizer_source, "model.tokenizer"
    label = name or "the miniature's tokenizer"
    require(name or config.miniature, field, None, "a tokenizer folder or hub name", f"set {field}")
    tokenizer = read_tokenizer(name, config.trust_remote_code) if name else miniature_tokenizer()
    if config.add_tokens:
        fresh = add_special_tokens(tokenizer, config.add_tokens)
        _log.info("model.add_tokens: new in %s: %s", label, " ".join(fresh) or "none, as it has them all")
    if tokenizer.pad_token is None:
        require(tokenizer.eos_token, field, label, "a tokenizer with an eos or pad token")
        _log.info("%s has no pad token: padding with %s", label, tokenizer.eos_token)
        tokenizer.pad_token = tokenizer.eos_token
    numbers, limit = tokenizer.get_vocab(), source.num_embeddings
    beyond = sorted((token for token in numbers if numbers[token] >= limit), key=numbers.__getitem__)
    allowed = f"at most the {limit} embeddings of the model, but for added tokens"
    given, fix = f"{label} with {len(tokenizer)} tokens", "name the tokenizer that belongs to the model"
    require(tokenizer.added_tokens_encoder.keys() >= {*beyond}, field, given, allowed, fix)
    if beyond:
        text = "%s: tokens without an embedding in the model, so a row that holds one is refused: %s"
        _log.warning(text, label, ", ".join(beyond[:5]) + (", …" if beyond[5:] else ""))
    return tokenizer


def add_special_tokens(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str]) -> list[str]:
    """Make ``tokens`` special tokens of a tokenizer, in place: never split, and left out of decoded text.

    Gives those that have a new number; pieces of text that were in the vocabulary keep theirs.
    """
    vocabulary = tokenizer.get_vocab()
    marked = [AddedToken(t, special=True, normalized=False) for t in tokens if t not in tokenizer.added_tokens_encoder]
    tokenizer.add_tokens(marked, special_tokens=True)
    return [token for token in tokens if token not in vocabulary]


def pad_id(tokenizer: PreTrainedTokenizerBase, num_embeddings: int | None = None) -> int:
    """The number put where a batch has no token; nothing is supervised there and nothing looks, so any will do."""
    known = (number for number in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if number is not None)
    return next(number for number in known if num_embeddings is None or number < num_embeddings)


def end_of_turn_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token that its chat template writes after what the assistant says; None if it writes none."""
    word = "qzx0xzq"
    conversation = [{"role": "user", "content": "a"}, {"role": "assistant", "content": word}]
    try:
        text = str(tokenizer.apply_chat_template(conversation, tokenize=False))
    except Exception:  # Jinja's errors, whatever a template raises, and ValueError where there is none
        return None
    after = text.partition(word)[2].lstrip()
    special = {str(token): int(number) for token, number in tokenizer.added_tokens_encoder.items() if token}
    mark = max((token for token in special if after.startswith(token)), key=len, default=None)
    return None if mark is None else special[mark]


def miniature_tokenizer() -> PreTrainedTokenizerBase:
    """A byte-level BPE of under 512 tokens: every byte, some frequent pieces, ChatML marks and a chat template."""
    vocab = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges: list[tuple[str, str]] = []
    for text in _MERGED:
        # a piece as the pre-tokenizer writes it: one printable symbol per byte
        symbols = "".join(piece for piece, _ in pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(text))
        for end in range(1, len(symbols)):
            pair = symbols[:end], symbols[end]
            if "".join(pair) not in vocab:
                vocab["".join(pair)] = len(vocab)
                merges.append(pair)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    marks = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in marks])
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
    """The tokenizer of a folder, GGUF file or hub repository as it is there."""
    path, field = Path(name).expanduser(), "model.tokenizer"
    if not path.exists():
        path = fetch(name, "tokenizer", trust_remote_code)
    with reading(path, field):
        if path.is_file():
            return _gguf_tokenizer(path)
    found = [file for pattern in TOKENIZER_FILES for file in path.glob(pattern)]
    # else transformers may make an empty tokenizer up from config.json
    require(found, field, f"{path}, without tokenizer files", "a folder with tokenizer.json, or a hub name")
    with reading(path, field):
        try:
            return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        except ImportError:  # of Mistral models: mistral-common, if it stands there without its dependencies
            return PreTrainedTokenizerFast.from_pretrained(path)


_ENDS = ("bos_token_id", "eos_token_id")


def _gguf_tokenizer(file: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a GGUF file with what transformers drops: the context length, and that SmolLM splits digits.

    Not through AutoTokenizer, which takes every llama for Code Llama, with its special tokens.
    """
    from gguf import GGUFReader

    tokenizer = PreTrainedTokenizerFast.from_pretrained(file.parent, gguf_file=file.name)
    fields = GGUFReader(file).fields
    if "tokenizer.ggml.pre" in fields and fields["tokenizer.ggml.pre"].contents() == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)  # before spaces are joined to what follows them
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    held = {name: fields[f"tokenizer.ggml.{name}"].contents() for name in _ENDS if f"tokenizer.ggml.{name}" in fields}
    if any(getattr(tokenizer, name) != value for name, value in held.items()):
        # transformers < 5.18 swaps these two, and adds neither: delete when the minimum is 5.18
        for name, value in held.items():
            setattr(tokenizer, name, value)
        adds = fields.get("tokenizer.ggml.add_bos_token")
        tokenizer.add_bos_token = adds is not None and adds.contents()
    length = fields[f"{fields['general.architecture'].contents()}.context_length"]
    tokenizer.model_max_length = int(length.contents())
    return tokenizer
