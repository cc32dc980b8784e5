from __future__ import annotations

import datetime
import inspect
import math
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from lit_fsdp.config.typed import accepts, build, field_docs, unknown_key

from lit_fsdp.config.data import DataConfig
from lit_fsdp.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Inner:
    """A nested section."""

    level: int = 1
    """How deep."""
    mode: Literal["low", "high"] = "low"
    """Which one
    of two."""

    def __post_init__(self) -> None:
        if self.level < 0:
            raise ConfigError("level", self.level, ">= 0", "write level: 0")


@dataclass(frozen=True, kw_only=True)
class Outer:
    """A section with every kind of field."""

    count: int = 0
    """A number of things."""
    ratio: float = 0.5
    on: bool = False
    label: str = ""
    maybe: int | None = None
    names: list[str] | None = None
    sizes: list[int] = ()  # type: ignore[assignment]
    word_or_map: Literal["none", "full"] | Inner = "none"
    auto_or_names: Literal["auto"] | list[str] | Inner = "auto"
    text_or_map: str | dict | None = None
    inner: Inner = Inner()
    anything: Any = None
    texts: dict[str, str] | None = None
    three: Literal[3] = 3


def refused(values: Any, path: str = "outer") -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        build(Outer, values, path)
    return caught.value


def test_nothing_given_means_all_defaults():
    assert build(Outer, None, "outer") == build(Outer, {}, "outer") == Outer()


def test_an_instance_is_returned_as_it_is():
    outer = Outer(count=3)
    assert build(Outer, outer, "outer") is outer


def test_the_given_mapping_is_not_changed():
    values = {"inner": {"level": 2}, "names": ["a"]}
    built = build(Outer, values, "outer")
    assert values == {"inner": {"level": 2}, "names": ["a"]}
    assert built.names == ["a"]
    assert built.names is not values["names"]


@pytest.mark.parametrize(
    ("field", "given", "expected"),
    [
        ("count", 7, 7),
        ("count", 1.0e6, 1_000_000),  # YAML reads 1.0e6 as a float
        ("count", "1e6", 1_000_000),  # and 1e6 as text
        ("count", -3.0, -3),
        ("count", 10**400, 10**400),
        ("ratio", 1, 1.0),
        ("ratio", "1e-4", 1e-4),
        ("ratio", "2", 2.0),
        ("ratio", math.inf, math.inf),
        ("on", True, True),
        ("label", "1e-4", "1e-4"),
        ("maybe", None, None),
        ("maybe", "12", 12),
        ("names", ["a", "b"], ["a", "b"]),
        ("names", ("a",), ["a"]),
        ("names", [], []),
        ("names", None, None),
        ("sizes", [1.0, "2"], [1, 2]),
        ("word_or_map", "full", "full"),
        ("word_or_map", {"level": 4}, Inner(level=4)),
        ("word_or_map", {}, Inner()),
        ("word_or_map", Inner(level=5), Inner(level=5)),
        ("auto_or_names", ["auto"], ["auto"]),
        ("auto_or_names", {"mode": "high"}, Inner(mode="high")),
        ("text_or_map", {"model_type": "llama"}, {"model_type": "llama"}),
        ("text_or_map", "llama", "llama"),
        ("inner", {"level": "3"}, Inner(level=3)),
        ("inner", {}, Inner()),
        ("anything", [1, {"a": None}], [1, {"a": None}]),
        ("texts", {"A": 22, "B": "1.50", "C": "x"}, {"A": "22", "B": "1.50", "C": "x"}),
        ("texts", {}, {}),
        ("three", 3, 3),
    ],
)
def test_values_take_the_type_of_their_field(field: str, given: Any, expected: Any):
    built = getattr(build(Outer, {field: given}, "outer"), field)
    assert built == expected
    assert type(built) is type(expected)


@pytest.mark.parametrize(
    ("field", "given", "shown", "allowed"),
    [
        ("count", True, "true", "a whole number"),
        ("count", 1.5, "1.5", "a whole number"),
        ("count", "many", "'many'", "a whole number"),
        ("count", None, "null", "a whole number"),
        ("count", math.inf, "inf", "a whole number"),
        ("count", math.nan, "nan", "a whole number"),
        ("count", 2.0**53, "9007199254740992.0", "a whole number"),  # larger floats are no longer exact
        ("count", [1], "[1]", "a whole number"),
        ("ratio", False, "false", "a number"),
        ("ratio", math.nan, "nan", "a number"),
        ("ratio", "1,5", "'1,5'", "a number"),
        ("ratio", 10**400, repr(10**400), "a number"),
        ("ratio", {"a": 1}, "{'a': 1}", "a number"),
        ("on", 1, "1", "true | false"),
        ("on", "true", "'true'", "true | false"),
        ("label", 5, "5", "text"),
        ("label", None, "null", "text"),
        ("maybe", "x", "'x'", "a whole number | null"),
        ("names", "a", "'a'", "[text, ...] | null"),
        ("word_or_map", True, "true", "none | full | {level, mode}"),
        ("word_or_map", None, "null", "none | full | {level, mode}"),
        ("auto_or_names", 3, "3", "auto | [text, ...] | {level, mode}"),
        ("text_or_map", ["a"], "['a']", "text | a mapping | null"),
        ("inner", "deep", "'deep'", "{level, mode}"),
        ("three", 3.0, "3.0", "3"),
        ("three", True, "true", "3"),
    ],
)
def test_values_of_another_type_are_refused(field: str, given: Any, shown: str, allowed: str):
    error = refused({field: given})
    assert (error.field, error.given, error.allowed) == (f"outer.{field}", shown, allowed)


