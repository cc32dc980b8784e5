"""Tables with one row per key of a configuration, and the code that applies them."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from lit_fsdp.convert.conversion import Conversion, Given, Reader, as_is, shown
from lit_fsdp.errors import require

_PREFIXES = {"fsdp_config": "fsdp_", "dynamo_config": "dynamo_", "parallelism_config": "parallelism_config_"}
FILLED_IN: dict[str, Any] = {
    "model.optim.lr": 5e-5, "model.optim.beta1": 0.9, "model.optim.beta2": 0.999, "model.optim.eps": 1e-8,
    "model.optim.weight_decay": 0.0, "model.optim.warmup_steps": 0, "trainer.gradient_clip_val": 1.0,
    "data.micro_batch_size": 8, "trainer.accumulate_grad_batches": 1, "model.optim.schedule": "linear",
    "seed_everything": 42, "checkpoint.keep_last": -1,
}  # fmt: skip
"""Defaults of Transformers, also used for ``auto``, by path of the recipe."""
ONLY_ADAMW = (
    "the recipe uses AdamW; for others set model.optim.class_path, such as torchao.optim.AdamW8bit or "
    "lit_fsdp.MuonWithAdamW"
)
OFF = "false 0 0.0 none no []"
_LOADERS = ("json", "csv", "parquet", "text", "arrow")  # names in place of a data set, for files anywhere


@dataclass(frozen=True)
class Keep:
    """A key with a counterpart in the recipe."""

    to: str
    """Path in the recipe (a bare word is a field of the strategy); two paths for a list of two values."""
    read: Reader = as_is
    """Converts the value to that of the recipe."""
    why: str = ""
    """Note in the report."""
    other: str = ""
    """Reason to drop a word that is not in the table; empty: raise an error."""


@dataclass(frozen=True)
class Drop:
    """A key without a counterpart in the recipe."""

    why: str
    fine: str = ""
    """Values that do not change training, as words; empty: all values."""


UNSUPPORTED = Drop("this option is not supported", OFF)
"""A key that matters only if it is on."""
Table = Mapping[str, Keep | Drop | None]
"""Row by dotted key without prefixes, or by pattern with a star; ``None``: handled in code together with other keys."""


def rows(words: str, row: Keep | Drop | None) -> dict[str, Keep | Drop | None]:
    """Return the same row for several keys."""
    return dict.fromkeys(words.split(), row)


def under(section: str, table: Table) -> dict[str, Keep | Drop | None]:
    """Prefix the rows of a section, for the table of the complete file."""
    return {f"{section}.{key}": row for key, row in table.items()}


class Source:
    """The keys of a file, consumed one by one so that every key is handled."""

    def __init__(
        self, conversion: Conversion, table: Table, values: Mapping[str, Any], path: str = "",
        aliases: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.conversion, self.table, self._aliases, self._path = conversion, table, aliases or {}, path
        self._left: dict[str, Given] = {}
        self._flatten(values, "", path)

    def _flatten(self, values: Mapping[str, Any], section: str, path: str) -> None:
        for key, value in values.items():
            name = str(key).removeprefix(_PREFIXES.get(section, ""))
            name = name if section else self._aliases.get(name, name)
            name, written = f"{section}.{name}".lstrip("."), f"{path}.{key}".lstrip(".")
            if value is None or value == {}:
                self.conversion.drop(Given(written, value), "it is null or empty: the default applies")
            elif name not in self.table and any(known.startswith(f"{name}.") for known in self.table):
                require(isinstance(value, dict), written, repr(value), "a mapping", f"write {written}: {{key: value}}")
                self._flatten(value, name, written)
            else:
                self._left[name] = Given(written, value)

    def written(self, key: str) -> str:
        """The full key of the file."""
        return f"{self._path}.{key}".lstrip(".")

    def take(self, name: str, default: Any = None) -> Given:
        """Remove a key and return its value; ``default`` without a key if it is missing or null."""
        return self._left.pop(name, Given("", default))

    def look(self, name: str) -> Any:
        """Return the value of a key without removing it; None if it is missing, null or removed."""
        return self._left[name].value if name in self._left else None

    def fill_in(self, name: str, value: Any, since: str = "") -> None:
        """Add a key that the file does not set, with the library's default; it outranks keys of another file."""
        if name not in self._left:
            self._left[name] = Given(self.written(f"{name} ({shown(value)} by default{since})"), value)
            row = self.table[name]
            for path in row.to.split() if isinstance(row, Keep) else ():
                self.conversion.outrank(path, self._left[name].key)

    def ignore(self, starts: str, why: str) -> None:
        """Drop all keys that begin with one of these words."""
        for name in [name for name in self._left if name.startswith(tuple(starts.split()))]:
            self.conversion.drop(self._left.pop(name), why)

    def rest(self) -> None:
        """Apply the table to the remaining keys in table order, then to keys that match patterns and unknown keys."""
        for name, row in self.table.items():
            if name in self._left:
                self._apply(row or Drop("other keys apply"), self._left.pop(name))
        for name, given in self._left.items():
            row = next((row for pattern, row in self.table.items() if row and fnmatchcase(name, pattern)), None)
            if row:
                self._apply(row, given)
            else:
                near = difflib.get_close_matches(name, [key for key in self.table if "*" not in key], n=1, cutoff=0.8)
                hint = f"; the closest is {near[0]}" if near else ""
                self.conversion.drop(given, f"the key is unknown{hint}", differs=True)

    def _apply(self, row: Keep | Drop, given: Given) -> None:
        value, conversion = given.value, self.conversion
        if isinstance(row, Drop):
            off = isinstance(value, dict) and value.get("enabled") is False
            fine = not row.fine or off or str(value).strip().lower() in (*row.fine.lower().split(), "", "auto")
            if fine and row.fine:
                conversion.say(given, f"not needed: lit_fsdp behaves as with {shown(value)}")
            else:
                conversion.drop(given, row.why, differs=not fine)
        elif " " in row.to:
            for path, part in zip(row.to.split(), value if isinstance(value, list) else [value] * 2, strict=False):
                self._apply(replace(row, to=path), Given(given.key, part))
        elif value == "auto":
            held = conversion.put(row.to, FILLED_IN[row.to]) if row.to in FILLED_IN else conversion.get(row.to)
            words = f"{row.to}: {shown(held)}" if held is not None else f"the {row.to} that you set"
            conversion.say(given, f"replaced by {words} (auto: as Transformers fills it in)")
        elif row.other and isinstance(row.read, Mapping) and str(value).lower() not in map(str.lower, row.read):
            conversion.drop(given, row.other, differs=True)
        elif (read := given.read(row.read)) is None:
            conversion.drop(given, f"with {shown(value)} the default applies")
        else:
            conversion.keep(given, row.to, read, row.why)


