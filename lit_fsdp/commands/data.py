"""``data inspect`` and ``data prepare``: see what is trained on, and make it ahead."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_fsdp.commands.parsing import RECIPE, example_lines, flags_of, run_one_of, verb_parser
from lit_fsdp.errors import DataError, require

if TYPE_CHECKING:
    from lit_fsdp.config.data import DataConfig
    from lit_fsdp.config.run import RunConfig
    from lit_fsdp.data.encode import RowEncoder
    from lit_fsdp.data.packing import Samples

_SPLITS = ("train", "val", "test", "predict")
_INSPECT = "lit-fsdp data inspect -c recipes/quickstart.yaml -c configs/debug/smoke.yaml"
_USAGE = f"""usage: lit-fsdp data inspect {RECIPE}
       lit-fsdp data prepare {RECIPE}

  inspect   what a recipe trains on: counts, lengths, packing, and samples with
            what is supervised made visible
  prepare   tokenize every split ahead, into the cache that fit uses; needs no
            GPU and no weights

lit-fsdp data VERB --help explains one of them

{example_lines(_INSPECT)}"""


def run_data(argv: Sequence[str]) -> int:
    """Run ``lit-fsdp data …`` and return the exit code."""
    return run_one_of("data", {"inspect": _inspect, "prepare": _prepare}, _USAGE, argv)


def _inspect(argv: Sequence[str]) -> int:
    parser = verb_parser(
        "data inspect",
        "What a recipe trains on, by the same code, from the same cache; exit code 1 if it could not be trained on.",
        _INSPECT,
        RECIPE,
    )
    parser.add_argument("--n", type=int, default=5, help="rows to show, from the first that is used on (default 5)")
    parser.add_argument("--split", choices=_SPLITS, help="which rows to show; default: the first split the recipe has")
    parser.add_argument("--row", type=int, help="show what becomes of this row of the sources, counted from 0, instead")
    parser.add_argument("--ids", action="store_true", help="every token alone, with its number")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="lengths, supervised shares and packs as a picture")
    parser.add_argument("--json", action="store_true", help="JSON instead of tables and text, samples complete")
    options, run = _read(parser, argv)
    for name in ("n", "row"):
        require((getattr(options, name) or 0) >= 0, f"--{name}", getattr(options, name), ">= 0")
    there = [split for split in _SPLITS if run.data.has(split)]
    split = options.split or there[0]
    require(split in there, "--split", split, f"a split the recipe has: {', '.join(there)}")
    if options.plot is not None:
        from lit_fsdp.report.data_tables import check_plot

        check_plot(options.plot)
    return _show(options, run.data, split, _encoder(run))


def _show(options: argparse.Namespace, config: DataConfig, split: str, encoder: RowEncoder) -> int:
    import numpy as np

    from lit_fsdp.data.packing import prepare_samples
    from lit_fsdp.data.stats import describe_data, split_numbers
    from lit_fsdp.report.data_tables import print_data, write_plot
    from lit_fsdp.report.samples import pieces, print_samples, show_rows, visible_lines
    from lit_fsdp.report.tables import wide_console

    samples: dict[str, Samples] = {}
    record, at_work = None, "train"
    try:
        for at_work in _cached_splits(config):
            samples |= prepare_samples(config, [at_work], encoder)
        at_work = "train"  # a stream, if anything fails now
        numbers = split_numbers(samples, config, encoder if config.streaming and config.has("train") else None)
        record = describe_data(numbers, config, encoder)
    except DataError as error:
        print(f"error: {visible_lines(str(error))}", file=sys.stderr)
        split = options.split or at_work
    wanted = list(range(options.n))
    if options.row is not None:
        wanted = [options.row]
    elif split in samples:
        wanted = np.unique(samples[split].rows.numbers[samples[split].row_ids])[: options.n].tolist()
    section = "train" if split == "val" and config.val_split is not None else split
    shown = show_rows(config, section, encoder, wanted)
    if options.row is not None and record is not None:
        require(shown, "--row", options.row, f"the number of a row of data.{section}, from 0 on", "--row 0")
    if options.json:
        found = [
            {
                **vars(sample),
                "input_ids": sample.input_ids.tolist(),
                "supervised": sample.supervised.astype(int).tolist(),
                "pieces": [vars(piece) for piece in pieces(encoder.tokenizer, sample)],
            }
            for sample in shown
        ]
        print(json.dumps({"data": record, "samples": found}, indent=1, default=str))
    else:
        if record is not None:
            print_data(record, sys.stdout)
        if shown:
            print_samples(wide_console(sys.stdout), encoder.tokenizer, shown, options.ids)
    if options.plot is not None and record is not None:
        write_plot(numbers, config.max_seq_length, options.plot)
        print(f"{options.plot}: lengths, supervised shares and packs of {', '.join(numbers)}", file=sys.stderr)
    return 1 if record is None else 0


def _cached_splits(config: DataConfig) -> list[str]:
    return [split for split in _SPLITS if config.has(split) and not (split == "train" and config.streaming)]


def _prepare(argv: Sequence[str]) -> int:
    text = "Tokenize every split of a recipe into the cache that fit uses."
    example = "lit-fsdp data prepare -c recipes/quickstart.yaml -c configs/debug/smoke.yaml"
    parser = verb_parser("data prepare", text, example, RECIPE)
    parser.add_argument("--json", action="store_true", help="JSON instead of lines")
    options, run = _read(parser, argv)
    splits = _cached_splits(run.data)
    allowed = "false: a stream is tokenized while it is trained on, and nothing of it is kept"
    require(splits, "data.streaming", "true", allowed, "train without data prepare, or set streaming: false")
    from lit_fsdp.data.packing import prepare_samples
    from lit_fsdp.data.stats import describe_data, split_numbers
    from lit_fsdp.report.data_tables import print_data

    encoder = _encoder(run)
    numbers = split_numbers(prepare_samples(run.data, splits, encoder), run.data)
    record = describe_data(numbers, run.data, encoder)
    if options.json:
        print(json.dumps({"data": record}, indent=1))
        return 0
    print_data(record, sys.stderr)
    for split in splits:
        print(f"data.{split}: {record['splits'][split]['cache']}")
    return 0


def _encoder(run: RunConfig) -> RowEncoder:
    from lit_fsdp.data.encode import RowEncoder
    from lit_fsdp.models.resolve import resolve_tokenizer

    return RowEncoder(resolve_tokenizer(run.model), run.data)


def _read(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[Any, Any]:
    """The verb's own flags, and the checked recipe."""
    options, words = parser.parse_known_args(argv)
    from lit_fsdp.config.parser import load_recipe
    from lit_fsdp.speak import speak

    run = load_recipe(words, "data", flags_of(parser)).run
    there = any(run.data.has(split) for split in _SPLITS)
    require(there, "data.train", "null", "a source of rows for a split", "set data.train: rows.jsonl")
    speak()
    return options, run
