"""The shape of the code: imports point down and in no circle, heavy ones come late, what is public is documented."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
# From the ground up; packages in one row do not import each other.
FLOORS = (
    "errors redaction",
    "host",
    "logs signals config",
    "exit_codes",
    "metrics data models convert parity",
    "checkpoint",
    "parallel report launch",
    "strategy module datamodule callbacks audit",
    "preference plan",
    "cli",
    "commands",
    "__main__",
)
FLOOR = {package: floor for floor, row in enumerate(FLOORS) for package in row.split()}
LIGHTNING = ("strategy", "module", "datamodule", "callbacks", "cli", "parallel")
HEAVY = ("torch", "lightning", "transformers", "torchmetrics", "datasets", "numpy", "safetensors")


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


FILES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in (ROOT / "lit_fsdp").rglob("*.py")}
MODULES = {name.removesuffix(".__init__"): path for name, path in sorted(FILES.items())}


@functools.cache
def imports(path: Path) -> list[tuple[str, ast.AST]]:
    """Every module that a file imports, at its head or inside a function."""
    found: list[tuple[str, ast.AST]] = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found += [(alias.name, node) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [(name if name in MODULES else str(node.module), node) for name in names]
    return found


def package(module: str) -> str:
    """``lit_fsdp.models.build`` → ``models``; the root package itself → empty."""
    return module.split(".")[1] if "." in module else ""


def test_imports_point_down_and_in_no_circle():
    graph: dict[str, set[str]] = {}
    for name, path in MODULES.items():
        if not package(name):
            continue  # the root package offers names from everywhere, lazily
        graph[name] = {target for target, _ in imports(path) if package(target) and target in MODULES} - {name}
        here = package(name)
        wrong = [one for one in graph[name] if package(one) != here and FLOOR[package(one)] >= FLOOR[here]]
        assert wrong == [], f"{name} imports what is not below it"
    assert list(TopologicalSorter(graph).static_order())  # CycleError names a circle


def test_lightning_is_imported_only_where_it_is_met():
    for name, path in MODULES.items():
        found = {target.split(".")[0] for target, _ in imports(path)}
        assert package(name) in LIGHTNING or found.isdisjoint({"lightning", "pytorch_lightning"}), name


def test_help_loads_nothing_heavy():
    for words in ("--help", "audit --help", "slurm --help", "ckpt ls --help"):
        code = "import sys; from lit_fsdp.commands import run\ntry: run(sys.argv[1:])\nexcept SystemExit: pass\n"
        code += f"print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)"
        command = [sys.executable, "-c", code, *words.split()]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        assert (done.stdout[:6].lower(), done.stderr) == ("usage:", "[]\n"), words


def undocumented(body: list[ast.stmt], where: str) -> Iterator[str]:
    for node in body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_"):
            setter = any(ast.unparse(decorator).endswith(".setter") for decorator in node.decorator_list)
            if ast.get_docstring(node) is None and not setter:
                yield f"{where}.{node.name}"
            if isinstance(node, ast.ClassDef):
                yield from undocumented(node.body, f"{where}.{node.name}")


def test_everything_public_is_documented():
    for name, path in MODULES.items():
        assert ast.get_docstring(tree(path)), name
        assert list(undocumented(tree(path).body, name)) == []
