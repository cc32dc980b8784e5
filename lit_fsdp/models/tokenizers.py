"""Tokenizers: the model's own, and a tiny one generated in memory to try recipes."""

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
"""ChatML; the assistant's content and its end token are supervised."""

_MERGED = (
    *(" the", " of", " and", " to", " in", " is", " you", " for", " that", " it", " with", " as", " are", " this"),
    *("ing", "ion", "ent", "er", "ed", "es", "ly", "assistant", "user", "system", "\n\n", "  "),
)


def load_tokenizer(source: ModelSource, config: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model, with the tokens of ``model.add_tokens`` and a pad token.

    If it has no pad token, its end of text is used: labels are masked by position, never by token. Added tokens may
    lack an embedding, like Gemma 3's image tokens: rows that contain such a token are rejected.

    Raises:
        ConfigError: It is missing, cannot be read, has no token to pad with, or other tokens lack an embedding.
    """
    name, field = source.tokenizer_source, "model.tokenizer"
    label = name or "the miniature's tokenizer"
    require(name or config.miniature, field, None, "a tokenizer folder or hub name", f"set {field}")
    tokenizer = read_tokenizer(name, config.trust_remote_code) if name else miniature_tokenizer()
    if config.add_tokens:
        fresh = add_special_tokens(tokenizer, config.add_tokens)
        _log.info("model.add_tokens: new in %s: %s", label, " ".join(fresh) or "none, all tokens exist")
    if tokenizer.pad_token is None:
        require(tokenizer.eos_token, field, label, "a tokenizer with an eos or pad token")
        _log.info("%s has no pad token: padding with %s", label, tokenizer.eos_token)
        tokenizer.pad_token = tokenizer.eos_token
    numbers, limit = tokenizer.get_vocab(), source.num_embeddings
    beyond = sorted((token for token in numbers if numbers[token] >= limit), key=numbers.__getitem__)
    allowed = f"at most the {limit} embeddings of the model, except for added tokens"
    given, fix = f"{label} with {len(tokenizer)} tokens", "name the tokenizer that belongs to the model"
    require(tokenizer.added_tokens_encoder.keys() >= {*beyond}, field, given, allowed, fix)
    if beyond:
        text = "%s: tokens without an embedding in the model; rows that contain them are rejected: %s"
        _log.warning(text, label, ", ".join(beyond[:5]) + (", …" if beyond[5:] else ""))
    return tokenizer


def add_special_tokens(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str]) -> list[str]:
    """Make ``tokens`` special tokens of a tokenizer, in place: never split, and skipped in decoded text.

    Returns the tokens with a new id; tokens that were in the vocabulary keep their ids.
    """
    vocabulary = tokenizer.get_vocab()
    marked = [AddedToken(t, special=True, normalized=False) for t in tokens if t not in tokenizer.added_tokens_encoder]
    tokenizer.add_tokens(marked, special_tokens=True)
    return [token for token in tokens if token not in vocabulary]


def pad_id(tokenizer: PreTrainedTokenizerBase, num_embeddings: int | None) -> int:
    """The token id for padding; padded positions are neither supervised nor attended to, so any id works."""
    known = (number for number in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if number is not None)
    return next(number for number in known if num_embeddings is None or number < num_embeddings)


def end_of_turn_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Id of the special token that the chat template writes after the assistant's content; None without one."""
    word = "qzx0xzq"
    conversation = [{"role": "user", "content": "a"}, {"role": "assistant", "content": word}]
    try:
        text = str(tokenizer.apply_chat_template(conversation, tokenize=False))
    except Exception:  # Jinja's errors, any error a template raises, and ValueError without a template
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
    """Load the unmodified tokenizer of a folder, GGUF file or hub repository."""
    path, field = Path(name).expanduser(), "model.tokenizer"
    if not path.exists():
        path = fetch(name, "tokenizer", trust_remote_code)
    with reading(path, field):
        if path.is_file():
            return _gguf_tokenizer(path)
    found = [file for pattern in TOKENIZER_FILES for file in path.glob(pattern)]
    # else transformers may create an empty tokenizer from config.json
    require(found, field, f"{path}, without tokenizer files", "a folder with tokenizer.json, or a hub name")
    with reading(path, field):
        try:
            return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        except ImportError:  # Mistral models: mistral-common is installed without its dependencies
            return PreTrainedTokenizerFast.from_pretrained(path)


_ENDS = ("bos_token_id", "eos_token_id")


def _gguf_tokenizer(file: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a GGUF file with details that transformers drops: context length and SmolLM's digit splitting.

    Not through AutoTokenizer, which treats every llama as Code Llama, with its special tokens.
    """
    from gguf import GGUFReader

    tokenizer = PreTrainedTokenizerFast.from_pretrained(file.parent, gguf_file=file.name)
    fields = GGUFReader(file).fields
    if "tokenizer.ggml.pre" in fields and fields["tokenizer.ggml.pre"].contents() == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)  # before spaces are joined to the next word
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    held = {name: fields[f"tokenizer.ggml.{name}"].contents() for name in _ENDS if f"tokenizer.ggml.{name}" in fields}
    if any(getattr(tokenizer, name) != value for name, value in held.items()):
        # transformers < 5.18 swaps both ids and drops add_bos_token: delete when the minimum is 5.18
        for name, value in held.items():
            setattr(tokenizer, name, value)
        adds = fields.get("tokenizer.ggml.add_bos_token")
        tokenizer.add_bos_token = adds is not None and adds.contents()
    length = fields[f"{fields['general.architecture'].contents()}.context_length"]
    tokenizer.model_max_length = int(length.contents())
    return tokenizer
