"""Tokenised rows as every rank reads them: arrays mapped from disk, and how damage to them is noticed."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lit_fsdp.errors import CheckpointError, DataError
from lit_fsdp.host import make_once

ARRAYS: dict[str, np.dtype[Any]] = {
    "input_ids": np.dtype("<i4"),
    "supervised": np.dtype("u1"),
    "offsets": np.dtype("<i8"),
    "learnt": np.dtype("<i4"),
    "numbers": np.dtype("<i8"),
    "keys": np.dtype("<u8"),
    "digests": np.dtype("<u8"),
}
"""Files of a folder of tokenised rows (``NAME.bin``) and what is in them."""
_SPOTS = 64
_SPOT_BYTES = 4096


def _nothing() -> np.ndarray:
    return np.empty(0)


@dataclass(frozen=True)
class TokenisedRows:
    """Rows of tokens, memory-mapped; sent to another process as the name of their folder.

    A row is a sample: a row of a source after truncation, or one piece of a longer plain text.
    """

    folder: Path
    meta: dict[str, Any]
    """Counts: rows_read, rows, truncated, split, dropped by reason, tokens, supervised_tokens, longest; the same for
    each source in ``entries``; and the two fingerprints."""
    input_ids: np.ndarray
    """int32, all rows one after another."""
    supervised: np.ndarray
    """uint8, beside ``input_ids``."""
    offsets: np.ndarray
    """Where each row begins; int64, (rows + 1,)."""
    learnt: np.ndarray = field(default_factory=_nothing)
    """Supervised tokens of each row; int32."""
    numbers: np.ndarray = field(default_factory=_nothing)
    """Which row, over all sources as they were read, from 0, each one is or was cut from; int64."""
    keys: np.ndarray = field(default_factory=_nothing)
    """Hash of the content that each was made from, the same with any tokenizer; uint64."""
    digests: np.ndarray = field(default_factory=_nothing)
    """Hash of the token ids of each; uint64."""

    @property
    def fingerprint(self) -> str:
        """Of everything the tokens depend on."""
        return str(self.meta["fingerprint"])

    @property
    def order_fingerprint(self) -> str:
        """Of the sources and of which rows are kept, on which alone the order depends.

        So another tokenizer, template or place of the file leaves the order as it was.
        """
        return str(self.meta["order_fingerprint"])

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __reduce__(self) -> tuple[Any, ...]:
        return open_rows, (self.folder,)

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids (int32) and supervision (uint8) of one row, both of shape (T,)."""
        part = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        return self.input_ids[part], self.supervised[part]


def open_rows(folder: Path) -> TokenisedRows:
    """Map rows that :func:`lit_fsdp.data.cache.prepare_rows` has written.

    Raises:
        DataError: The folder is damaged: sizes and 64 places in each file are compared with what was written.
    """
    meta, arrays = open_arrays(folder, ARRAYS, "tokenised rows")
    sizes = dict.fromkeys(ARRAYS, meta["rows"])
    sizes |= {"input_ids": meta["tokens"], "supervised": meta["tokens"], "offsets": meta["rows"] + 1}
    for name, array in arrays.items():
        if len(array) != sizes[name]:
            raise damage(folder, f"{name}.bin has another length", "tokenised rows")
    return TokenisedRows(folder, meta, **arrays)


def open_arrays(
    folder: Path, dtypes: Mapping[str, np.dtype[Any]], what: str
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """``meta.json`` and mapped arrays of a folder, compared with ``spot_check`` in it.

    Raises:
        DataError: A file is missing or is not what was written.
    """
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        for name in dtypes:
            if spot_check(folder / f"{name}.bin") != meta["spot_check"][name]:
                raise damage(folder, f"{name}.bin is not what was written", what)
        return meta, {name: np.memmap(folder / f"{name}.bin", dtype, mode="r") for name, dtype in dtypes.items()}
    except DataError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise damage(folder, str(error), what) from error


def make_arrays(folder: Path, make: Callable[[Path], None], what: str) -> None:
    """As :func:`lit_fsdp.host.make_once`, for data.

    Raises:
        DataError: The disk is full, or the place cannot be written.
    """
    try:
        make_once(folder, make, what)
    except CheckpointError as error:
        why = error.__cause__.strerror if isinstance(error.__cause__, OSError) else error
        raise DataError(
            f"{what}: {folder} cannot be written ({why})\n"
            "  fix:     make room there, or set data.cache_dir or LIT_FSDP_CACHE to another place"
        ) from error


def damage(folder: Path, found: str, what: str) -> DataError:
    """The error that names a damaged folder."""
    return DataError(f"{folder}: damaged {what} ({found})\n  fix:     delete this folder, it will be made again")


def spot_check(path: Path) -> str:
    """Size of a file and a hash of 64 places spread over it, the first and the last among them; cheap at any size."""
    digest = hashlib.blake2b(digest_size=8)
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        last = max(0, size - _SPOT_BYTES)
        for spot in range(_SPOTS):
            start = last * spot // (_SPOTS - 1)
            file.seek(start)
            digest.update(file.read(_SPOT_BYTES))
            if last == 0:
                break
    return f"{size}/{digest.hexdigest()}"
