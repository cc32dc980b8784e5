"""The files of each split as the card of a data set (``README.md``) declares them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_fsdp.errors import DataError

_FENCE = "---\n"


def declared_files(name: str, folder: Path) -> dict[str, list[Path]] | None:
    """Files per split of the only configuration of a card, or of its default one; ``None`` if it declares none.

    Args:
        name: As the recipe has it, for errors.
        folder: Of the data set.

    Raises:
        DataError: There are several configurations and no default, or one names no file that is there.

    Source: https://huggingface.co/docs/hub/datasets-manual-configuration
    """
    configs = _configs(folder / "README.md")
    if not configs:
        return None
    chosen = [config for config in configs if config.get("default") is True or config.get("config_name") == "default"]
    if len(configs) > 1 and len(chosen) != 1:
        names = ", ".join(str(config.get("config_name")) for config in configs)
        raise DataError(
            f"{name}: its README.md declares the configurations {names}, and none as the default\n"
            f"  fix:     name the files of one, such as {name}/{configs[0].get('config_name')}/*.parquet"
        )
    config = chosen[0] if len(configs) > 1 else configs[0]
    found: dict[str, list[Path]] = {}
    for split, pattern in _patterns(config.get("data_files")):
        inside = pattern and ".." not in Path(pattern).parts
        paths = sorted(path for path in folder.glob(pattern) if path.is_file()) if inside else []
        if not paths:
            raise DataError(
                f"{name}: its README.md declares {pattern!r} for {split}, but no file matches\n"
                "  fix:     copy the whole data set, or name the files that are there"
            )
        found.setdefault(split, []).extend(path for path in paths if path not in found.get(split, []))
    return found or None


def _configs(card: Path) -> list[Mapping[str, Any]]:
    import yaml

    try:
        text = card.read_text(encoding="utf-8") if card.is_file() else ""
        head = text.split(_FENCE)[1] if text.startswith(_FENCE) and text.count(_FENCE) > 1 else ""
        loaded = yaml.safe_load(head)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise DataError(f"{card}: cannot be read ({' '.join(str(error).split())[:200]})") from None
    configs = loaded.get("configs") if isinstance(loaded, dict) else None
    found = [config for config in configs or [] if isinstance(config, Mapping)]
    return [config for config in found if config.get("data_files")]


def _patterns(data_files: Any) -> list[tuple[str, str]]:
    """Pairs of split and pattern, however they are written."""
    entries = data_files if isinstance(data_files, list) else [data_files]
    pairs = []
    for entry in entries:
        alone = entry if isinstance(entry, Mapping) else {"path": entry}
        paths = alone.get("path")
        for path in paths if isinstance(paths, list) else [paths]:
            pairs.append((str(alone.get("split", "train")), str(path).lstrip("/")))
    return pairs
