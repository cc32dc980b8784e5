"""Data sets of the ``datasets`` package: saved on disk, or by their name on the hub."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_fsdp.data.columnar import arrow_chunk
from lit_fsdp.data.files import Chunk, Position, numbered_rows
from lit_fsdp.data.parts import combined, digest_of
from lit_fsdp.errors import DataError

_ROWS = 1000


@dataclass(frozen=True)
class SavedPart:
    """A data set that ``datasets`` maps into memory."""

    name: str
    loaded: Any
    digest: str

    def chunks(self, start: Position | None) -> Iterator[Chunk]:
        """Rows in batches. Position: number of the row."""
        features = self.loaded.features or {}
        coded = any("Json(" in repr(feature) for feature in features.values())  # text that datasets itself takes apart
        batches = self.loaded.with_format("arrow")
        for first in range(start[0] if start else 0, len(self.loaded), _ROWS):
            part = range(first, min(first + _ROWS, len(self.loaded)))
            if coded:
                yield Chunk(self.name, first, self.loaded.select(part).to_list(), numbered_rows, [first])
            else:
                yield arrow_chunk(self.name, batches[part.start : part.stop], first, [first])

    def check(self) -> None:
        """Nothing: what is mapped stays as it is."""


@dataclass(frozen=True)
class StreamedPart:
    """A data set that ``datasets`` streams; its rows cannot be counted or hashed before."""

    name: str
    loaded: Any
    digest: str
    first: Any = field(init=False, repr=False)
    """The state at the first row."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "first", self.loaded.state_dict())

    def chunks(self, start: Position | None) -> Iterator[Chunk]:
        """Rows in batches. Position: the state that ``datasets`` gives, and number of the row."""
        state, number = start or (None, 0)
        # datasets begins every later pass at the last state that it was given, not at its first row
        self.loaded.load_state_dict(copy.deepcopy(state or self.first))
        rows: list[dict[str, Any]] = []
        before, first = state, number
        try:
            for row in self.loaded:
                rows.append(row)
                number += 1
                if len(rows) == _ROWS:
                    after = self.loaded.state_dict()
                    yield Chunk(self.name, first, rows, numbered_rows, [before, first])
                    rows, before, first = [], after, number
        except (OSError, ValueError, RuntimeError) as error:
            raise _unreadable(self.name, number, error) from error
        if rows:
            yield Chunk(self.name, first, rows, numbered_rows, [before, first])

    def check(self) -> None:
        """Nothing: the hub serves one revision."""


def _unreadable(name: str, number: int, error: Exception) -> DataError:
    if isinstance(error, DataError):
        return error
    why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return DataError(f"{name}: cannot be read on after row {number} ({why})\n  fix:     resume once it can be reached")


def saved_folder(name: str, path: Path, split: str | None) -> SavedPart:
    """A folder that ``save_to_disk`` wrote; one of several splits is ``train`` unless another is named.

    Raises:
        DataError: The folder is damaged, or it has no such split.
    """
    import datasets

    datasets.disable_progress_bars()
    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:  # datasets raises its own, OSError, ValueError and pyarrow's, by version
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise DataError(
            f"{name}: datasets cannot load it ({why})\n  fix:     write it again with save_to_disk"
        ) from error
    if isinstance(loaded, datasets.DatasetDict):
        if (split or "train") not in loaded:
            raise DataError(f"{name}: no split {split or 'train'!r}\n  allowed: {', '.join(loaded)} (write name:split)")
        loaded = loaded[split or "train"]
    elif split:
        raise DataError(f"{name}: no split {split!r}: one data set was saved there\n  fix:     drop :{split}")
    return SavedPart(name, loaded, _digest(loaded))


def _digest(loaded: Any) -> str:
    """Of the bytes of its Arrow files and of which of their rows it takes: the fingerprint that ``datasets`` keeps
    beside them stays the same when a file is replaced.
    """
    files = [Path(file["filename"]) for file in loaded.cache_files]
    return combined([str(loaded._fingerprint), *(digest_of(file) for file in files)])


def hub_data_set(name: str, streaming: bool) -> SavedPart | StreamedPart:
    """A data set by its name on the hub: ``name``, ``name:split`` or ``name:configuration:split``.

    Raises:
        DataError: It is not there, or there is no network.
    """
    import datasets

    datasets.disable_progress_bars()
    base, _, rest = name.partition(":")
    rest, bracket, rows = rest.partition("[")  # of train[:10%], whose colon is no border
    configuration, _, split = rest.rpartition(":")
    split = (split or "train") + bracket + rows
    try:
        loaded = datasets.load_dataset(base, configuration or None, split=split, streaming=streaming)
    except Exception as error:  # datasets raises its own, OSError, ValueError and the hub's, by version
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise DataError(
            f"{name}: no such file below {Path.cwd()}, and datasets cannot load it ({why})\n"
            "  fix:     check the name (name:split, name:configuration:split); without a network name a file, or a "
            "folder written by save_to_disk"
        ) from error
    if streaming:
        return StreamedPart(name, loaded, f"stream of {name}")
    return SavedPart(name, loaded, str(loaded._fingerprint))
