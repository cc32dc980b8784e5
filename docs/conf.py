"""How Sphinx builds the manual. What the reference pages list is read from the code while they are built."""

from __future__ import annotations

import dataclasses
import importlib
import os
import subprocess
import sys
import types
import typing
from pathlib import Path
from typing import Any

import docstring_parser
from docutils import nodes
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from lit_fsdp import __version__  # noqa: E402
from lit_fsdp.commands.recipes import by_model, recipe_row  # noqa: E402

project = "lit_fsdp"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
copybutton_prompt_text = "$ "
copybutton_line_continuation_character = "\\"
copybutton_copy_empty_lines = False
myst_heading_anchors = 3
html_theme = "furo"
html_title = f"lit_fsdp {__version__}"
html_show_copyright = False
html_static_path = ["static"]
html_css_files = ["manual.css"]
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = True
autodoc_typehints_format = "fully-qualified"
exclude_patterns = ["pictures"]


class Fields(SphinxDirective):
    """The fields of a dataclass: name, type, default and the sentence under it, as ``--help`` has them.

    The second argument is the path of the section; each key can be linked to as ``#path.key``.
    """

    required_arguments = 2

    def run(self) -> list[nodes.Node]:
        """A definition list."""
        module, _, name = self.arguments[0].rpartition(".")
        cls = getattr(importlib.import_module(module), name)
        hints = typing.get_type_hints(cls)
        descriptions = {one.arg_name: one.description for one in docstring_parser.parse_from_object(cls).params}
        found = nodes.definition_list()
        for field in dataclasses.fields(cls):
            default = "" if field.default is dataclasses.MISSING else f", default: {default_words(field.default)}"
            anchor = f"{self.arguments[1]}.{field.name}"
            link = nodes.reference("", "¶", refuri=f"#{anchor}", classes=["headerlink"])
            kind = nodes.inline("", f" ({type_words(hints[field.name])}{default})", classes=["kind"])
            term = nodes.term("", "", nodes.literal("", field.name), kind, link)
            term["ids"].append(anchor)
            text = nodes.definition("", nodes.paragraph("", " ".join(descriptions[field.name].split())))
            item = nodes.definition_list_item("", term, text)
            self.set_source_info(item)
            found += item
        target = nodes.target("", "", ids=[cls.__name__])  # of links to the class
        self.env.get_domain("py").note_object(self.arguments[0], "class", cls.__name__, location=target)
        return [target, found]


class Command(SphinxDirective):
    """What ``lit-fsdp WORDS`` prints on standard output."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """The command and its output as one literal block."""
        environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "100"}
        words = [sys.executable, "-m", "lit_fsdp", *self.arguments[0].split()]
        done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise self.error(f"lit-fsdp {self.arguments[0]} ended with {done.returncode}: {done.stderr[-800:]}")
        text = done.stdout.replace(str(ROOT), "/shared/project").replace(sys.executable, "python")
        return [nodes.literal_block("", f"$ lit-fsdp {self.arguments[0]}\n{text}", language="text")]


class Recipes(SphinxDirective):
    """The recipes that ship, by hardware and size of the model."""

    def run(self) -> list[nodes.Node]:
        """A table."""
        rows = [recipe_row(file.stem, file) for file in (ROOT / "recipes").glob("*.yaml")]
        rows.sort(key=by_model)
        cells = [(row["hardware"], row["parameters"], row["name"]) for row in rows]
        return [table(("hardware", "parameters", "recipe"), cells)]


def table(head: tuple[str, ...], rows: list[Any]) -> nodes.table:
    """Rows of text as a table, the last column as names."""
    group = nodes.tgroup("", *(nodes.colspec(colwidth=1) for _ in head), cols=len(head))
    for place, lines in ((nodes.thead(), [head]), (nodes.tbody(), rows)):
        for line in lines:
            texts = [nodes.literal("", cell) if cell is line[-1] else nodes.Text(str(cell)) for cell in line]
            place += nodes.row("", *(nodes.entry("", nodes.paragraph("", "", text)) for text in texts))
        group += place
    return nodes.table("", group)


def default_words(value: Any) -> str:
    """A default as a recipe writes it."""
    if dataclasses.is_dataclass(value):
        return "{}"
    if type(value) in (int, float):
        return f"{value:g}"
    return str({None: "null", True: "true", False: "false"}.get(value, value))


def type_words(hint: Any) -> str:
    """A type as words: the values it allows where they are listed."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return " | ".join(map(str, arguments))
    if origin in (typing.Union, types.UnionType):
        return " | ".join(type_words(one) for one in arguments)
    if origin in (list, dict, tuple):
        return f"{origin.__name__}[{', '.join(type_words(one) for one in arguments)}]"
    if dataclasses.is_dataclass(hint):
        return f"mapping ({hint.__name__})"
    name = getattr(hint, "__name__", str(hint))
    return "null" if name == "NoneType" else name


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.add_directive("fields", Fields)
    app.add_directive("lit-fsdp", Command)
    app.add_directive("recipes", Recipes)
