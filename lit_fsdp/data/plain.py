"""Rows that are no conversations: plain text, and token ids with or without a mask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from lit_fsdp.data.cells import from_json, shown, text_of
from lit_fsdp.errors import DataError

_IGNORED = -100
_LARGEST_ID = 2**31 - 1
MASK_COLUMNS = ("supervised", "loss_mask", "completion_mask", "assistant_masks")
"""Columns of 0 and 1, beside ``labels``, that say which tokens of ``input_ids`` are learnt."""


def read_text(row: Mapping[str, Any], place: str) -> str:
    """The document of a row of format ``text``.

    Raises:
        DataError: There is no column ``text``, or it holds no text.
    """
    if "text" not in row:
        raise DataError(f"{place}: no 'text'; a row of format text has text")
    return text_of(row["text"], f"{place}: text")


def read_tokens(row: Mapping[str, Any], place: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Token ids and mask of a row of format ``tokens``.

    The mask comes from ``labels`` (-100: not learnt; never shifted) or from one of :data:`MASK_COLUMNS`. Tokens that
    ``attention_mask`` has as padding at either end are left out.

    Returns:
        int32 ids and bool mask, both of shape (T,); ``None`` for the mask if no column has one. The ids are not
        compared with a vocabulary here.

    Raises:
        DataError: Ids are no integers from 0 on, a mask is no mask or of another length, or two masks disagree.
    """
    if "input_ids" not in row:
        raise DataError(f"{place}: no 'input_ids'; a row of format tokens has input_ids")
    ids = _integers(row["input_ids"], f"{place}: input_ids")
    bad = np.flatnonzero((ids < 0) | (ids > _LARGEST_ID))
    if len(bad):
        raise DataError(
            f"{place}: input_ids[{bad[0]}] is {ids[bad[0]]}, which is no token id\n"
            "  fix:     token ids begin at 0; put -100 into labels, not here"
        )
    masks = [(name, _mask(row[name], ids, name, place)) for name in MASK_COLUMNS if row.get(name) is not None]
    if row.get("labels") is not None:
        masks.append(("labels", _of_labels(row["labels"], ids, place)))
    for name, mask in masks[1:]:
        if not np.array_equal(mask, masks[0][1]):
            raise DataError(
                f"{place}: {masks[0][0]} and {name} say differently what is learnt\n  fix:     keep one of them"
            )
    kept = _not_padding(row, ids, place)
    return ids[kept].astype(np.int32), masks[0][1][kept] if masks else None


def _of_labels(value: Any, ids: np.ndarray, place: str) -> np.ndarray:
    labels = _integers(value, f"{place}: labels")
    _same_length(labels, ids, "labels", place)
    wrong = np.flatnonzero((labels != ids) & (labels != _IGNORED))
    if len(wrong):
        i = wrong[0]
        raise DataError(
            f"{place}: labels[{i}] is {labels[i]}, but input_ids[{i}] is {ids[i]}\n"
            "  fix:     labels are not shifted: each is the token id at the same place, or -100 where nothing is learnt"
        )
    return labels != _IGNORED


def _mask(value: Any, ids: np.ndarray, name: str, place: str) -> np.ndarray:
    if isinstance(value, str):  # a cell of a CSV file
        value = from_json(value, f"{place}: {name}")
    found = _array(value)
    if found is None or found.ndim != 1 or (len(found) and found.dtype.kind not in "biu"):
        raise DataError(f"{place}: {name}: a list of 0 and 1 expected, not {shown(value)}")
    _same_length(found, ids, name, place)
    if not np.isin(found, (0, 1)).all():
        raise DataError(f"{place}: {name}: a list of 0 and 1 expected, not {shown(value)}")
    return found.astype(bool)


def _not_padding(row: Mapping[str, Any], ids: np.ndarray, place: str) -> slice:
    if row.get("attention_mask") is None:
        return slice(None)
    seen = np.flatnonzero(_mask(row["attention_mask"], ids, "attention_mask", place))
    if not len(seen):
        return slice(0, 0)
    if seen[-1] - seen[0] + 1 != len(seen):
        raise DataError(
            f"{place}: attention_mask leaves out tokens in the middle of input_ids\n"
            "  fix:     only padding at either end can be left out"
        )
    return slice(int(seen[0]), int(seen[-1]) + 1)


def _same_length(found: np.ndarray, ids: np.ndarray, name: str, place: str) -> None:
    if len(found) != len(ids):
        raise DataError(f"{place}: {len(found)} {name} for {len(ids)} input_ids\n  fix:     write one per token")


def _integers(value: Any, what: str) -> np.ndarray:
    if isinstance(value, str):  # a cell of a CSV file
        value = from_json(value, what)
    found = _array(value)
    if found is None or found.ndim != 1 or (len(found) and found.dtype.kind not in "iu"):
        raise DataError(f"{what}: a list of integers expected, not {shown(value)}")
    return found if found.dtype.kind == "u" else found.astype(np.int64)


def _array(value: Any) -> np.ndarray | None:
    if not isinstance(value, (list, tuple, np.ndarray)):
        return None
    try:
        return np.asarray(value)
    except (ValueError, OverflowError):
        return None
