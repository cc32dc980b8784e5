"""A folder of row files, divided into splits by their names as users of ``datasets`` expect."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from lit_fsdp.data.dataset_card import declared_files
from lit_fsdp.errors import DataError

_log = logging.getLogger(__name__)
_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_APART = re.compile(r"[^a-zA-Z]+")
_NOT_ROWS = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "package.json"}


def is_saved(folder: Path) -> bool:
    """Whether ``datasets`` saved this folder."""
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def folder_files(name: str, folder: Path, split: str | None, kinds: frozenset[str]) -> list[Path]:
    """The row files of one split, in sorted order.

    A file belongs to the split whose word (train, validation, valid, dev, val, test, eval, …) stands apart in its name
    or in the name of a folder above it: ``train-00000-of-00002.parquet``, ``data/test.jsonl``, ``val/rows.csv``. If no
    file has such a word, all are ``train``. Hidden files and folders are passed over. A ``README.md`` that declares
    the files of each split is followed instead.

    Args:
        name: As the recipe has it, for errors.
        folder: Where to look, at any depth.
        split: Name or synonym of a split; default ``train``.
        kinds: Endings of row files.

    Raises:
        DataError: There are no row files, none of this split, or those of the split are of several kinds.
    """
    if (folder / f"{folder.name}.py").is_file():
        raise DataError(f"{name}: a folder with a loading script, which is not run\n  fix:     name its row files")
    wanted = next((key for key, words in _WORDS.items() if (split or "train") in words), split)
    declared = declared_files(name, folder)
    if declared is not None:
        return _of_split(name, declared, wanted)
    files = sorted(path for path in folder.rglob("*") if _has_rows(path, folder, kinds))
    if not files:
        raise DataError(
            f"{name}: no row files in this folder, and datasets has not saved it\n  allowed: {', '.join(sorted(kinds))}"
        )
    splits: dict[str, list[Path]] = {}
    for path in files:
        splits.setdefault(_split_of(path.relative_to(folder)) or "", []).append(path)
    if set(splits) == {""}:
        splits = {"train": splits[""]}
    left_out = splits.get("", [])
    if left_out:
        _log.warning(
            "%s: no split's word stands in the name of %s, so left out, as other files have one: %d row file%s",
            *(name, left_out[0], len(left_out), "s" * (len(left_out) > 1)),
        )
    return _of_split(name, splits, wanted)


def _of_split(name: str, splits: dict[str, list[Path]], wanted: str | None) -> list[Path]:
    if wanted not in splits:
        there = ", ".join(key for key in splits if key) or "none"
        raise DataError(f"{name}: no row files of split {wanted!r}\n  allowed: {there} (write name:split)")
    files = splits[wanted]
    kinds = sorted({kind_of(path) for path in files})
    if len(kinds) > 1:
        raise DataError(
            f"{name}: row files of several kinds ({', '.join(kinds)}), which may well be the same rows\n"
            f"  fix:     name those that are meant, such as {files[0].parent}/*{kind_of(files[0])}"
        )
    return files


def _has_rows(path: Path, folder: Path, kinds: frozenset[str]) -> bool:
    hidden = any(part.startswith((".", "__")) for part in path.relative_to(folder).parts)
    return not hidden and path.name not in _NOT_ROWS and kind_of(path) in kinds and path.is_file()


def _split_of(path: Path) -> str | None:
    """By the file's own name first, then by the folders above it, the nearest first."""
    for part in (path.name.split(".")[0], *reversed(path.parent.parts)):
        words = _APART.split(part.lower())
        found = next((key for key, names in _WORDS.items() if any(word in names for word in words)), None)
        if found:
            return found
    return None


def kind_of(path: Path) -> str:
    """The ending that says how a file is read; ``.gz`` after it counts for nothing."""
    name = path.with_suffix("") if path.suffix == ".gz" else path
    return name.suffix.lower()
