"""Which modules become FSDP units."""

from __future__ import annotations

from dataclasses import dataclass

from lit_fsdp.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class WrapConfig:
    """Which modules become FSDP units: found from the model, named, by size, or wrapped already."""

    classes: list[str] | None = None
    """Module class names, each instance of which is one FSDP unit."""
    patterns: list[str] | None = None
    """Module paths, each match of which is one FSDP unit; * stands for one part, as in model.layers.*.mlp; from the
    LightningModule, or else from a transformers model in it."""
    min_num_params: float | None = None
    """Smallest unit in parameters: modules are grouped bottom-up until they hold this many."""
    experts: bool = False
    """Also make the experts of a mixture-of-experts model units of their own, inside their blocks; experts kept one
    by one in a list must all be called by every rank in every step."""
    embedding_and_head: bool | None = None
    """Also make the input embedding and the output head units of their own unless they are tied; default: true, but
    false with min_num_params, where size decides."""
    manual: bool = False
    """The LightningModule wraps its parts itself in configure_model; only the root is added."""
    max_root_share: float | None = None
    """Largest share of all parameters, frozen ones too, that may stay in the root unit, 0 to 1; tied weights, which
    have to stay there, are not counted. Default: 0.5, of what auto and a size leave there only from 10 million on."""

    def __post_init__(self) -> None:
        for name in ("classes", "patterns"):
            if getattr(self, name) == []:
                raise ConfigError(name, "[]", f"at least one of the {name}", "write wrap: auto, or name one")
        if self.min_num_params is not None and (self.classes or self.patterns):
            raise ConfigError(
                "min_num_params", self.min_num_params, "classes and patterns, or min_num_params, not both", "drop one"
            )
        if self.manual and (self.classes or self.patterns or self.min_num_params is not None or self.experts):
            raise ConfigError("manual", "true beside another choice", "manual alone", "drop it, or the others")
        if self.manual and self.embedding_and_head is not None:
            raise ConfigError("embedding_and_head", self.embedding_and_head, "not beside manual", "drop it")
        for name in self.classes or ():
            if not name.strip():
                raise ConfigError("classes", repr(name), "the name of a module class", "write wrap: auto, or name one")
        for pattern in self.patterns or ():
            check_pattern(pattern, "patterns")
        number = self.min_num_params
        if number is not None and (number < 1 or number != int(number)):
            raise ConfigError("min_num_params", number, "a whole number >= 1", "write min_num_params: 1.0e6")
        if self.max_root_share is not None and not 0 <= self.max_root_share <= 1:
            raise ConfigError("max_root_share", self.max_root_share, "0 to 1", "write max_root_share: 0.5")


def wrap_from_words(words: list[str]) -> WrapConfig:
    """A list of class names and path patterns (those with a dot or a star) as its mapping."""
    patterns = [word for word in words if "." in word or "*" in word]
    for word in words:
        if not word.strip():
            raise ConfigError("wrap", repr(word), "class names and path patterns", "write wrap: auto, or name one")
    for pattern in patterns:
        check_pattern(pattern, "wrap")
    classes = [word for word in words if word not in patterns]
    return WrapConfig(classes=classes or None, patterns=patterns or None)


def check_pattern(pattern: str, field: str) -> None:
    """Raise ConfigError unless ``pattern`` is a dotted path in which a star stands for one part."""
    if "**" in pattern or any(not part.strip() for part in pattern.split(".")):
        allowed = "a path such as model.layers.*.mlp, in which * is one part"
        raise ConfigError(field, repr(pattern), allowed, "write one * per part")
