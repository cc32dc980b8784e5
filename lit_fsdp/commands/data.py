"""``data inspect``: inspect the training data and tokenize it before a run."""

import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from lit_fsdp.commands.parsing import RECIPE, flags_of, run_one_of, verb_parser
from lit_fsdp.errors import require
from lit_fsdp.host import heavy_imports

_SPLITS = ("train", "val", "test", "predict")


def run_data(argv: Sequence[str]) -> int:
    """Run ``lit-fsdp data …`` and return the exit code."""
    text = "show counts, lengths, packing, and samples with supervised tokens"
    return run_one_of("data", {"inspect": (text, _inspect)}, argv)


def _inspect(argv: Sequence[str]) -> int:
    text = "Show what a recipe trains on with the code of fit, without a GPU or weights; fills the token cache of fit."
    example = "lit-fsdp data inspect -c recipes/quickstart.yaml -c configs/debug/smoke.yaml"
    parser = verb_parser("data inspect", text, example, RECIPE)
    parser.add_argument("--n", type=int, default=5, help="number of samples to show (default 5)")
    parser.add_argument("--split", choices=_SPLITS, help="split of the samples; default: the first split of the recipe")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="plot lengths, supervised shares and packs")
    parser.add_argument("--json", action="store_true", help="JSON with complete samples instead of a table and text")
    options, words = parser.parse_known_args(argv)
    from lit_fsdp.config.parser import load_recipe
    from lit_fsdp.logs import setup_logging

    run = load_recipe(words, "data", flags_of(parser)).run
    there = [split for split in _SPLITS if run.data.has(split)]
    require(there, "data.train", "null", "a source of rows for at least one split", "set data.train: rows.jsonl")
    options.split = options.split or there[0]
    require(options.split in there, "--split", options.split, f"a split of the recipe: {', '.join(there)}")
    can_draw = options.plot is None or importlib.util.find_spec("matplotlib") is not None
    require(can_draw, "--plot", options.plot, "with matplotlib", "pip install 'lit-fsdp[plot]', or omit --plot")
    require(options.n >= 0, "--n", options.n, ">= 0", f"write --n {abs(options.n)}")
    setup_logging()

    with heavy_imports():
        from lit_fsdp.data.encode import RowEncoder
        from lit_fsdp.data.packing import describe_data
        from lit_fsdp.data.sources import check_files
        from lit_fsdp.data.stream import prepare_samples
        from lit_fsdp.models.resolve import resolve_model
        from lit_fsdp.models.tokenizers import load_tokenizer
        from lit_fsdp.report.data import data_table, pieces, print_samples, write_plot
        from lit_fsdp.report.tables import console_for

    check_files(run.data, there)
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
        console = console_for(sys.stdout)
        console.print(data_table(record))
        print_samples(console, tokenizer, options.split, shown)
    return 0