@pytest.mark.parametrize(
    ("field", "given", "fix"),
    [
        ("word_or_map", "ful", "write outer.word_or_map: full"),
        ("word_or_map", "FULL", "write outer.word_or_map: full"),
        ("word_or_map", "everything", "write outer.word_or_map: none"),
        ("auto_or_names", "Block", "write outer.auto_or_names: [Block]"),
        ("auto_or_names", "Auto", "write outer.auto_or_names: auto"),
        ("names", "Block", "write outer.names: [Block]"),
        ("names", "", "give outer.names as [text, ...] | null"),
        ("count", "x", "give outer.count as a whole number"),
    ],
)
def test_the_fix_can_be_pasted(field: str, given: Any, fix: str):
    assert refused({field: given}).fix == fix


@pytest.mark.parametrize(
    ("given", "field", "fix"),
    [
        ({"A": True}, "outer.texts.A", 'A: "true"'),
        ({"A": None}, "outer.texts.A", 'A: "..."'),
        ({"A": [1, 2]}, "outer.texts.A", 'A: "..."'),
        ({"A": {"B": 1}}, "outer.texts.A", 'A: "..."'),
        ({"A": math.inf}, "outer.texts.A", 'A: "inf"'),
        ({"A": datetime.date(2026, 1, 31)}, "outer.texts.A", 'A: "2026-01-31"'),
        ({1: "x"}, "outer.texts", '"1"'),
    ],
)
def test_what_yaml_reads_as_something_else_than_text_belongs_in_quotes(given: Any, field: str, fix: str):
    error = refused({"texts": given})
    assert (error.field, error.fix) == (field, f"write it in quotes: {fix}")


def test_an_error_names_the_full_path():
    assert refused({"names": ["a", 5]}).field == "outer.names[1]"
    assert refused({"inner": {"mode": "mid"}}).field == "outer.inner.mode"
    assert refused({"word_or_map": {"lvl": 1}}).field == "outer.word_or_map.lvl"
    assert refused({"count": "x"}, path="").field == "count"
    assert refused({"cuont": 1}, path="").field == "cuont"


def test_a_rule_of_a_nested_section_gets_its_path():
    error = refused({"inner": {"level": -1}}, path="a.b")
    assert str(error) == "a.b.inner.level: got -1\n  allowed: >= 0\n  fix:     write level: 0"
    assert refused({"word_or_map": {"level": -2}}).field == "outer.word_or_map.level"


def test_something_else_than_a_mapping_is_refused():
    error = refused(["count"])
    assert (error.field, error.given, error.allowed) == ("outer", ["count"], "a mapping of keys to values")


@pytest.mark.parametrize(
    ("key", "fix"),
    [
        ("warmup_step", "write optim.warmup_steps"),
        ("warm", "write optim.warmup_steps"),  # abbreviated
        ("learning_rate", "write optim.lr"),  # spelled out
        ("bogus", "remove this key"),
    ],
)
def test_an_unknown_key_gets_the_nearest_right_one(key: str, fix: str):
    error = unknown_key(f"optim.{key}", 1, key, ["warmup_steps", "lr", "eps"])
    assert error.fix == fix
    assert error.allowed == "one of eps, lr, warmup_steps"
    assert error.given == "1 for a key that does not exist"


def test_an_abbreviated_key_is_never_accepted():
    assert refused({"coun": 1}).fix == "write outer.count"
    assert refused({1: 1}).field == "outer.1"


def test_accepts_shows_the_fields_as_parameters():
    class Taker:
        @accepts(Outer)
        def __init__(self, **options: Any) -> None:
            self.options = options

    parameters = inspect.signature(Taker).parameters
    assert list(parameters) == list(Outer.__dataclass_fields__)
    assert parameters["maybe"].annotation == int | None
    assert parameters["ratio"].default == 0.5
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in parameters.values())
    assert Taker(count=1).options == {"count": 1}


def test_field_docs_are_the_sentences_under_the_fields():
    assert field_docs(Inner) == {"level": "How deep.", "mode": "Which one of two."}
    assert field_docs(Outer) == {"count": "A number of things."}


def test_a_key_that_is_needed_is_asked_for():
    with pytest.raises(ConfigError, match=r"data\.train\[1\]\.source: got nothing"):
        build(DataConfig, {"train": ["a.jsonl", {"weight": 2.0}]}, "data")
