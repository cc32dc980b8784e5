"""What a conversion gives: a recipe, and one line per key of the input."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import yaml

from lit_fsdp.errors import ConfigError

STRATEGY = "trainer.strategy.init_args"
_ORDER = ("seed_everything", "trainer", "model", "data", "checkpoint")


@dataclass(frozen=True)
class Fate:
    """What became of one key of the input."""

    key: str
    """Its path in the input."""
    text: str
    """kept as …, replaced by …, or dropped because …"""
    differs: bool = False
    """Whether training would differ from the original because of it."""

    def __str__(self) -> str:
        return f"{self.key}: {self.text}" + (" [trains differently]" if self.differs else "")


@dataclass
class Conversion:
    """A recipe in the making."""

    recipe: dict[str, Any] = field(default_factory=dict)
    fates: list[Fate] = field(default_factory=list)
    to_give: list[str] = field(default_factory=list)
    """What the input does not know and the user has to add; becomes comments of the recipe."""

    @property
    def differs(self) -> bool:
        """Whether the recipe trains otherwise than the original."""
        return any(fate.differs for fate in self.fates)

    def put(self, path: str, value: Any) -> None:
        """Set one value of the recipe; a field of the strategy may go without its long path."""
        *parents, last = (path if "." in path or path == "seed_everything" else f"{STRATEGY}.{path}").split(".")
        place = self.recipe
        for part in parents:
            place = place.setdefault(part, {})
        place[last] = value

    def get(self, path: str, default: Any = None) -> Any:
        """A value put before."""
        place: Any = self.recipe
        for part in (path if "." in path else f"{STRATEGY}.{path}").split("."):
            if not isinstance(place, dict) or part not in place:
                return default
            place = place[part]
        return place

    def keep(self, key: str, path: str, value: Any, note: str = "", differs: bool = False) -> None:
        """Put a value and say that ``key`` was kept as ``path``."""
        self.put(path, value)
        self.fates.append(Fate(key, f"kept as {path}: {shown(value)}" + (f" ({note})" if note else ""), differs))

    def replace(self, key: str, by: str, why: str, differs: bool = False) -> None:
        """Say that ``key`` was replaced by something else, and why."""
        self.fates.append(Fate(key, f"replaced by {by} ({why})", differs))

    def drop(self, key: str, why: str, differs: bool = False) -> None:
        """Say that ``key`` has no counterpart, and why."""
        self.fates.append(Fate(key, f"dropped because {why}", differs))

    def rename(self, names: dict[str, str]) -> None:
        """Say keys that were put together on the way by the names they have in the input."""
        self.fates = [Fate(names.get(fate.key, fate.key), fate.text, fate.differs) for fate in self.fates]

    def fill(self, names: dict[str, str]) -> None:
        """Say of keys that were ``auto`` who filled them in with the value that was kept; ``names``: key to who."""

        def filled(fate: Fate) -> Fate:
            who = names.get(fate.key.split("[")[0])
            if not who or "(auto: " in fate.text:
                return fate
            return Fate(fate.key, f"{fate.text.replace('kept as', 'replaced by', 1)} (auto: {who})", fate.differs)

        self.fates = [filled(fate) for fate in self.fates]

    def say_empty(self, values: dict[Any, Any], path: str = "") -> None:
        """One line for every null and every empty mapping of the input that has none yet."""
        said = {fate.key for fate in self.fates}
        for key, value in values.items():
            name = f"{path}.{key}" if path else str(key)
            if isinstance(value, dict) and value:
                self.say_empty(value, name)
            elif (value is None or value == {}) and name not in said:
                self.drop(name, f"it is {'null' if value is None else 'empty'}: the default holds")

    def source_of(self, path: str) -> str | None:
        """The key of the input that became ``path`` of the recipe."""
        short = path.removeprefix(f"{STRATEGY}.")
        words = (f"as {path}:", f"by {path}:", f"as {short}:", f"by {short}:")
        return next((fate.key for fate in self.fates if any(word in fate.text for word in words)), None)

    def as_yaml(self, source: str) -> str:
        """The recipe as YAML with a head that says where it is from and what is missing."""
        head = [f"# Converted from {source}.", *(f"# {line}" for line in self.to_give)]
        ordered = {name: self.recipe[name] for name in _ORDER if name in self.recipe}
        return "\n".join(head) + "\n\n" + yaml.safe_dump(ordered, sort_keys=False, allow_unicode=True, width=110)


def shown(value: Any) -> str:
    """A value as it stands in YAML, on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000).strip()
    return text.removesuffix("\n...").strip()


class Section:
    """A mapping of the input whose keys are taken one by one, so that none is forgotten.

    Args:
        values: The mapping, or ``None`` for an empty one.
        path: Where it stands in the input; empty for the whole file.
        prefix: A prefix that keys may have or not, as ``fsdp_``.
    """

    def __init__(self, values: Any, path: str = "", prefix: str = "") -> None:
        if values is not None and not isinstance(values, dict):
            raise ConfigError(path or "file", f"{values!r}", "a mapping of keys to values", "write key: value lines")
        self.path = path
        self._left: dict[str, tuple[str, Any]] = {}
        for key, value in (values or {}).items():
            name = str(key).removeprefix(prefix)
            if name in self._left:
                raise ConfigError(
                    f"{path}.{key}" if path else str(key),
                    f"{value!r} beside {self._left[name][0]}",
                    "one of the two names",
                    "drop one",
                )
            self._left[name] = (str(key), value)

    def name(self, key: str) -> str:
        """The full path of ``key`` as it was written."""
        written = self._left[key][0] if key in self._left else key
        return f"{self.path}.{written}" if self.path else written

    def has(self, key: str) -> bool:
        """Whether ``key`` is still there and not null."""
        return key in self._left and self._left[key][1] is not None

    def peek(self, key: str, default: Any = None) -> Any:
        """The value of ``key``, which stays."""
        return self._left[key][1] if self.has(key) else default

    def take(self, key: str) -> tuple[str, Any] | None:
        """``(full path, value)`` of ``key``, which is gone then; ``None`` where it is missing or null."""
        if key not in self._left:
            return None
        path = self.name(key)
        value = self._left.pop(key)[1]
        return None if value is None else (path, value)

    def drain(self) -> list[tuple[str, str, Any]]:
        """``(key, full path, value)`` of everything nobody took; the section is empty then."""
        left = [(key, self.name(key), value) for key, (_, value) in self._left.items()]
        self._left.clear()
        return left
