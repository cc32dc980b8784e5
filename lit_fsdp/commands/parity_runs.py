"""The runs of ``lit-fsdp parity``: real ones, as of ``fit``, on ranks forked from a process with all imports."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.multiprocessing import ProcessExitedException, start_processes

from lit_fsdp.commands.parsing import columns
from lit_fsdp.config.data import accumulation_steps
from lit_fsdp.config.locations import shipped
from lit_fsdp.config.model import FLASH_ATTENTION, schedule_factor
from lit_fsdp.config.parser import changed_values, read_command_line
from lit_fsdp.ending import ended
from lit_fsdp.errors import require
from lit_fsdp.host import free_port
from lit_fsdp.parity.choices import MODEL, RunRefused, flat, in_fp32, nested, num_ranks, plain_side, turns, with_shared
from lit_fsdp.parity.trace import Trace, compare

_BATCH, _GRACE_SECONDS = 4, 10.0
_LAUNCHED = ("RANK", "GROUP_RANK", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_")
"""How names of variables begin that would make the runs part of another job."""


def compare_recipes(sides: Sequence[Sequence[str]], recipes: Sequence[Any], options: Any) -> int:
    """Say how far the runs of two recipes, or of one and the plain loop, are apart, and return the exit code."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that nothing is left behind
    multiprocessing.set_forkserver_preload(["lit_fsdp.cli"])
    forkserver.ensure_running()  # it imports while this process does
    is_plain = len(sides) == 1
    for side, recipe in zip(sides, recipes, strict=True):
        if recipe.run.foreign & {"model", "data"} and (is_plain or not options.full):
            _require_arguments_of_ours(_resolved(side))
    small = [[] if options.full else _miniature(recipe.run, options.steps) for recipe in recipes]
    found = [_resolved([*side, *words]) for side, words in zip(sides, small, strict=True)]
    other = plain_side(found[0]) if is_plain else with_shared(found[1], found[0])
    if not is_plain:
        _tell_left_out([recipe.values for recipe in recipes], found[0], other)
    with tempfile.TemporaryDirectory(prefix="lit_fsdp_parity_") as folder:
        allowed = [f"--allow-imports={one}" for one in read_command_line(sides[0]).allow_imports]
        try:
            return _compare(_Runs(Path(folder), options.steps, allowed), found[0], other, options)
        except RunRefused as refused:
            text, code = refused.args
            print(text, file=sys.stderr)
            return int(code)


def _resolved(words: Sequence[str]) -> dict[str, Any]:
    """The whole recipe as ``fit`` reads it."""
    from lit_fsdp.cli import resolved_recipe

    values = resolved_recipe(words, "fit")
    if values["trainer"]["devices"] in ("auto", -1):
        values["trainer"]["devices"] = max(1, torch.cuda.device_count())
    return flat(values)


def _require_arguments_of_ours(recipe: dict[str, Any]) -> None:
    """A class that inherits from ours has them; with others there is no miniature and no plain loop."""
    for section, argument in (("model", "name"), ("data", "train")):
        allowed = "a class of lit_fsdp, or one that inherits from it"
        fix = "compare two recipes as they are: --full --against OTHER.yaml"
        is_ours = f"{section}.init_args.{argument}" in recipe
        require(is_ours, f"{section}.class_path", recipe.get(f"{section}.class_path"), allowed, fix)


def _tell_left_out(givens: Sequence[Any], one: Any, other: Any) -> None:
    """Name the keys in which the recipes differ as they are given, but not as they are run."""
    run = {line.partition(":")[0].replace(".init_args", "") for line in changed_values(one, other)}
    for line in changed_values(*givens):
        key = line.partition(":")[0].replace(".init_args", "")
        if key.startswith(("model.", "data.", "trainer.", "seed_")) and key not in run and "class_path" not in key:
            print(f"not compared: {line}", file=sys.stderr)


