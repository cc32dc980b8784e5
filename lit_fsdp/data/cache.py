"""Tokenised rows as flat arrays on disk, made once per content and mapped into memory by every rank."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lit_fsdp.config.data import DataConfig, Sources
from lit_fsdp.data.encode import CUT, TOO_LONG, RowEncoder
from lit_fsdp.data.pool import in_order, usable_cores
from lit_fsdp.data.rows import ARRAYS, TokenisedRows, make_arrays, open_rows, spot_check
from lit_fsdp.data.sources import Source, find_sources
from lit_fsdp.data.tokenise import Block, Task, encode_chunk
from lit_fsdp.errors import DataError
from lit_fsdp.host import cache_root

_log = logging.getLogger(__name__)
_VERSION = 7
"""Of what is written; another one is another place, so that an upgrade never reads what it does not know."""


def prepare_rows(sources: Sources, config: DataConfig, encoder: RowEncoder) -> TokenisedRows:
    """Tokenise the rows of some sources, or take them from the cache; safe when many processes start together.

    One of them works, with ``data.num_tokenizers`` processes of its own; the bytes do not depend on their number.

    Raises:
        DataError: A source or row is bad (file and line are named), no token of any row is supervised, or more rows
            than ``data.max_dropped_share`` are cut so far that nothing is left.
    """
    found = find_sources(sources, config)
    fingerprint = _fingerprint(found, encoder)
    root = Path(config.cache_dir).expanduser() if config.cache_dir else cache_root()
    name = found[0].name if len(found) == 1 else f"{found[0].name} and {len(found) - 1} more"
    folder = root / "data" / fingerprint

    def make(partial_folder: Path) -> None:
        meta = {"fingerprint": fingerprint, **_write(partial_folder, found, config, encoder)}
        (partial_folder / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")

    make_arrays(folder, make, f"tokenising {name}")
    rows = open_rows(folder)
    _log.info("%s: %s", name, summary(rows.meta))
    _check_dropped(name, rows.meta, config)
    return rows


def summary(meta: dict[str, Any]) -> str:
    """One line on what became of the rows."""
    split = f", {meta['split']} split" if meta["split"] else ""
    return (
        f"{meta['rows_read']} rows read, dropped {_reasons(meta['dropped'])}, truncated {meta['truncated']}{split}, "
        f"{100 * meta['supervised_tokens'] / meta['tokens']:.1f} % of {meta['tokens']} tokens supervised, "
        f"mean length {meta['tokens'] / meta['rows']:.0f}"
    )


def _reasons(dropped: dict[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in dropped.items()) or "0"


def _check_dropped(name: str, meta: dict[str, Any], config: DataConfig) -> None:
    cut, read = sum(meta["dropped"].get(reason, 0) for reason in (CUT, TOO_LONG)), meta["rows_read"]
    if cut > config.max_dropped_share * read:
        raise DataError(
            f"{name}: of {cut} of {read} rows nothing is left within data.max_seq_length {config.max_seq_length}\n"
            f"  allowed: data.max_dropped_share {config.max_dropped_share:g} of the rows\n"
            "  fix:     raise data.max_seq_length, set data.truncation: start, or raise data.max_dropped_share"
        )


def _fingerprint(sources: Sequence[Source], encoder: RowEncoder) -> str:
    settings = {
        "version": _VERSION,
        "sources": [[source.digest, source.format, source.columns] for source in sources],
        "encoder": encoder.text,
    }
    return hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=16).hexdigest()


def _write(folder: Path, sources: Sequence[Source], config: DataConfig, encoder: RowEncoder) -> dict[str, Any]:
    """Tokenise everything into ``folder``; a data set with nothing to learn raises and leaves nothing behind."""
    with ExitStack() as stack:
        writer = _Writer(folder, sources, stack)
        blocks = in_order(
            _tasks(sources), partial(encode_chunk, encoder=encoder), config.num_tokenizers or usable_cores()
        )
        for block in blocks:
            writer.add(block)
    if not writer.rows:
        raise DataError(
            f"{', '.join(source.name for source in sources)}: no token of any row is supervised; "
            f"dropped {_reasons(dict(writer.total('dropped')))}\n"
            "  fix:     rows need an assistant turn within data.max_seq_length tokens (or data.train_on_prompt: true)"
        )
    return writer.meta()


def _tasks(sources: Sequence[Source]) -> Iterator[Task]:
    for number, source in enumerate(sources):
        form = source.row_format
        for chunk in source.chunks():
            yield Task(number, chunk, form)


class _Writer:
    """Appends blocks to the arrays of a folder and counts; nothing is held in memory but counts."""

    def __init__(self, folder: Path, sources: Sequence[Source], stack: ExitStack) -> None:
        self._folder, self._sources = folder, sources
        self._files = {name: stack.enter_context((folder / f"{name}.bin").open("wb")) for name in ARRAYS}
        self._append("offsets", np.zeros(1))
        self._entries = [
            Counter[str](rows_read=0, rows=0, truncated=0, split=0, tokens=0, supervised_tokens=0) for _ in sources
        ]
        self._dropped = [Counter[str]() for _ in sources]
        self._order = hashlib.blake2b(json.dumps([source.digest for source in sources]).encode(), digest_size=16)
        self._tokens = self._longest = self.rows = 0

    def add(self, block: Block) -> None:
        """One more block, the sources one after another."""
        entry = self._entries[block.source]
        numbers = block.numbers + self.total("rows_read")
        ends = self._tokens + block.lengths.cumsum()
        arrays = {"input_ids": block.input_ids, "supervised": block.supervised, "offsets": ends, "numbers": numbers}
        for name, array in {**arrays, "learnt": block.learnt, "keys": block.keys, "digests": block.digests}.items():
            self._append(name, array)
        self._order.update(np.stack([np.full(len(numbers), block.source), numbers]).astype("<i8").tobytes("F"))
        entry.update(
            rows_read=block.rows_read,
            rows=len(block.lengths),
            truncated=block.truncated,
            split=block.rows_split,
            tokens=len(block.input_ids),
            supervised_tokens=int(block.learnt.sum(dtype=np.int64)),
        )
        self._dropped[block.source].update(block.dropped)
        self._tokens += len(block.input_ids)
        self.rows += len(block.lengths)
        self._longest = max(self._longest, int(block.lengths.max(initial=0)))

    def _append(self, name: str, array: np.ndarray) -> None:
        self._files[name].write(array.astype(ARRAYS[name]).tobytes())
        self._files[name].flush()  # a process that is forked later must not inherit bytes that wait

    def total(self, what: str) -> Any:
        """A count over all sources, or the reasons why rows were dropped."""
        if what == "dropped":
            return sum(self._dropped, Counter())
        return sum(entry[what] for entry in self._entries)

    def meta(self) -> dict[str, Any]:
        """What ``meta.json`` holds, once the files are closed."""
        named = zip(self._sources, self._entries, self._dropped, strict=True)
        entries = [
            {"name": source.name, "format": source.row_format, **entry, "dropped": dict(dropped)}
            for source, entry, dropped in named
        ]
        counts = ("rows_read", "rows", "truncated", "split", "tokens", "supervised_tokens")
        return {
            "order_fingerprint": self._order.hexdigest(),
            **{name: self.total(name) for name in counts},
            "dropped": dict(self.total("dropped")),
            "longest": self._longest,
            "entries": entries,
            "spot_check": {name: spot_check(self._folder / f"{name}.bin") for name in ARRAYS},
        }
