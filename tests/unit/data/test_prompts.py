"""What the model is asked: the template and the masks of training, for rows of every format, answered or not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lit_fsdp import CausalLMDataModule
from lit_fsdp.errors import DataError
from lit_fsdp.models.tokenizers import miniature_tokenizer

USER, ANSWER = {"role": "user", "content": "Two and two?"}, {"role": "assistant", "content": "Four."}
NO = {"role": "assistant", "content": "Five."}
ASKED = "<|im_start|>user\nTwo and two?<|im_end|>\n<|im_start|>assistant\n"
WANTED = "Four.<|im_end|>"
CASES: list[tuple[dict[str, Any], str, str | None]] = [
    ({"messages": [USER, ANSWER]}, ASKED, WANTED),
    ({"messages": [USER, ANSWER, USER, ANSWER]}, f"{ASKED}{WANTED}\n{ASKED}", WANTED),
    ({"messages": [USER]}, ASKED, None),
    ({"messages": [USER, ANSWER, USER]}, f"{ASKED}{WANTED}\n{ASKED}", None),
    ({"conversations": [{"from": "human", "value": "Two and two?"}, {"from": "gpt", "value": "Four."}]}, ASKED, WANTED),
    ({"conversations": [{"from": "human", "value": "Two and two?"}]}, ASKED, None),
    ({"instruction": "Two and", "input": "two?", "output": ""}, ASKED.replace("and two", "and\n\ntwo"), None),
    ({"instruction": "Two and two?", "output": "Four."}, ASKED, WANTED),
    ({"instruction": "Two and two?"}, ASKED, None),
    ({"prompt": [USER], "completion": [ANSWER]}, ASKED, WANTED),
    ({"prompt": [USER]}, ASKED, None),
    ({"prompt": [USER, ANSWER, USER]}, f"{ASKED}{WANTED}\n{ASKED}", None),
    ({"prompt": "2 + 2 =", "completion": " 4"}, "2 + 2 =", " 4<|im_end|>"),
    ({"prompt": "2 + 2 ="}, "2 + 2 =", None),
    ({"text": "Once upon"}, "Once upon", None),
    ({"prompt": [USER], "chosen": [ANSWER], "rejected": [NO]}, ASKED, WANTED),
    ({"chosen": [USER, ANSWER], "rejected": [USER, NO]}, ASKED, WANTED),
    ({"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}, "2 + 2 =", " 4<|im_end|>"),
]


def prompts_of(
    path: Path, rows: list[dict[str, Any]], of: str | None = None, **data: Any
) -> list[tuple[str, str | None]]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = miniature_tokenizer()
    module = CausalLMDataModule(cache_dir=str(path.parent / "cache"), **data)
    module.attach(tokenizer, 0)
    found = module.prompts(of or str(path))
    return [(tokenizer.decode(p.input_ids), p.wanted and tokenizer.decode(p.wanted)) for p in found]


def test_rows_of_every_format(tmp_path: Path) -> None:
    rows = [row for row, _, _ in CASES]
    expected = [(asked, wanted) for _, asked, wanted in CASES]
    for setting in ({}, {"train_on_prompt": True}, {"format": "text"}, {"truncation": "error"}):
        assert prompts_of(tmp_path / "asked.jsonl", rows, **setting) == expected


def test_the_first_validation_rows(tmp_path: Path) -> None:
    """In the order of the file, without what is dropped, and out of the training rows with val_split."""
    file = tmp_path / "rows.jsonl"
    rows = [{"messages": [{"role": "user", "content": str(i)}, ANSWER]} for i in range(20)]
    rows.insert(1, {"messages": [USER]})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def asked(of: int, **data: Any) -> list[str]:
        module = CausalLMDataModule(cache_dir=str(tmp_path / "cache"), **data)
        module.attach(tokenizer := miniature_tokenizer(), 0)
        found = module.prompts(of)
        assert all(tokenizer.decode(prompt.wanted) == WANTED for prompt in found)
        return [tokenizer.decode(prompt.input_ids, skip_special_tokens=True).split("\n")[1] for prompt in found]

    for packing in (False, True):
        assert asked(3, val=str(file), packing=packing) == ["0", "1", "2"]
    held_out = asked(100, train=str(file), val_split=5)
    assert len(held_out) == 5
    assert held_out == sorted(held_out, key=int) != ["0", "1", "2", "3", "4"]
    assert asked(2, train=str(file), val_split=5) == held_out[:2]


def test_bad_prompts(tmp_path: Path) -> None:
    long = {"role": "user", "content": "long " * 300}
    for row, said in (
        ({"messages": []}, "a conversation is a list of at least one message"),
        ({"answer": 1}, "of no known row format"),
        ({"messages": [long, ANSWER]}, "nothing to ask (cut before the assistant's turn)"),
    ):
        with pytest.raises(DataError) as caught:
            prompts_of(tmp_path / "asked.jsonl", [{"text": "fine"}, row], max_seq_length=64)
        assert said in str(caught.value)
        assert "asked.jsonl:2" in str(caught.value)
    with pytest.raises(DataError, match="no such file"):
        prompts_of(tmp_path / "asked.jsonl", [], of=str(tmp_path / "none.jsonl"))
