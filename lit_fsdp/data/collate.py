"""Rows to a padded batch. Shapes: B rows, T tokens of the longest row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from lit_fsdp.data.cache import TokenisedRows
from lit_fsdp.data.order import FILLER

IGNORED = -100


def collate(rows: TokenisedRows, indices: Sequence[int], pad_id: int) -> dict[str, torch.Tensor]:
    """The batch of some rows, padded on the right to the longest of them.

    Args:
        rows: Token ids and supervision per row.
        indices: Row ids; a filler (-1) becomes a single token without supervision.
        pad_id: Put where there is no token. Labels never depend on it: it may well be a token that is learnt.

    Returns:
        int64 tensors: ``input_ids``, ``attention_mask``, ``labels`` (B, T), the last aligned with the first and -100
        where nothing is learnt, and ``row`` (B,). ``counts`` is float64, in the order of
        :data:`lit_fsdp.metrics.counts.BATCH_COUNTS`.
    """
    parts = [(np.array([pad_id]), np.array([False])) if i == FILLER else rows.row(i) for i in indices]
    longest = max(len(ids) for ids, _ in parts)
    batch = {
        "input_ids": torch.full((len(parts), longest), pad_id, dtype=torch.int64),
        "attention_mask": torch.zeros((len(parts), longest), dtype=torch.int64),
        "labels": torch.full((len(parts), longest), IGNORED, dtype=torch.int64),
        "row": torch.tensor(list(indices), dtype=torch.int64),
    }
    for b, (ids, supervised) in enumerate(parts):
        tokens = torch.from_numpy(ids.astype(np.int64))
        batch["input_ids"][b, : len(ids)] = tokens
        batch["attention_mask"][b, : len(ids)] = 1
        batch["labels"][b, : len(ids)] = torch.where(torch.from_numpy(supervised.astype(bool)), tokens, IGNORED)
    lengths = [len(ids) for (ids, _), index in zip(parts, indices, strict=True) if index != FILLER]
    squared = sum(length * length for length in lengths)
    batch["counts"] = torch.tensor(
        [sum(lengths), len(lengths), batch["input_ids"].numel(), squared], dtype=torch.float64
    )
    return batch
