"""README.md and the manual: links lead somewhere, YAML is a recipe, commands are in blocks that are run."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from lit_fsdp.config.parser import lightning_keys, load_recipe, recipe_parser
from tests.pages import NEEDS, PAGES, ROOT, blocks

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


@pages
def test_links_lead_to_files_and_headings(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        found = page.parent / path if path else page
        assert found.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", found.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}, target


@pages
def test_yaml_is_a_recipe(page: Path, tmp_path: Path) -> None:
    for text in blocks(page, "yaml"):
        (tmp_path / "page.yaml").write_text(text, encoding="utf-8")
        words = ["--config", str(ROOT / "recipes/quickstart.yaml"), "--config", str(tmp_path / "page.yaml")]
        assert load_recipe(words, "fit").run.model.name


@pages
def test_commands_are_in_blocks_that_are_run_or_say_what_they_need(page: Path) -> None:
    needing = [block for block in blocks(page, "sh") if block.startswith(NEEDS)]
    assert all(len(block.splitlines()[0]) > len(NEEDS) for block in needing)
    for block in blocks(page, "yaml", "json", "python", "bash", "console"):
        assert not re.search(r"^(\$ )?(lit-fsdp|make|pip) ", block, re.MULTILINE), block


def test_the_readme_is_short_and_the_manual_names_every_promise_in_order() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 90
    text = (ROOT / "docs/verification.md").read_text(encoding="utf-8")
    named = re.findall(r"\| `(tests/spec/test_\d\d_\w+\.py)` \|", text)
    assert named == [str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests" / "spec").glob("test_*.py"))]


def test_the_architecture_names_functions_that_exist() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"\| `(lit_fsdp/[\w/]+\.py)` \| `([\w.]+)` \|", text)
    assert len(rows) == len(re.findall(r"\| `lit_fsdp/", text)) > 30
    for file, path in rows:
        nodes: Sequence[ast.AST] = ast.parse((ROOT / file).read_text(encoding="utf-8")).body
        for name in path.split("."):
            node = next((node for node in nodes if getattr(node, "name", "") == name), None)
            assert node is not None, f"{file} has no {path}"
            nodes = getattr(node, "body", ())


def test_every_key_of_a_recipe_has_an_anchor_in_the_manual() -> None:
    text = (ROOT / "docs/reference-recipe.md").read_text(encoding="utf-8")
    anchors: list[str] = []
    for module, name, path in re.findall(r"\{fields\} ([\w.]+)\.(\w+) ([\w.]+)\n", text):
        section = getattr(importlib.import_module(module), name)
        anchors += [f"{path}.{field.name}" for field in dataclasses.fields(section)]
    assert len(anchors) == len(set(anchors)) > 150
    own = {action.dest for action in recipe_parser(is_preference=True)._actions}
    own -= {f"trainer.{key}" for key in lightning_keys()}
    sections = ("trainer.strategy.init_args.", "model.", "data.", "checkpoint.", "resume.", "samples.", "slurm.")
    keys = {dest for dest in own if dest.startswith(sections) and not dest.endswith(".help")}
    assert keys - {"model.preference"} <= set(anchors)  # a section, whose keys are there
