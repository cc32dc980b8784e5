"""``lit-fsdp parity``: compare training of two recipes, or of a recipe and a plain PyTorch loop."""

import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lit_fsdp.commands.parsing import RECIPE, columns, flags_of, verb_parser
from lit_fsdp.commands.runs import quiet_flags, run_fit
from lit_fsdp.config.command_line import PREFERENCE, read_command_line
from lit_fsdp.config.locations import shipped
from lit_fsdp.config.model import PreferenceModelConfig, schedule_factor
from lit_fsdp.config.parser import load_recipe
from lit_fsdp.config.yaml_files import read_yaml
from lit_fsdp.errors import require
from lit_fsdp.host import heavy_imports


def run_parity(argv: Sequence[str]) -> int:
    """Run ``lit-fsdp parity`` and return the exit code: 1 if the two sides differ, or a run failed."""
    text = (
        "Compare loss, gradient norm and weights after each step of two recipes, or of a recipe and a plain PyTorch "
        "loop. If they differ, options are changed one after the other to find the cause. Both sides use the model and "
        "the rows of --config, flags apply to both, and everything runs in miniature without --full."
    )
    example = "lit-fsdp parity --config recipes/quickstart.yaml --against plain"
    parser = verb_parser("parity", text, example, RECIPE)
    parser.add_argument("--against", default="plain", help="a recipe, a fragment for the first, or plain (default)")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps to compare; default: 5")
    parser.add_argument("--full", action="store_true", help="use the recipe's own model, rows, batches and devices")
    parser.add_argument("--json", action="store_true", help="JSON instead of tables on standard output")
    options, words = parser.parse_known_args(argv)
    require(options.steps >= 1, "--steps", options.steps, "a number of optimizer steps >= 1", "write --steps 5")
    is_plain = options.against == "plain"
    sides = [words] if is_plain else [words, _words_against(options.against, words)]
    runs = [load_recipe(side, "fit", flags_of(parser)).run for side in sides]
    if is_plain:
        allowed, fix = "what a loop over single rows can train", "compare with a recipe: --against OTHER.yaml"
        require(not isinstance(runs[0].model, PreferenceModelConfig), "model.class_path", PREFERENCE, allowed, fix)
        require(not runs[0].data.streaming, "data.streaming", "true", f"{allowed} in a fixed order", fix)
    with heavy_imports():
        from lit_fsdp.cli import resolved_recipe
        from lit_fsdp.parity.choices import RunRefused, flat, plain_side, turns, with_shared
        from lit_fsdp.parity.trace import compare

    length = {"num_nodes": 1, "max_steps": options.steps, "max_epochs": -1}
    added = quiet_flags({"logger": "false", "log_every_n_steps": 1, **length})
    small = [[] if options.full else _miniature(run) for run in runs]
    found = [flat(resolved_recipe([*side, *more, *added], "fit")) for side, more in zip(sides, small, strict=True)]
    one, other = found[0], plain_side(found[0]) if is_plain else with_shared(found[1], found[0])
    with tempfile.TemporaryDirectory(prefix="lit_fsdp_parity_") as folder:
        run = _runner(Path(folder), [f"--allow-imports={one}" for one in read_command_line(words).allow_imports])
        try:
            goal = _train_plain(other, options.steps) if is_plain else run(other)
            comparison = compare(run(one), goal)
            turned = turns(one, other, goal, run) if comparison.first is not None else []
        except RunRefused as refused:
            print(refused, file=sys.stderr)
            return 1
    sizes = {turn.name: turn.found.largest for turn in turned}
    # choices that alone exceed the tolerance; if none does, the one with the largest difference
    names = [name for name, size in sizes.items() if size > 1] or sorted(sizes, key=sizes.__getitem__)[-1:]
    if options.json:
        record = dataclasses.asdict(comparison) | {"turned": [dataclasses.asdict(turn) for turn in turned]}
        print(json.dumps({"equal": not names, "named": names, **record}, indent=1))
    else:
        print(_tables(comparison, turned))
        print(f"\ndifferent: {', '.join(names)}" if names else "\nequal")
    return 1 if names else 0


def _words_against(path: str, words: Sequence[str]) -> list[str]:
    """The command line of the other side: a fragment is added to the files of the first, a recipe replaces them."""
    content = read_yaml(Path(path))
    if not ({"name", "class_path"} & set(content.get("model") or {}) and content.get("data")):
        return [*words, f"--config={path}"]
    line = read_command_line(words)
    flags = [word for word in line.words if not word.startswith("--config=")]
    return [f"--config={path}", *flags, *(f"--allow-imports={one}" for one in line.allow_imports)]


