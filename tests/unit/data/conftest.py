"""Tokenizers to test on: the real SmolLM2 one, and a small one that is made in memory."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from lit_fsdp.config.data import DataConfig
from lit_fsdp.data.encode import RowEncoder

_MARKS = ("<s>", "</s>", "[INST]", "[/INST]", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>")


def byte_level_tokenizer(single: str | None = None) -> PreTrainedTokenizerFast:
    """One token per byte, a merge of two line breaks, and the marks of the usual templates; ``single`` as $A </s>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, "ĊĊ"])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("Ċ", "Ċ")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in _MARKS])
    if single:
        ends = [(mark, backend.token_to_id(mark)) for mark in ("<s>", "</s>")]
        backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=ends)
    named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **named, clean_up_tokenization_spaces=False)


def metaspace_tokenizer() -> PreTrainedTokenizerFast:
    """As SentencePiece does it: a blank before every text, and blanks that belong to the word after them."""
    words = ["▁a", "▁b", "▁", "a", "b", "▁[", "<unk>"]
    vocab = {token: i for i, token in enumerate(words)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "a"), ("▁", "b")], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    backend.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in _MARKS])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    """Write a file of the kind that its name says."""
    if path.suffix in (".csv", ".tsv"):
        with path.open("w", newline="", encoding="utf-8", errors="surrogatepass") as file:
            cells = [[*rows[0]], *(row.values() for row in rows)]
            csv.writer(file, delimiter="," if path.suffix == ".csv" else "\t").writerows(cells)
    elif path.suffix in (".parquet", ".arrow"):
        import pyarrow
        import pyarrow.parquet

        table = pyarrow.Table.from_pylist(rows)
        if path.suffix == ".parquet":
            pyarrow.parquet.write_table(table, path, row_group_size=9)
        else:
            with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table, max_chunksize=9)
    else:
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        text = f"[{','.join(lines)}]" if path.suffix == ".json" else "".join(f"{line}\n" for line in lines)
        content = text.encode(errors="surrogatepass")
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return str(path)


def encoder_of(tokenizer: Any, config: DataConfig, template: str | None = None) -> RowEncoder:
    """The encoder of a tokenizer whose own chat template is this one."""
    before, tokenizer.chat_template = tokenizer.chat_template, template
    try:
        return RowEncoder(tokenizer, config)
    finally:
        tokenizer.chat_template = before


@pytest.fixture(scope="session")
def small() -> PreTrainedTokenizerFast:
    return byte_level_tokenizer()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A data set on the hub with its commits, the last of which has no name; and what is asked for."""
    import datasets

    hub = SimpleNamespace(asked=[], commits={None: "a" * 40, "old": "b" * 40})

    def builder(name: str, configuration: str | None, revision: str | None) -> Any:
        return SimpleNamespace(hash=hub.commits.get(revision, revision))

    def load(path: str, name: str | None, split: str, revision: str, streaming: bool) -> Any:
        hub.asked.append((path, name, split, revision[0]))
        loaded = datasets.Dataset.from_list([{"text": f"{i} abc"} for i in range(40)])
        return loaded.to_iterable_dataset(num_shards=2) if streaming else loaded

    monkeypatch.setattr(datasets, "load_dataset_builder", builder)
    monkeypatch.setattr(datasets, "load_dataset", load)
    return hub
