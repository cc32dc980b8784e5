"""What surrounds the code: tests that assert, packaging that pins, text that speaks only of the project."""

from __future__ import annotations

import ast
import contextlib
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))
_NOT_OURS = {".git", ".venv", "venv", "runs", "data", "build", "dist", "exports", "__pycache__"}
_TEXT_SUFFIXES = {".py", ".md", ".yaml", ".yml", ".toml", ".txt", ".json", ".sh", ""}
# Packages that the code imports although it does not ask for them itself, and who brings them.
_BROUGHT_BY = {
    "numpy": "datasets",
    "pyarrow": "datasets",
    "tokenizers": "transformers",
    "huggingface_hub": "transformers",
    "packaging": "transformers",
    "gguf": "the extra of that name",
    "torchao": "the extra fp8",
    "peft": "the extra lora",
    "liger_kernel": "the extra liger",
    "matplotlib": "the extra plot",
}
_MODULE_OF = {"pyyaml": "yaml"}


def _texts() -> Iterator[tuple[Path, str]]:
    """Every text file of the checkout that is not made by a tool or a run."""
    stack = [ROOT]
    while stack:
        for entry in stack.pop().iterdir():
            ours = entry.name not in _NOT_OURS or entry == ROOT / "tests" / "dist" or entry.parent == ROOT / "lit_fsdp"
            if entry.is_dir() and not entry.is_symlink():
                if ours and not entry.name.endswith(("_cache", ".egg-info")):
                    stack.append(entry)
            elif entry.suffix in _TEXT_SUFFIXES:
                with contextlib.suppress(FileNotFoundError):  # of somebody who works in this checkout meanwhile
                    text = entry.read_text(encoding="utf-8")
                    yield entry.relative_to(ROOT), text


def _asserts(function: ast.AST) -> bool:
    for node in ast.walk(function):
        if isinstance(node, ast.Assert):
            return True
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func).split(".")
            if called[0] == "pytest" and called[-1] in ("raises", "warns", "fail"):
                return True
            if called[-1].lstrip("_").startswith("assert_"):
                return True
    return False


@pytest.mark.parametrize("path", TESTS, ids=lambda path: str(path.relative_to(ROOT / "tests")))
def test_every_test_asserts(path: Path):
    tests = [
        node
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    assert tests, f"{path} holds no test"
    assert [node.name for node in tests if not _asserts(node)] == []


def _project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def _name(text: str) -> str:
    return text.lower().replace("_", "-")


def _pins() -> dict[str, Version]:
    lines = [line for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if line]
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    return {_name(name): Version(version) for name, version in pairs}


def test_constraints_pin_exactly_and_portably():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert [line for line in pins if not re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][A-Za-z0-9.]*", line)] == []
    assert len(pins) == len(_pins())


def test_every_dependency_that_make_installs_is_pinned_within_its_range():
    project, pins = _project(), _pins()
    extras = project["optional-dependencies"]
    for text in [*project["dependencies"], *extras["gguf"], *extras["dev"], *extras["docs"]]:
        requirement = Requirement(text)
        pin = pins[_name(requirement.name)]
        assert requirement.specifier.contains(pin), f"{text} excludes the pinned {pin}"
        assert ">=" in str(requirement.specifier), f"{text} has no floor"


def test_the_code_imports_only_what_it_asks_for():
    declared = {_name(Requirement(text).name) for text in _project()["dependencies"]}
    allowed = {_MODULE_OF.get(name, name).replace("-", "_") for name in declared} | set(_BROUGHT_BY) | {"lit_fsdp"}
    foreign = set()
    for path in (ROOT / "lit_fsdp").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                foreign.update(alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                foreign.add(node.module.split(".")[0])
    assert foreign - set(sys.stdlib_module_names) <= allowed


_FORBIDDEN = {
    "a path of one machine": r"(?<![\w.])/(?:work|root|opt|(?:home|Users)(?!/somebody))/\w",
    "the host of a registry": r"\b(?:pypi\.org|pythonhosted|registry\.npmjs|download\.pytorch|deb\.debian)",
    "how the text came about": r"\b(?:this|last|next|earlier|another) session\b|\bsub-?agents?\b|\bworkplace\b",
    "a document that is not part of the project": r"\b(?:DESIGN|REQUIREMENTS|FACTS)(?:\.md)?\b",
    "a numbered task": r"(?<![/\w])[Ii]ssue (?:#\s*)?\d+|\brow [A-I]\d\b",
    "unfinished work": r"\b(?:TODO|FIXME|XXX|HACK)\b",
}


@pytest.mark.parametrize("what", _FORBIDDEN)
def test_the_text_speaks_only_of_the_project(what: str):
    found = [
        f"{path}:{number}: {line.strip()}"
        for path, text in _texts()
        if path.name not in ("test_project.py", "LICENSE")
        for number, line in enumerate(text.splitlines(), 1)
        if re.search(_FORBIDDEN[what], line)
    ]
    assert found == []


def test_every_folder_of_tests_is_collected(pytestconfig: pytest.Config) -> None:
    """By default pytest passes over a folder called dist without a word."""
    skipped = pytestconfig.getini("norecursedirs")
    folders = [path for path in (ROOT / "tests").iterdir() if path.is_dir() and list(path.glob("test_*.py"))]
    assert {path.name for path in folders} >= {"dist", "gpu", "configs"}
    assert not [path.name for path in folders if any(path.match(pattern) for pattern in skipped)]


def test_every_package_travels_in_the_wheel():
    """Written out in pyproject.toml, because ``find`` cannot put configs/ and recipes/ inside of the package."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    found = {".".join(file.parent.relative_to(ROOT).parts) for file in (ROOT / "lit_fsdp").rglob("__init__.py")}
    assert set(setuptools["packages"]) == found | {"lit_fsdp.configs", "lit_fsdp.recipes"}
    assert setuptools["package-dir"] == {"lit_fsdp.configs": "configs", "lit_fsdp.recipes": "recipes"}