def _compare(runs: _Runs, one: Any, other: Any, options: Any) -> int:
    pairs = {"as the recipes say": (one, other)}
    in_32 = in_fp32(one), in_fp32(other)
    flash = {recipe.get(f"{MODEL}.attn_implementation") for recipe in (one, other)} & {*FLASH_ATTENTION}
    if in_32 != (one, other) and not flash:  # which takes no fp32
        pairs["computing in fp32, where less hides behind rounding"] = in_32
    rounds = {}
    for title, pair in pairs.items():
        goal = runs.plain(pair[1]) if options.against == "plain" else runs(pair[1])
        found = compare(runs(pair[0]), goal)
        rounds[title] = found, turns(*pair, goal, runs) if found.first is not None else []
        if found.first is not None or found.dtype == "fp32":
            break
    names = _named(rounds[title][1])
    if found.untold:
        print(f"not compared, as a side does not tell: {', '.join(found.untold)}", file=sys.stderr)
    if len(found.steps) <= options.steps:
        print(f"a side takes no more than {len(found.steps) - 1} steps", file=sys.stderr)
    if options.json:
        record = {
            title: {**dataclasses.asdict(found), "turned": [dataclasses.asdict(turn) for turn in turned]}
            for title, (found, turned) in rounds.items()
        }
        print(json.dumps({"equal": not names, "named": names, "rounds": record}, indent=1))
    else:
        print("\n\n".join(_tables(title, *found) for title, found in rounds.items()))
        print(f"\ndifferent: {', '.join(names)}" if names else "\nequal")
    return 1 if names else 0


def _named(turned: Sequence[Any]) -> list[str]:
    """What makes a difference of its own; where each is within its tolerance, the largest."""
    found = [turn.name for turn in turned if turn.found.first is not None]
    return found or [turn.name for turn in sorted(turned, key=lambda turn: turn.found.size)[-1:]]


def _tables(title: str, found: Any, turned: Sequence[Any]) -> str:
    heads = ("step", "loss", "the other's", "Δ loss", "Δ gradient norm", "Δ weights")
    rows = [
        (
            str(step),
            *("-" if loss is None else f"{loss:.6f}" for loss in losses),
            *("-" if value is None else f"{value:.1e}" for value in apart),
        )
        for step, (losses, apart) in enumerate(zip(found.losses, found.steps, strict=True))
    ]
    rows.append((f"allowed in {found.dtype}", "", "", *(f"{value:.0e}" for value in found.allowed)))
    text = f"{title}:\n{columns([heads, *rows], right=heads)}"
    cells = []
    for turn in turned:
        first = turn.found.first
        by = ("-", "-") if first is None else (str(first), turn.found.beyond(first))
        cells.append((turn.name, turn.before, turn.after, *by))
    table = columns([("choice", "from", "to", "first step that differs", "by how much"), *cells])
    return f"{text}\n\n{table}" if turned else text


class _Runs:
    """Runs recipes, each once and for so many steps, and keeps what they have come to."""

    def __init__(self, folder: Path, steps: int, allowed: Sequence[str]) -> None:
        self._folder, self._steps, self._allowed = folder, steps, allowed
        self._done: dict[str, Any] = {}

    def __call__(self, recipe: dict[str, Any]) -> Any:
        """Run a recipe as ``fit`` does, on its ranks; :class:`RunRefused` where that cannot be."""
        return self._once(num_ranks(recipe), _fit, nested(recipe), self._allowed)

    def plain(self, recipe: dict[str, Any]) -> Any:
        """Run the plain loop on the model and the rows of a recipe."""
        return self._once(1, _train_plain, nested(recipe))

    def _once(self, ranks: int, act: Callable[..., int], *args: Any) -> Any:
        key = json.dumps([act.__name__, args], sort_keys=True)
        if key not in self._done:
            print(f"run {len(self._done) + 1} ...", file=sys.stderr)
            try:
                file = self._start(ranks, act, *args, self._steps)
                self._done[key] = Trace(**torch.load(file, weights_only=True))
            except RunRefused as refused:
                self._done[key] = refused
        if isinstance(self._done[key], RunRefused):
            raise self._done[key]
        return self._done[key]

    def _start(self, ranks: int, act: Callable[..., int], *args: Any) -> Path:
        """Call ``act(file, *args)`` on some ranks; the file is what it leaves."""
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        common = folder, ranks, free_port(), act, (folder / "found", *args)
        started = start_processes(_be_rank, common, ranks, join=False, start_method="forkserver")
        try:
            while not started.join(grace_period=_GRACE_SECONDS):
                pass
        except ProcessExitedException as failed:
            logs = [folder / f"log-{rank}" for rank in range(ranks)]
            texts = [log.read_text(encoding="utf-8", errors="replace") for log in logs if log.is_file()]
            said = next((text[text.rfind("error: ") :] for text in texts if "error: " in text), "".join(texts)[-4000:])
            raise RunRefused(said.strip(), 2 if failed.exit_code == 2 else 1) from None
        finally:
            for child in started.processes:
                child.kill()
        return folder / "found"


