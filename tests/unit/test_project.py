"""What surrounds the code: tests that assert, packaging that pins, text that speaks only of the project."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
# Packages that the code imports although it does not ask for them itself: other dependencies or an extra bring them.
BROUGHT = {"numpy", "pyarrow", "tokenizers", "huggingface_hub", "packaging"}
BROUGHT |= {"gguf", "torchao", "peft", "bitsandbytes", "liger_kernel", "matplotlib", "shtab"}


def asserts(function: ast.FunctionDef) -> bool:
    for node in ast.walk(function):
        called = ast.unparse(node.func).split(".") if isinstance(node, ast.Call) else [""]
        if isinstance(node, ast.Assert) or called[-1] in ("raises", "warns", "fail") or "assert_" in called[-1]:
            return True
    return False


def test_every_test_asserts():
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
        tests = [node for node in functions if node.name.startswith("test_")]
        assert tests, f"{path} holds no test"
        assert [node.name for node in tests if not asserts(node)] == [], path


def test_every_dependency_that_make_installs_is_pinned_within_its_range():
    project, pinned = PYPROJECT["project"], {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):  # nothing but exact versions, which hold for every build of torch
            match = re.fullmatch(r"([A-Za-z0-9_.-]+)==([0-9][A-Za-z0-9.]*)", line)
            assert match, line
            pinned[match[1].lower().replace("_", "-")] = match[2]
    extras = project["optional-dependencies"]
    installed = [text for name in ("gguf", "dev", "docs") for text in extras.get(name, ())]
    for text in [*project["dependencies"], *installed]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(pinned[requirement.name.lower().replace("_", "-")]), text
        assert ">=" in str(requirement.specifier), f"{text} has no floor"


def test_the_code_imports_only_what_it_asks_for():
    declared = {Requirement(text).name.lower().replace("-", "_") for text in PYPROJECT["project"]["dependencies"]}
    allowed = {*declared, *BROUGHT, *sys.stdlib_module_names, "yaml", "lit_fsdp"}
    for path in (ROOT / "lit_fsdp").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            assert {name.split(".")[0] for name in names} <= allowed, path


FORBIDDEN = {
    "a path of one machine": r"(?<![\w.])/(?:work|root|opt|(?:home|Users)(?!/somebody))/\w",
    "the host of a registry": r"\b(?:pypi\.org|pythonhosted|registry\.npmjs|download\.pytorch|deb\.debian)",
    "how the text came about": r"\b(?:this|last|next|earlier|another) session\b|\bsub-?agents?\b|\bworkplace\b",
    "a document that is not part of the project": r"\b(?:DESIGN|REQUIREMENTS|FACTS)(?:\.md)?\b",
    "a numbered task": r"(?<![/\w])[Ii]ssue (?:#\s*)?\d+|\brow [A-I]\d\b",
    "unfinished work": r"\b(?:TODO|FIXME|XXX|HACK)\b",
}


def test_the_text_speaks_only_of_the_project():
    """Of every file that git knows, or would after `git add`; in a folder without git there is nothing to publish."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.split("\0")
    files = [ROOT / name for name in listed if name and Path(name).name not in ("test_project.py", "LICENSE")]
    for path in (path for path in files if path.is_file()):
        text = path.read_bytes().decode("utf-8", errors="ignore")
        for what, pattern in FORBIDDEN.items():
            found = re.search(pattern, text)
            assert not found, f"{path}: {what}: {found[0]}"
