"""Versions against the floors of our own metadata, on one machine and between nodes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

import pytest

from lit_fsdp.launch.checks.row import Row
from lit_fsdp.launch.checks.versions import Installed, compare_nodes, installed, judge_versions, lacks_torch

REQUIRES = (
    "torch>=2.11",
    "lightning>=2.6.6",
    "jsonargparse[signatures]>=4.40",
    'peft>=0.17; extra == "lora"',
    'peft>=0.17; extra == "dev"',
    'pytest>=8; extra == "dev"',
)
FINE = {"lit-fsdp": "0.1.0", "torch": "2.13.0+cu128", "lightning": "2.6.6", "jsonargparse": "4.40", "peft": "0.17.1"}


def rows(found: Mapping[str, str | None], *extras: str, python: str = "3.12.1") -> dict[str, Row]:
    facts = Installed(python, ">=3.11", REQUIRES, {**FINE, **found}.get)
    return {row.name: row for row in judge_versions(facts, extras)}


def test_what_meets_the_floors_is_good():
    found = rows({})
    assert list(found) == ["Python", "lit-fsdp", "torch", "lightning", "jsonargparse"]
    assert {row.grade for row in found.values()} == {"good"}
    assert found["torch"].found == "2.13.0+cu128 (>=2.11)"


@pytest.mark.parametrize(
    ("change", "name", "words"),
    [
        ({"torch": "2.10.1"}, "torch", ["2.10.1", ">=2.11"]),
        ({"torch": None}, "torch", ["not installed"]),
        ({"lightning": "2.6.5"}, "lightning", ["2.6.5", ">=2.6.6"]),
        ({"jsonargparse": None}, "jsonargparse", ["not installed"]),
    ],
)
def test_what_is_missing_or_too_old_is_bad(change: dict[str, str | None], name: str, words: list[str]):
    row = rows(change)[name]
    assert row.grade == "bad"
    assert all(word in row.found for word in words)
    assert row.fix.startswith(f'python -m pip install "{name}>=')
    assert lacks_torch([row]) == (name != "jsonargparse")


@pytest.mark.parametrize("version", ["2.6.2", "2.6.3"])
def test_a_malicious_release_is_bad_whatever_the_floor(version: str):
    row = rows({"lightning": version})["lightning"]
    assert row.grade == "bad"
    assert "malicious" in row.found
    assert "password" in row.fix
    loose = Installed("3.12.1", ">=3.11", ("torch>=2.11", "lightning"), {**FINE, "lightning": version}.get)
    assert [row.grade for row in judge_versions(loose) if row.name == "lightning"] == ["bad"]


def test_a_build_from_before_the_release_is_a_warning():
    row = rows({"torch": "2.11.0a0+git1234"})["torch"]
    assert row.grade == "warning"
    assert not lacks_torch([row])


def test_an_extra_counts_if_the_recipe_needs_it():
    assert rows({}, "lora")["peft"].grade == "good"
    bad = rows({"peft": None}, "lora")["peft"]
    assert bad.grade == "bad"
    assert "lit-fsdp[lora]" in bad.fix
    assert "peft" not in rows({"peft": None})


def test_an_old_python_is_bad():
    assert rows({}, python="3.10.2")["Python"].grade == "bad"


def test_a_checkout_that_was_never_installed_is_said():
    found = judge_versions(Installed("3.12.1", None, (), {"torch": "2.13"}.get))
    grades = {row.name: row.grade for row in found}
    assert grades == {"Python": "good", "lit-fsdp": "warning", "lightning": "bad"}


def test_this_interpreter_is_good():
    assert "bad" not in {row.grade for row in judge_versions(installed())}


def test_nodes_with_the_same_and_with_other_versions():
    same = {"a": {"torch": "2.13", "peft": None}, "b": {"torch": "2.13", "peft": None}}
    assert compare_nodes(same).grade == "good"
    row = compare_nodes({**same, "c": {"torch": "2.12", "peft": None}})
    assert row.grade == "bad"
    assert row.found == "torch: 2.13 on a b, 2.12 on c"


def test_nothing_heavy_is_imported_for_it():
    code = (
        "import sys; import lit_fsdp.launch.doctor_together, lit_fsdp.launch.doctor_table\n"
        "from lit_fsdp.launch.checks.versions import *; judge_versions(installed())\n"
        "print([m for m in ('torch', 'lightning', 'numpy', 'transformers', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")