def _miniature(run: Any, steps: int) -> list[str]:
    """The smoke fragment, with one rank or several, and accumulation or none, as the recipe has it."""
    ranks = 1 if run.world_size == 1 else 2
    accumulates = accumulation_steps(run.data, run.world_size or 1, run.trainer["accumulate_grad_batches"]) > 1
    flags = {
        "trainer.max_steps": steps,
        "trainer.devices": ranks,
        "data.global_batch_size": _BATCH,
        "data.micro_batch_size": 1 if accumulates else _BATCH // ranks,
    }
    return [f"--config={shipped('debug') / 'smoke.yaml'}", *(f"--{key}={value}" for key, value in flags.items())]


# -- in processes of their own


def _be_rank(rank: int, folder: Path, ranks: int, port: int, act: Callable[..., int], args: Sequence[Any]) -> None:
    """Be one of the ranks that Lightning would have started; what it says goes to a file."""
    # After a fork the first use of torch's thread pool makes it anew; by two threads at once that may end in "Invalid
    # thread pool!" (https://github.com/pytorch/pytorch/pull/54895 left out the lock). To be removed once it has one.
    torch.set_num_threads(torch.get_num_threads())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    for name in [name for name in os.environ if name.startswith(_LAUNCHED)]:
        del os.environ[name]
    where = {"LOCAL_RANK": rank, "WORLD_SIZE": ranks, "NODE_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in where.items()})
    written = os.open(folder / f"log-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(written, stream)
    sys.exit(ended(lambda: act(*args)))


def _end_with_parent() -> None:
    """Torch would tell this process when the server that forked it ends, which does not while this process lives."""
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)


def _fit(file: Path, values: dict[str, Any], allowed: Sequence[str], steps: int) -> int:
    from lit_fsdp.commands.training import run_training_verb

    trainer, recipe = values["trainer"], file.with_name(f"recipe-{os.environ['LOCAL_RANK']}.yaml")
    arguments = {"file": str(file), "steps": steps}
    given = trainer["callbacks"] or []
    trainer["callbacks"] = [
        *(given if isinstance(given, list) else [given]),
        {"class_path": "lit_fsdp.callbacks.trace.StepTrace", "init_args": arguments},
    ]
    trainer["default_root_dir"] = str(file.with_name("run"))
    recipe.write_text(yaml.safe_dump(values), encoding="utf-8")
    return run_training_verb("fit", [f"--config={recipe}", *allowed])


def _train_plain(file: Path, values: dict[str, Any], steps: int) -> int:
    """Start the plain loop on the weights, and the rows in the order, that a recipe starts on."""
    from lit_fsdp import CausalLMDataModule, CausalLMModule
    from lit_fsdp.parity.plain import load_plain, train_plain

    seed, trainer = values["seed_everything"], values["trainer"]
    torch.manual_seed(seed)
    module, data = CausalLMModule(**values["model"]["init_args"]), CausalLMDataModule(**values["data"]["init_args"])
    module.configure_model()
    data.attach(module.tokenizer, seed, takes_pairs=False)
    num_items = len(data.prepare(("train",))["train"])
    data.fix_batches(1, None)
    model: Any = module.model  # as it is with adapters, which from_pretrained would freeze
    if module.config.lora is None:
        model.save_pretrained(file.with_name("model"))
        trained = {name for name, param in model.named_parameters() if param.requires_grad}
        model = load_plain(str(file.with_name("model")), trained)
    device = torch.device("cpu" if trainer["accelerator"] == "cpu" or not torch.cuda.is_available() else "cuda")
    model.to(device)
    epochs, per_epoch = trainer["max_epochs"] or 0, -(-num_items // (data.config.global_batch_size or 1))
    total = min([n for n in (trainer["max_steps"], epochs * per_epoch) if n > 0], default=steps)
    optim = module.config.optim
    rates = [optim.lr * schedule_factor(optim, step, total) for step in range(min(steps, total))]
    clip = {trainer["gradient_clip_algorithm"] or "norm": trainer["gradient_clip_val"]}

    def batch(step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        rows = [[torch.as_tensor(part).to(device, torch.int64) for part in row] for row in data.rows_of_step(step)]
        return [(ids, ids.where(supervised.bool(), -100)) for ids, supervised in rows]

    def weights() -> list[tuple[str, torch.Tensor]]:
        return [(f"model.{name}", param) for name, param in model.named_parameters() if param.requires_grad]

    trace = Trace("fp32", "fp32")
    trace.add(0.0, None, weights())
    betas = optim.beta1, optim.beta2
    adamw = {"betas": betas, "eps": optim.eps, "weight_decay": optim.weight_decay}
    for loss, norm in train_plain(model, zip(rates, map(batch, range(total)), strict=False), adamw, clip):
        trace.add(loss, norm, weights())
    torch.save(vars(trace), file)
    return 0
