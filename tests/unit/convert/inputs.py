"""Configurations given as mappings, converted, and what the recipe's strategy is with its defaults."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

from lit_fsdp.config.strategy import StrategyConfig
from lit_fsdp.convert import convert_file
from lit_fsdp.convert.conversion import Conversion


def convert(kind: str, given: dict[str, Any], ranks: int | None = None, num_nodes: int = 1) -> Conversion:
    """The conversion of a file with this in it, every key of which must be reported."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "in.json"
        file.write_text(json.dumps(given))
        found = convert_file(kind, file, ranks, num_nodes)
    said = {fate.key for fate in found.fates}
    for key, value in given.items():
        paths = [f"{key}.{inner}" for inner in value] if isinstance(value, dict) and value else [key]
        for path in paths:
            assert any(one in (path, key) or one.startswith(f"{path}.") for one in said), (path, said)
    order = [list(given).index(key) for fate in found.fates if (key := fate.key.partition(".")[0]) in given]
    assert order == sorted(order)  # reports follow the file
    return found


def strategy(found: Conversion) -> dict[str, Any]:
    """Its arguments with the defaults; the conversion has checked them."""
    return {**dataclasses.asdict(StrategyConfig()), **found.recipe["trainer"]["strategy"]["init_args"]}
