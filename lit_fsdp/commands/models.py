"""``export`` and ``generate``: convert a checkpoint to a Hugging Face folder, and chat with it."""

import math
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from lit_fsdp.commands.parsing import parse, verb_parser
from lit_fsdp.errors import require
from lit_fsdp.host import heavy_imports, size_words


def run_export(argv: Sequence[str]) -> int:
    """Run ``lit-fsdp export`` and return the exit code."""
    text = "Convert a sharded or full checkpoint to a folder that transformers can load."
    example = "lit-fsdp export --ckpt runs/smoke/last --out model"
    parser = verb_parser("export", text, example)
    text = "run folder (its last checkpoint), RUN/last, RUN/best, RUN/STEP, or a checkpoint folder"
    parser.add_argument("--ckpt", required=True, type=Path, help=text)
    parser.add_argument("--out", required=True, type=Path, help="folder to create")
    text = "dtype of the weights; default: as trained; with --merge: as the base"
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), help=text)
    parser.add_argument("--max_shard_gib", type=float, default=5.0, help="largest weight file in GiB (default 5)")
    text = "reload the export and compare keys, tensors and logits before publishing it; needs memory for two models"
    parser.add_argument("--verify", action="store_true", help=text)
    of_lora = parser.add_mutually_exclusive_group()
    of_lora.add_argument("--adapter", action="store_true", help="for a run with model.lora: the adapter only (default)")
    of_lora.add_argument("--merge", action="store_true", help="for a run with model.lora: the merged model")
    parser.add_argument("--base", help="current location of the base model of adapters; default: as in training")
    parser.add_argument("--trust_remote_code", action="store_true", help="run Python code of the base or model")
    text = "export the moving averages of lit_fsdp.EMAWeights instead of the weights"
    parser.add_argument("--ema", action="store_true", help=text)
    text = "also upload the export with its model card to this Hugging Face Hub repository; created if missing"
    parser.add_argument("--push-to-hub", metavar="NAME", help=text)
    parser.add_argument("--private", action="store_true", help="make the repository private")
    options = parse(parser, argv)
    hub_name = options.push_to_hub
    least, given = 2**-30, options.max_shard_gib
    require(given >= least, "--max_shard_gib", given, "more than 0 GiB", "leave it out (5)")
    require(hub_name or not options.private, "--private", "no --push-to-hub", "both")
    with heavy_imports():
        from lit_fsdp.checkpoint.export import export
        from lit_fsdp.checkpoint.run_folder import named_checkpoint

    check: Any = None
    if options.verify or options.merge:  # these read models with transformers
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
    if options.verify:
        from lit_fsdp.checkpoint.export_verify import find_export_differences

        check = find_export_differences
    plan = export(
        named_checkpoint(options.ckpt),
        options.out,
        dtype=options.dtype,
        max_shard_gib=options.max_shard_gib,
        lora="adapter" if options.adapter else "merge" if options.merge else None,
        check=check,
        base=options.base,
        trust_remote_code=options.trust_remote_code,
        ema=options.ema,
    )
    checked = "; verified: loaded again, keys, tensors and logits are equal" if options.verify else ""
    print(f"{options.out}: {len(plan.specs)} tensors in {plan.dtype}, {size_words(plan.num_bytes)}{checked}")
    if (options.out / "tokenizer_config.json").is_file():  # a module of the user's own may have no tokenizer
        print(f"next: lit-fsdp generate --model {quote(str(options.out))}")
    if hub_name:
        from lit_fsdp.models.hub import push

        print(push(options.out, hub_name, options.private))
    return 0


_EMPTY = "The answer is empty: the model ended its turn at once, or generated only whitespace and special tokens."


def run_generate(argv: Sequence[str]) -> int:
    """Run ``lit-fsdp generate`` and return the exit code."""
    text = "Answer a prompt, or chat line by line, with an exported model or adapter and its chat template; in bf16, "
    text += "or in fp32 on a CPU without bf16 instructions."
    parser = verb_parser("generate", text, "lit-fsdp generate --model model --prompt 1969-07-20")
    parser.add_argument("--model", required=True, help="model folder, or folder of an adapter")
    parser.add_argument("--base", help="base of an adapter: folder, GGUF file or hub name; default: from its config")
    parser.add_argument("--trust_remote_code", action="store_true", help="run Python code of the base or model")
    parser.add_argument("--prompt", help="user message; default: chat, one message per line of standard input")
    parser.add_argument("--system", help="system message")
    text = "continue the prompt as plain text, without chat template, as for rows of plain prompts and completions"
    parser.add_argument("--raw", action="store_true", help=text)
    parser.add_argument("--max_new_tokens", type=int, default=256, help="maximum answer length in tokens (default 256)")
    text = "sample with this temperature; default: 0, greedy, the likeliest token each time"
    parser.add_argument("--temperature", type=float, help=text)
    text = "with --temperature: sample from the likeliest tokens that together have this probability (default 1)"
    parser.add_argument("--top_p", type=float, help=text)
    parser.add_argument("--seed", type=int, help="with --temperature: seed of the sampling (default 0)")
    options = parse(parser, argv)
    most, sampling = options.max_new_tokens, _sampling(options)
    both = options.raw and options.system
    require(not both, "--system", "with --raw", "only one of them", "drop --raw or --system")
    require(most >= 1, "--max_new_tokens", most, ">= 1", "write --max_new_tokens 256")
    with heavy_imports():
        from torch import manual_seed
        from transformers.utils.logging import disable_progress_bar

        from lit_fsdp.models.generate import Chat

    disable_progress_bar()
    manual_seed(options.seed or 0)
    more = {"trust_remote_code": options.trust_remote_code, "raw": options.raw}
    chat = Chat(options.model, options.system, most, options.base, sampling, **more)
    if options.prompt is not None:
        print(answer := chat.answer(options.prompt))
        if not answer.strip():
            print(_EMPTY, file=sys.stderr)
        return 0
    if sys.stdin.isatty():
        print("Write a message; an empty line ends the chat.", file=sys.stderr)
    for line in iter(lambda: sys.stdin.readline().strip(), ""):
        if not chat.answer(line, streams=True).strip():
            print(_EMPTY, file=sys.stderr)
    return 0


def _sampling(options: Namespace) -> dict[str, float] | None:
    temperature, top_p = options.temperature, options.top_p
    for name in ("top_p", "seed"):
        given, fix = getattr(options, name), "add --temperature 0.7"
        fits = given is None or temperature is not None
        require(fits, f"--{name}", f"{given} without --temperature", "both", fix)
    require(0 <= (options.seed or 0) < 2**63, "--seed", options.seed, "0 to 2**63 - 1", "write --seed 1")
    if temperature is None or temperature == 0:  # as servers write greedy
        return None
    require(0 < temperature < math.inf, "--temperature", temperature, "> 0, or 0 for greedy", "write --temperature 0.7")
    require(top_p is None or 0 < top_p <= 1, "--top_p", top_p, "> 0 and <= 1", "write --top_p 0.9")
    return {"temperature": temperature, "top_p": 1.0 if top_p is None else top_p}
