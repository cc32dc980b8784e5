"""A sample of the quickstart as `lit-fsdp data inspect` shows it; python docs/pictures/mask.py.

Needs what ``make quickstart`` installs.
"""

from __future__ import annotations

import io
import os
import re

from drawing import HERE, ROOT
from rich.console import Console
from rich.terminal_theme import MONOKAI


def main() -> None:
    """Two rows, in color."""
    import quickstart

    os.chdir(ROOT)
    quickstart.prepare_model()
    quickstart.prepare_rows()
    from lit_fsdp.config.parser import load_recipe
    from lit_fsdp.data.cache import prepare_rows
    from lit_fsdp.data.encode import RowEncoder
    from lit_fsdp.models.resolve import resolve_model
    from lit_fsdp.models.tokenizers import load_tokenizer
    from lit_fsdp.report.data import print_samples

    run = load_recipe(["--config", "recipes/quickstart.yaml"], "data").run
    source = resolve_model(run.model, with_weights=False)
    tokenizer = load_tokenizer(source, run.model)
    rows = prepare_rows(run.data.train, run.data, RowEncoder(tokenizer, run.data, source.num_embeddings))
    console = Console(record=True, width=112, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    print_samples(console, tokenizer, "train", [rows.row(0), rows.row(1)])
    svg = console.export_svg(title="lit-fsdp data inspect --config recipes/quickstart.yaml --n 2", theme=MONOKAI)
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # nothing is fetched
    svg = svg.replace("Fira Code, monospace", "monospace")
    (HERE / "mask.svg").write_text(svg, encoding="utf-8")
    print(f"mask.svg: {len(svg):,} bytes")


if __name__ == "__main__":
    main()
