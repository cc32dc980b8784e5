"""What the model is asked: the template and the masks of training, for rows of every format, answered or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lit_fsdp import CausalLMDataModule
from lit_fsdp.errors import DataError
from lit_fsdp.models.tokenizers import miniature_tokenizer
from tests.unit.data.conftest import write_rows

USER, ANSWER = {"role": "user", "content": "Two and two?"}, {"role": "assistant", "content": "Four."}
NO = {"role": "assistant", "content": "Five."}
ASKED = "<|im_start|>user\nTwo and two?<|im_end|>\n<|im_start|>assistant\n"
WANTED = "Four.<|im_end|>"
CASES: list[tuple[dict[str, Any], str, str | None]] = [
    ({"messages": [USER, ANSWER]}, ASKED, WANTED),
    ({"messages": [USER, ANSWER, USER, ANSWER]}, f"{ASKED}{WANTED}\n{ASKED}", WANTED),
    ({"messages": [USER, ANSWER, USER]}, f"{ASKED}{WANTED}\n{ASKED}", None),
    ({"conversations": [{"from": "human", "value": "Two and two?"}, {"from": "gpt", "value": "Four."}]}, ASKED, WANTED),
    ({"instruction": "Two and", "input": "two?", "output": ""}, ASKED.replace("and two", "and\n\ntwo"), None),
    ({"instruction": "Two and two?", "output": "Four."}, ASKED, WANTED),
    ({"prompt": [USER], "completion": [ANSWER]}, ASKED, WANTED),
    ({"prompt": [USER, ANSWER, USER]}, f"{ASKED}{WANTED}\n{ASKED}", None),
    ({"prompt": "2 + 2 =", "completion": " 4"}, "2 + 2 =", " 4<|im_end|>"),
    ({"prompt": "2 + 2 ="}, "2 + 2 =", None),
    ({"text": "Once upon"}, "Once upon", None),
    ({"prompt": [USER], "chosen": [ANSWER], "rejected": [NO]}, ASKED, WANTED),
    ({"chosen": [USER, ANSWER], "rejected": [USER, NO]}, ASKED, WANTED),
]


def _prompts(of: str | int, folder: Path, **data: Any) -> list[tuple[str, str | None]]:
    """What is asked and what is wanted; ``of`` is a file, or a number of validation rows."""
    tokenizer = miniature_tokenizer()
    module = CausalLMDataModule(cache_dir=str(folder / "cache"), **data)
    module.attach(tokenizer, 0)
    return [(tokenizer.decode(p.input_ids), p.wanted and tokenizer.decode(p.wanted)) for p in module.prompts(of)]


def test_rows_of_every_format(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "asked.jsonl", [row for row, _, _ in CASES])
    for setting in ({}, {"train_on_prompt": True}, {"format": "text"}, {"truncation": "error"}):
        assert _prompts(file, tmp_path, **setting) == [(asked, wanted) for _, asked, wanted in CASES]


def test_the_first_validation_rows(tmp_path: Path) -> None:
    """In the order of the file, without what is dropped, and out of the training rows with val_split."""
    rows = [{"messages": [{"role": "user", "content": str(i)}, ANSWER]} for i in range(20)]
    file = write_rows(tmp_path / "rows.jsonl", [rows[0], {"messages": [USER]}, *rows[1:]])
    whole = [(ASKED.replace("Two and two?", str(i)), WANTED) for i in range(20)]
    for packing in (False, True):
        assert _prompts(3, tmp_path, val=file, packing=packing) == whole[:3]
    held_out = _prompts(100, tmp_path, train=file, val_split=5)
    assert len(held_out) == 5
    assert held_out == [one for one in whole if one in held_out] != whole[:5]
    assert _prompts(2, tmp_path, train=file, val_split=5) == held_out[:2]


def test_bad_prompts(tmp_path: Path) -> None:
    for row, said in (
        ({"answer": 1}, "cannot detect the row format from columns"),
        ({"messages": [{"role": "user", "content": "long " * 300}, ANSWER]}, "no usable prompt .cut before"),
    ):
        file = write_rows(tmp_path / "asked.jsonl", [{"text": "fine"}, row])
        with pytest.raises(DataError, match=rf"asked\.jsonl:2(?s:.*){said}"):
            _prompts(file, tmp_path, max_seq_length=64)
    with pytest.raises(DataError, match="no such file"):
        _prompts(str(tmp_path / "none.jsonl"), tmp_path)
