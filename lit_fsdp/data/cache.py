"""Tokenised rows as flat arrays on disk, made once per content and mapped into memory by every rank."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from lit_fsdp.config.data import DataConfig
from lit_fsdp.data.files import Row
from lit_fsdp.data.formats import find_format, to_conversation
from lit_fsdp.data.masks import Encoded
from lit_fsdp.data.sources import Source, find_sources
from lit_fsdp.data.templates import ChatTemplate
from lit_fsdp.errors import DataError
from lit_fsdp.host import cache_root, make_once

_log = logging.getLogger(__name__)
_VERSION = 2
_CHUNK = 512
_ARRAYS: dict[str, np.dtype[Any]] = {
    "input_ids": np.dtype("<i4"),
    "supervised": np.dtype("u1"),
    "offsets": np.dtype("<i8"),
}
_NO_TURN, _CUT = "without an assistant turn", "cut before the assistant's turn"


@dataclass(frozen=True)
class TokenisedRows:
    """Rows of tokens, memory-mapped; sent to another process as the name of their folder."""

    folder: Path
    meta: dict[str, Any]
    """Counts: rows read, dropped by reason, truncated, tokens, supervised tokens; and the two fingerprints."""
    input_ids: np.ndarray
    supervised: np.ndarray
    offsets: np.ndarray

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


def prepare_rows(sources: str | list[str], config: DataConfig, template: ChatTemplate) -> TokenisedRows:
    """Tokenise the rows of some sources, or take them from the cache; safe when many processes start together.

    Raises:
        DataError: A source or row is bad (file and line are named), or no token of any row is supervised.
    """
    found = find_sources(sources)
    fingerprint = _fingerprint(found, config, template)
    root = Path(config.cache_dir).expanduser() if config.cache_dir else cache_root()
    name = found[0].name if len(found) == 1 else f"{found[0].name} and {len(found) - 1} more"
    folder = root / "data" / fingerprint

    def make(partial: Path) -> None:
        meta = {"fingerprint": fingerprint, **_write(partial, found, config, template)}
        (partial / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")

    make_once(folder, make, f"tokenising {name}")
    rows = open_rows(folder)
    _log.info("%s: %s", name, summary(rows.meta))
    return rows


def open_rows(folder: Path) -> TokenisedRows:
    """Map rows that :func:`prepare_rows` has written.

    Raises:
        DataError: The folder is damaged.
    """
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        arrays = {name: np.memmap(folder / f"{name}.bin", dtype, mode="r") for name, dtype in _ARRAYS.items()}
        sizes = [len(arrays[name]) for name in _ARRAYS]
        whole = sizes == [meta["tokens"], meta["tokens"], meta["rows"] + 1]
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{folder}: damaged tokenised rows ({error})\n  fix:     delete this folder") from error
    if not whole:
        raise DataError(f"{folder}: damaged tokenised rows (files of another length)\n  fix:     delete this folder")
    return TokenisedRows(folder, meta, **arrays)


def summary(meta: dict[str, Any]) -> str:
    """One line on what became of the rows."""
    dropped = ", ".join(f"{count} {reason}" for reason, count in meta["dropped"].items())
    return (
        f"{meta['rows_read']} rows read, dropped {dropped or '0'}, truncated {meta['truncated']}, "
        f"{100 * meta['supervised_tokens'] / meta['tokens']:.1f} % of {meta['tokens']} tokens supervised, "
        f"mean length {meta['tokens'] / meta['rows']:.0f}"
    )


def _fingerprint(sources: Sequence[Source], config: DataConfig, template: ChatTemplate) -> str:
    settings = {
        "version": _VERSION,
        "sources": [source.digest for source in sources],
        "format": config.format,
        "supervise": config.supervise,
        "max_seq_length": config.max_seq_length,
        "template": template.text,
        "special": {key: str(value) for key, value in template.tokenizer.special_tokens_map.items()},
        "tokenizer": template.encoder.text,
    }
    return _hash(json.dumps(settings, sort_keys=True).encode())


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _write(folder: Path, sources: Sequence[Source], config: DataConfig, template: ChatTemplate) -> dict[str, Any]:
    """Tokenise everything into ``folder``; a data set with nothing to learn raises and leaves nothing behind."""
    kept = _Kept(config.max_seq_length)
    with (folder / "input_ids.bin").open("wb") as ids, (folder / "supervised.bin").open("wb") as masks:
        for source in sources:
            for encoded in _encode(source, config, template):
                kept.add(encoded, ids.write, masks.write)
    if not kept.rows:
        dropped = ", ".join(f"{count} {reason}" for reason, count in kept.dropped.items())
        raise DataError(
            f"{', '.join(source.name for source in sources)}: no token of any row is supervised; dropped {dropped}"
            "\n  fix:     rows need an assistant turn within data.max_seq_length tokens"
        )
    lengths = np.array(kept.lengths, dtype=np.int64)
    np.concatenate([[0], lengths.cumsum()]).astype(_ARRAYS["offsets"]).tofile(folder / "offsets.bin")
    order = json.dumps([source.digest for source in sources]).encode() + np.array(kept.rows, dtype="<i8").tobytes()
    return {
        "order_fingerprint": _hash(order),
        "rows_read": kept.read,
        "rows": len(kept.rows),
        "dropped": dict(kept.dropped),
        "truncated": kept.truncated,
        "tokens": int(lengths.sum()),
        "supervised_tokens": kept.supervised_tokens,
        "longest": int(lengths.max()),
    }


def _encode(source: Source, config: DataConfig, template: ChatTemplate) -> Iterator[Encoded]:
    rows = source.rows()
    form = config.format
    while chunk := list[Row](islice(rows, _CHUNK)):
        if form == "auto":
            form = find_format(set(chunk[0][1]), chunk[0][0])
            _log.info("%s: rows of format %s", source.name, form)
        places = [place for place, _ in chunk]
        talks = [to_conversation(row, form, place) for place, row in chunk]
        yield from template.encode(talks, places)


@dataclass
class _Kept:
    """Which rows are kept, and why others are not."""

    max_seq_length: int
    read: int = 0
    rows: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    truncated: int = 0
    supervised_tokens: int = 0

    def add(self, row: Encoded, write_ids: Callable[[bytes], Any], write_mask: Callable[[bytes], Any]) -> None:
        self.read += 1
        ids, mask = row.input_ids[: self.max_seq_length], row.supervised[: self.max_seq_length]
        if not mask.any():
            self.dropped[_CUT if row.supervised.any() else _NO_TURN] += 1
            return
        self.truncated += len(ids) < len(row.input_ids)
        self.rows.append(self.read - 1)
        self.lengths.append(len(ids))
        self.supervised_tokens += int(mask.sum())
        write_ids(ids.astype(_ARRAYS["input_ids"]).tobytes())
        write_mask(mask.astype(_ARRAYS["supervised"]).tobytes())
