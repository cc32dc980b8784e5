"""The shape of the code: floors, import places, sizes, names and docstrings."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "lit_fsdp"
SOURCES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

# Imports point down only, and two places on one floor do not know each other.
FLOORS = {
    "errors": 0,
    "redaction": 0,
    "host": 1,
    **dict.fromkeys(("speak", "signals", "ending"), 2),
    "config": 2,
    **dict.fromkeys(("metrics", "data", "models", "checkpoint", "profiling", "convert"), 3),
    **dict.fromkeys(("parallel", "plan", "report", "launch"), 4),
    **dict.fromkeys(("strategy", "module", "datamodule", "callbacks", "audit"), 5),
    **dict.fromkeys(("cli", "commands", "__main__"), 6),
}
_COMMAND_FLOOR = 6  # its three places are one chain: __main__ → commands → cli

LIGHTNING_PLACES = ("strategy", "module", "datamodule", "callbacks", "cli", "parallel")
OPTIONAL_PACKAGES = ("datasets", "gguf", "peft", "torchao", "liger_kernel", "wandb", "tensorboard")
TORCH_FREE = ("config", "errors", "redaction", "host", "signals", "commands", "__main__")


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_module_name(path): path for path in SOURCES}


def _imports(path: Path) -> Iterator[tuple[str, ast.AST]]:
    """Every module that a file imports, at its head or inside a function."""
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield (full if full in MODULES else str(node.module)), node


def _place(module: str) -> str:
    """``lit_fsdp.models.build`` → ``models``; the root package itself → empty."""
    return module.split(".")[1] if "." in module else ""


def _functions(path: Path) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in ast.walk(_tree(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield f"{path.relative_to(ROOT)}:{node.name}", node


def _is_public(name: str) -> bool:
    return not name.startswith("_")


def test_every_place_has_a_floor():
    places = {_place(name) for name in MODULES} - {""}
    assert places <= set(FLOORS), f"give these a floor: {sorted(places - set(FLOORS))}"


def test_imports_point_down():
    wrong = []
    for name, path in MODULES.items():
        here = _place(name)
        if not here:
            continue  # the root package offers names from everywhere, lazily
        for target, node in _imports(path):
            there = _place(target) if target.startswith("lit_fsdp.") else ""
            if not there or there == here:
                continue
            level_here, level_there = FLOORS[here], FLOORS[there]
            if level_there > level_here or (level_there == level_here != _COMMAND_FLOOR):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} (floor {level_here}) imports {target}")
    assert wrong == []


def test_no_import_circles():
    graph = {
        name: {target for target, _ in _imports(path) if target in MODULES and target not in ("lit_fsdp", name)}
        for name, path in MODULES.items()
        if name != "lit_fsdp"
    }
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " → ".join([*path[path.index(name) :], name])
        if name not in done:
            for target in sorted(graph[name]):
                visit(target, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_lightning_is_imported_only_where_it_is_met():
    wrong = [
        f"{path.relative_to(ROOT)}: {target}"
        for name, path in MODULES.items()
        for target, _ in _imports(path)
        if target.split(".")[0] in ("lightning", "pytorch_lightning", "lightning_fabric")
        and not name.removeprefix("lit_fsdp.").startswith(LIGHTNING_PLACES)
    ]
    assert wrong == []


@pytest.mark.parametrize("package", OPTIONAL_PACKAGES)
def test_heavy_packages_have_one_home_and_load_late(package: str):
    homes = set()
    for path in SOURCES:
        functions = [node for _, node in _functions(path)]
        late = {id(inner) for function in functions for inner in ast.walk(function)}
        for target, node in _imports(path):
            if target.split(".")[0] == package:
                homes.add(path)
                assert id(node) in late, f"{path}: import {package} inside the function that needs it"
    assert len(homes) <= 1, f"{package} is imported in {sorted(map(str, homes))}"


def test_config_and_commands_never_load_torch():
    heavy = ("torch", "lightning", "transformers", "torchmetrics", "datasets", "numpy", "safetensors")
    names = [name for name in MODULES if _place(name) in TORCH_FREE]
    for name in names:
        heads = {target.split(".")[0] for target, node in _imports(MODULES[name]) if node in _tree(MODULES[name]).body}
        assert heads.isdisjoint(heavy), f"{name} imports {heads.intersection(heavy)} at its head"
    code = f"import sys, {', '.join(names)}; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_names_say_what_a_thing_is():
    banned_files = {"utils.py", "util.py", "helpers.py", "helper.py", "misc.py", "common.py"}
    assert [str(path) for path in SOURCES + TESTS if path.name in banned_files] == []
    classes = [node.name for path in SOURCES for node in ast.walk(_tree(path)) if isinstance(node, ast.ClassDef)]
    assert [name for name in classes if name.endswith(("Manager", "Helper", "Handler"))] == []


def _undocumented(body: list[ast.stmt], where: str) -> Iterator[str]:
    for node in body:
        if not isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) or not _is_public(node.name):
            continue
        decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
        is_setter = any(decorator.endswith((".setter", ".deleter")) for decorator in decorators)
        if ast.get_docstring(node) is None and not is_setter:
            yield f"{where}.{node.name}"
        if isinstance(node, ast.ClassDef):
            yield from _undocumented(node.body, f"{where}.{node.name}")


def test_everything_public_is_documented():
    missing = [name for name, path in MODULES.items() if ast.get_docstring(_tree(path)) is None]
    for name, path in MODULES.items():
        missing.extend(_undocumented(_tree(path).body, name))
    assert missing == []


def test_every_field_of_the_config_has_its_sentence():
    missing = []
    for name, path in MODULES.items():
        if _place(name) != "config":
            continue
        for node in ast.walk(_tree(path)):
            if not isinstance(node, ast.ClassDef) or not node.name.endswith("Config") or node.name == "RunConfig":
                continue
            for field, after in zip(node.body, [*node.body[1:], None], strict=True):
                has_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                if isinstance(field, ast.AnnAssign) and not has_text:
                    missing.append(f"{name}.{node.name}.{ast.unparse(field.target)}")
    assert missing == []
