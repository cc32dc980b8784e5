"""Rows of plain text and of token ids."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lit_fsdp.data.formats import find_format
from lit_fsdp.data.plain import MASK_COLUMNS, read_text, read_tokens
from lit_fsdp.errors import DataError


def test_formats_by_their_columns():
    assert find_format({"text", "id"}, "x") == "text"
    assert find_format({"text", "input_ids"}, "x") == "tokens"
    assert find_format({"text", "prompt", "completion"}, "x") == "prompt_completion"


def test_text():
    assert read_text({"text": "a\nb"}, "x") == "a\nb"
    for row, message in [
        ({}, "no 'text'"),
        ({"text": None}, "text expected, not NoneType"),
        ({"text": "\ud83d"}, "half"),
    ]:
        with pytest.raises(DataError, match=f"^rows:1: .*{message}"):
            read_text(row, "rows:1")


@pytest.mark.parametrize("ids", [[5, 6, 7], (5, 6, 7), np.array([5, 6, 7], dtype=np.uint16), "[5, 6, 7]"])
def test_ids_alone(ids: Any):
    found, mask = read_tokens({"input_ids": ids}, "x")
    assert found.tolist() == [5, 6, 7]
    assert found.dtype == np.int32
    assert mask is None


@pytest.mark.parametrize("column", [*MASK_COLUMNS, "labels"])
def test_masks(column: str):
    value: Any = [-100, 6, 7] if column == "labels" else [0, 1, 1]
    for form in (value, np.array(value), str(value)):
        mask = read_tokens({"input_ids": [5, 6, 7], column: form}, "x")[1]
        assert mask is not None
        assert mask.dtype == bool
        assert mask.tolist() == [False, True, True]


def test_padding_is_left_out():
    row = {"input_ids": [0, 5, 6, 0, 0], "attention_mask": [0, 1, 1, 0, 0], "labels": [-100, -100, 6, -100, -100]}
    ids, mask = read_tokens(row, "x")
    assert mask is not None
    assert (ids.tolist(), mask.tolist()) == ([5, 6], [False, True])
    assert read_tokens({"input_ids": [0], "attention_mask": [0]}, "x")[0].tolist() == []


def test_no_ids():
    assert read_tokens({"input_ids": []}, "x")[0].tolist() == []


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "no 'input_ids'"),
        ({"input_ids": [5, -1]}, r"input_ids\[1\] is -1, which is no token id"),
        ({"input_ids": [2**31]}, r"input_ids\[0\] is 2147483648"),
        ({"input_ids": [2**63]}, r"input_ids\[0\] is 9223372036854775808"),
        ({"input_ids": [10**30]}, "a list of integers expected, not list"),
        ({"input_ids": [1.0]}, "a list of integers expected"),
        ({"input_ids": [float("nan")]}, "a list of integers expected"),
        ({"input_ids": [True]}, "a list of integers expected"),
        ({"input_ids": [[1], [2, 3]]}, "a list of integers expected"),
        ({"input_ids": [[1]]}, "a list of integers expected"),
        ({"input_ids": "1 2"}, "are not JSON"),
        ({"input_ids": None}, "a list of integers expected, not NoneType"),
        ({"input_ids": [5, 6], "labels": [5]}, "1 labels for 2 input_ids"),
        ({"input_ids": [5, 6], "labels": [6, 7]}, r"labels\[0\] is 6, but input_ids\[0\] is 5\n.*not shifted"),
        ({"input_ids": [5, 6], "loss_mask": [0, 2]}, "a list of 0 and 1 expected"),
        ({"input_ids": [5, 6], "loss_mask": [0]}, "1 loss_mask for 2 input_ids"),
        ({"input_ids": [5, 6], "loss_mask": [0.5, 1]}, "a list of 0 and 1 expected"),
        ({"input_ids": [5, 6], "loss_mask": [0, 1], "labels": [5, 6]}, "loss_mask and labels say differently"),
        ({"input_ids": [5, 6, 7], "attention_mask": [1, 0, 1]}, "attention_mask leaves out tokens in the middle"),
    ],
)
def test_a_bad_row_is_named(row: dict[str, Any], message: str):
    with pytest.raises(DataError, match=rf"^rows\.parquet: row 3: .*{message}"):
        read_tokens(row, "rows.parquet: row 3")