def put_data_sets(
    conversion: Conversion, given: Given, to: str, name: str, begin: Callable[[str, str, dict[str, Any]], Source]
) -> None:
    """Convert one or several data sets to the sources at ``to``; a location has the key ``name``.

    The function ``begin`` gets the key of a data set, its path in the recipe and its values, and returns a
    :class:`Source`.
    """
    found: list[dict[str, Any]] = []
    listed = isinstance(given.value, list)
    for index, entry in enumerate(given.value if listed else [given.value]):
        key, own = f"{given.key}.{index}" if listed else given.key, f"{to}.{index}"
        require(isinstance(entry, dict) and entry, key, repr(entry), "a mapping", f"write {key}: {{{name}: NAME}}")
        source = begin(key, own, entry)
        where, subset, split, files = parts = [source.take(part) for part in (name, "name", "split", "data_files")]
        require(where.value, f"{key}.{name}", where.value, "a name or a file", f"write {name}: NAME")
        locations, why = [where.value], ""
        if files.key:
            locations, why = _of_files(where.value, files.value, split.value or "train")
        elif subset.key or split.value not in (None, "train"):
            words = (where.value, subset.value, split.value or "train")
            locations = [":".join(str(word) for word in words if word)]
        for part in parts:
            note = f" ({why})" if why and part is files else ""
            conversion.say(part, f"kept as {own}.source: {', '.join(locations)}{note}", bool(note))
        source.rest()
        found += [{"source": location, **(conversion.get(own) or {})} for location in locations]
    conversion.recipe.setdefault("data", {})[to.removeprefix("data.")] = found


def _of_files(where: str, files: str | list[str], split: str) -> tuple[list[str], str]:
    """Return the locations of ``data_files``, and why their rows differ from those of ``datasets.load_dataset``."""
    found = files if isinstance(files, list) else [files]
    if where not in _LOADERS:
        found = [str(Path(where, file)) for file in found]
        if not (where.startswith(("/", ".", "~")) or Path(where).exists()):
            return found, f"files of a Hub repository: download them from {where}"
    return found, "" if split == "train" else f"all rows of these files, not split {split}"