def _miniature(run: Any) -> list[str]:
    """The smoke fragment; like the recipe with one rank or several, and with or without accumulation."""
    ranks = 1 if run.world_size == 1 else 2
    accumulates = run.accumulation_steps() > 1
    batch = ["--data.global_batch_size=4", f"--data.micro_batch_size={1 if accumulates else 4 // ranks}"]
    return [f"--config={shipped('debug') / 'smoke.yaml'}", f"--trainer.devices={ranks}", *batch]


def _runner(folder: Path, words: Sequence[str]) -> Callable[[dict[str, Any]], Any]:
    """Build the function that trains each distinct recipe once, as ``fit`` does, and returns its trace."""
    import torch
    import yaml

    from lit_fsdp.parity.choices import RunRefused, nested
    from lit_fsdp.parity.trace import Trace

    done: dict[str, Trace] = {}

    def run(recipe: dict[str, Any]) -> Trace:
        key = json.dumps(recipe, sort_keys=True)
        if key not in done:
            print(f"run {len(done) + 1} ...", file=sys.stderr)
            place = Path(tempfile.mkdtemp(dir=folder))
            (place / "given.yaml").write_text(yaml.safe_dump(nested(recipe)), encoding="utf-8")
            note = {"class_path": "lit_fsdp.callbacks.trace.StepTrace", "init_args": {"file": f"{place}/trace"}}
            flags = ["--samples.prompts=null", f"--trainer.callbacks+={json.dumps(note)}"]
            if failed := run_fit(place, [f"--config={place}/given.yaml", *flags, *words]):
                raise RunRefused(failed)
            done[key] = Trace(**torch.load(place / "trace", weights_only=True))
        return done[key]

    return run


def _train_plain(recipe: dict[str, Any], steps: int) -> Any:
    """Run the plain loop with the initial weights and the row order of a recipe, and return its trace."""
    import torch

    from lit_fsdp import CausalLMDataModule, CausalLMModule
    from lit_fsdp.parity.choices import nested
    from lit_fsdp.parity.plain import train_plain
    from lit_fsdp.parity.trace import Trace

    values = nested(recipe)
    seed, trainer = values["seed_everything"], values["trainer"]
    torch.manual_seed(seed)
    module: Any = CausalLMModule(**values["model"]["init_args"])
    data = CausalLMDataModule(**values["data"]["init_args"])
    module.configure_model()
    data.attach(module.tokenizer, seed, is_preference=False)
    data.num_embeddings = module.num_embeddings
    data.prepare(("train",))
    data.fix_batches(1, None)
    device = torch.device("cpu" if trainer["accelerator"] == "cpu" or not torch.cuda.is_available() else "cuda")
    model = module.model.train().to(device)
    optim = module.config.optim
    rates = [optim.lr * schedule_factor(optim, step, steps) for step in range(steps)]
    clip = {trainer["gradient_clip_algorithm"] or "norm": trainer["gradient_clip_val"]}

    def batch(step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        rows = [[torch.tensor(part, device=device) for part in row] for row in data.rows_of_step(step)]
        return [(ids.long(), ids.long().where(supervised.bool(), -100)) for ids, supervised in rows]

    def weights() -> list[tuple[str, torch.Tensor]]:
        return [(f"model.{name}", param) for name, param in model.named_parameters() if param.requires_grad]

    trace = Trace("fp32", "fp32")
    trace.add(0.0, None, weights())
    adamw = {"betas": (optim.beta1, optim.beta2), "eps": optim.eps, "weight_decay": optim.weight_decay}
    for loss, norm in train_plain(model, zip(rates, map(batch, range(steps)), strict=True), adamw, clip):
        trace.add(loss, norm, weights())
    return trace


def _tables(found: Any, turned: Sequence[Any]) -> str:
    from lit_fsdp.parity.trace import TOLERANCES

    heads = ("step", "loss", "the other's", "Δ loss", "Δ gradient norm", "Δ weights")
    rows = [[f"allowed in {found.dtype}", "", "", *(f"{value:.0e}" for value in TOLERANCES[found.dtype])]]
    for step, (losses, apart) in enumerate(zip(found.losses, found.steps, strict=True)):
        cells = ["-" if value is None else f"{value:.7g}" for value in losses]
        rows.append([str(step), *cells, *("-" if value is None else f"{value:.1e}" for value in apart)])
    turns = [(turn.name, turn.before, turn.after, f"{turn.found.largest:.1e}") for turn in turned]
    tables = [columns([heads, *rows], right=heads), columns([("choice", "from", "to", "Δ in tolerances"), *turns])]
    return "\n\n".join(tables if turned else tables[:1])
