"""Tokenised rows as flat arrays on disk, made once per content and mapped into memory by every rank."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lit_fsdp.config.data import DataConfig
from lit_fsdp.data.formats import find_format, to_messages
from lit_fsdp.data.sources import Source, read_sources
from lit_fsdp.data.templates import ChatTemplate
from lit_fsdp.errors import DataError
from lit_fsdp.host import cache_root, make_once

_log = logging.getLogger(__name__)
_VERSION = 1
_CHUNK = 512


@dataclass(frozen=True)
class TokenisedRows:
    """Rows of tokens, memory-mapped."""

    folder: Path
    meta: dict[str, Any]
    """Counts: rows read, dropped by reason, truncated, tokens, supervised tokens; and the fingerprint."""
    input_ids: np.ndarray
    supervised: np.ndarray
    offsets: np.ndarray

    @property
    def fingerprint(self) -> str:
        """Of everything the tokens depend on."""
        return str(self.meta["fingerprint"])

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids (int32) and supervision (uint8) of one row, both of shape (T,)."""
        part = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        return self.input_ids[part], self.supervised[part]


def prepare_rows(sources: str | list[str], config: DataConfig, template: ChatTemplate) -> TokenisedRows:
    """Tokenise the rows of some sources, or take them from the cache; safe when many processes start together.

    Raises:
        DataError: A source or row is bad (file and line are named), or no token of any row is supervised.
    """
    read = read_sources(sources)
    fingerprint = _fingerprint(read, config, template)
    root = Path(config.cache_dir).expanduser() if config.cache_dir else cache_root()
    name = read[0].name if len(read) == 1 else f"{len(read)} sources"
    folder = root / "data" / fingerprint
    make_once(folder, lambda partial: _write(partial, read, config, template, fingerprint), f"tokenising {name}")
    rows = _open(folder)
    _report(name, rows.meta)
    return rows


def _open(folder: Path) -> TokenisedRows:
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("input_ids", "supervised", "offsets")}
    return TokenisedRows(folder, meta, **arrays)


def _fingerprint(sources: Sequence[Source], config: DataConfig, template: ChatTemplate) -> str:
    settings = {
        "version": _VERSION,
        "sources": [source.digest for source in sources],
        "format": config.format,
        "supervise": config.supervise,
        "max_seq_length": config.max_seq_length,
        "template": template.text,
        "special": {str(k): str(v) for k, v in template.tokenizer.special_tokens_map.items()},
    }
    digest = hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=16)
    digest.update(template.tokenizer.backend_tokenizer.to_str().encode())
    return digest.hexdigest()


def _write(
    folder: Path, sources: Sequence[Source], config: DataConfig, template: ChatTemplate, fingerprint: str
) -> None:
    """Tokenise everything into ``folder``; a data set with nothing to learn raises and leaves nothing behind."""
    ids: list[np.ndarray] = []
    masks: list[np.ndarray] = []
    counts: Counter[str] = Counter()
    for source in sources:
        form = config.format if config.format != "auto" else find_format(set(source.rows[0]), source.name)
        _log.info("%s: %d rows of format %s", source.name, len(source.rows), form)
        for start in range(0, len(source.rows), _CHUNK):
            part = slice(start, start + _CHUNK)
            places = source.places[part]
            talks = [to_messages(row, form, place) for row, place in zip(source.rows[part], places, strict=True)]
            for encoded in template.encode(talks, places):
                _keep(encoded.input_ids, encoded.supervised, config.max_seq_length, counts, ids, masks)
    lengths = np.array([len(part) for part in ids], dtype=np.int64)
    meta = {
        "fingerprint": fingerprint,
        "rows_read": sum(len(source.rows) for source in sources),
        "rows": len(ids),
        "dropped": {key.removeprefix("dropped: "): n for key, n in counts.items() if key.startswith("dropped: ")},
        "truncated": counts["truncated"],
        "tokens": int(lengths.sum()),
        "supervised_tokens": int(sum(int(mask.sum()) for mask in masks)),
        "longest": int(lengths.max(initial=0)),
    }
    if not ids:
        raise DataError(
            f"{', '.join(source.name for source in sources)}: no row has a token to learn; dropped {meta['dropped']}"
            "\n  fix:     rows need an assistant turn within data.max_seq_length"
        )
    np.save(folder / "input_ids.npy", np.concatenate(ids).astype(np.int32))
    np.save(folder / "supervised.npy", np.concatenate(masks).astype(np.uint8))
    np.save(folder / "offsets.npy", np.concatenate([[0], lengths.cumsum()]).astype(np.int64))
    (folder / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")


def _keep(
    ids: np.ndarray,
    mask: np.ndarray,
    longest: int,
    counts: Counter[str],
    kept: list[np.ndarray],
    masks: list[np.ndarray],
) -> None:
    if not mask.any():
        counts["dropped: no assistant turn"] += 1
        return
    if len(ids) > longest:
        ids, mask = ids[:longest], mask[:longest]
        if not mask.any():
            counts["dropped: cut before the assistant's turn"] += 1
            return
        counts["truncated"] += 1
    kept.append(ids)
    masks.append(mask)


def _report(name: str, meta: dict[str, Any]) -> None:
    dropped = ", ".join(f"{count} {reason}" for reason, count in meta["dropped"].items()) or "0"
    _log.info(
        "%s: %d rows read, dropped %s, truncated %d, %.1f %% of %d tokens supervised, mean length %.0f",
        *(name, meta["rows_read"], dropped, meta["truncated"]),
        *(100 * meta["supervised_tokens"] / meta["tokens"], meta["tokens"], meta["tokens"] / meta["rows"]),
    )
