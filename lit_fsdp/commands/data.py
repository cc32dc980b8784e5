"""``data inspect``: see what is trained on, and tokenize it ahead."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from lit_fsdp.commands.parsing import RECIPE, flags_of, run_one_of, verb_parser
from lit_fsdp.errors import require

_SPLITS = ("train", "val", "test", "predict")


def run_data(argv: Sequence[str]) -> int:
    """Run ``lit-fsdp data …`` and return the exit code."""
    text = "counts, lengths, packing, and samples that show what is supervised"
    return run_one_of("data", {"inspect": (text, _inspect)}, argv)


def _inspect(argv: Sequence[str]) -> int:
    text = "What a recipe trains on, by the same code, without a GPU or weights; it is tokenized into the cache of fit."
    example = "lit-fsdp data inspect -c recipes/quickstart.yaml -c configs/debug/smoke.yaml"
    parser = verb_parser("data inspect", text, example, RECIPE)
    parser.add_argument("--n", type=int, default=5, help="samples to show, from the first on (default 5)")
    parser.add_argument("--split", choices=_SPLITS, help="whose samples; default: the first split the recipe has")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="lengths, supervised shares and packs as a picture")
    parser.add_argument("--json", action="store_true", help="JSON instead of a table and text, samples complete")
    options, words = parser.parse_known_args(argv)
    from lit_fsdp.config.parser import load_recipe
    from lit_fsdp.logs import setup_logging

    run = load_recipe(words, "data", flags_of(parser)).run
    there = [split for split in _SPLITS if run.data.has(split)]
    require(there, "data.train", "null", "a source of rows for a split", "set data.train: rows.jsonl")
    options.split = options.split or there[0]
    require(options.split in there, "--split", options.split, f"a split the recipe has: {', '.join(there)}")
    can_draw = options.plot is None or importlib.util.find_spec("matplotlib") is not None
    require(can_draw, "--plot", options.plot, "with matplotlib", "pip install 'lit-fsdp[plot]', or leave --plot out")
    setup_logging()
    from rich.console import Console

    from lit_fsdp.data.encode import RowEncoder
    from lit_fsdp.data.packing import describe_data
    from lit_fsdp.data.stream import prepare_samples
    from lit_fsdp.models.resolve import resolve_model
    from lit_fsdp.models.tokenizers import load_tokenizer
    from lit_fsdp.report.data import data_table, pieces, print_samples, write_plot

    config, source = run.data, resolve_model(run.model, with_weights=False)
    tokenizer = load_tokenizer(source, run.model)
    encoder = RowEncoder(tokenizer, config, source.num_embeddings)
    samples = prepare_samples(config, there, encoder)
    record = describe_data(samples, config, encoder)
    if options.plot is not None:
        write_plot(samples, config.max_seq_length, options.plot)
    split = samples[options.split]
    shown = [split.rows.row(int(row)) for row in split.row_ids[: options.n]]
    if options.json:
        names = ("input_ids", "supervised", "pieces")
        found = [(ids.tolist(), mask.tolist(), pieces(tokenizer, ids, mask)) for ids, mask in shown]
        print(json.dumps({"data": record, "samples": [dict(zip(names, one, strict=True)) for one in found]}, indent=1))
    else:
        console = Console(file=sys.stdout)
        console.print(data_table(record))
        print_samples(console, tokenizer, options.split, shown)
    return 0
