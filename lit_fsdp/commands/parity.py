"""``lit-fsdp parity``: whether two recipes, or a recipe and a plain PyTorch loop, train alike; else, which choice
makes the difference.

Every run is a real one, by the way of ``fit``, in processes that are forked from one with all imports.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from lit_fsdp.commands.parsing import RECIPE, columns, flags_of, options_and_recipe, verb_parser
from lit_fsdp.config.locations import shipped
from lit_fsdp.errors import require
from lit_fsdp.host import free_port

_STEPS, _BATCH = 5, 4
_GRACE_SECONDS = 10.0
_LAUNCHED = ("RANK", "GROUP_RANK", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_")
"""How names of variables begin that would make the runs part of another job."""


class _RunFailed(Exception):
    """A run that the comparison cannot do without, with its exit code."""


def run_parity(argv: Sequence[str]) -> int:
    """Run ``lit-fsdp parity`` and return the exit code: 1 if the two sides differ, or a run failed."""
    text = (
        "Whether two recipes train alike on the same rows, or a recipe and a plain PyTorch loop: loss, gradient norm "
        "and weights after each step. If not, one choice after the other is turned until one can be named. Both sides "
        "have the model and the rows of --config, flags hold for both, and all is in miniature unless --full is given."
    )
    example = "lit-fsdp parity --config recipes/quickstart.yaml --against plain"
    parser = verb_parser("parity", text, example, RECIPE)
    parser.add_argument("--against", default="plain", help="a recipe, a fragment over the first, or plain (default)")
    parser.add_argument("--steps", type=int, default=_STEPS, help=f"optimizer steps to compare (default: {_STEPS})")
    parser.add_argument("--full", action="store_true", help="the recipe's own model, rows, batches and devices")
    parser.add_argument("--json", action="store_true", help="JSON instead of tables on standard output")
    options, words = options_and_recipe(parser, argv)
    if options is None:
        return 0
    require(options.steps >= 1, "--steps", options.steps, "a number of optimizer steps >= 1", f"--steps {_STEPS}")
    sides = [words] if options.against == "plain" else [words, _words_against(options.against, words)]
    with tempfile.TemporaryDirectory(prefix="lit_fsdp_parity_") as folder:
        runs = _Runs(Path(folder), options.steps, options.full)
        try:
            return _compare(runs, [runs.resolved(side, flags_of(parser)) for side in sides], options)
        except _RunFailed as error:
            text, code = error.args
            print(text, file=sys.stderr)
            return int(code)


def _words_against(path: str, words: Sequence[str]) -> list[str]:
    """The words of the other side: a fragment goes over the files of the first one, a recipe in their place."""
    from lit_fsdp.config.parser import read_command_line, read_yaml

    line, content = read_command_line(words), read_yaml(Path(path))
    model: Any = content.get("model") or {}
    is_whole = {"name", "class_path"} & set(model) and content.get("data")
    files = [Path(path)] if is_whole else [*line.files, Path(path)]
    flags = [word for word in line.words if not word.startswith("--config=")]
    return [*(f"--config={file}" for file in files), *flags, *(f"--allow-imports={one}" for one in line.allow_imports)]


def _compare(runs: _Runs, sides: list[dict[str, Any]], options: Any) -> int:
    from lit_fsdp.config.model import FLASH_ATTENTION
    from lit_fsdp.parity import choices, search

    one, is_plain = sides[0], len(sides) == 1
    other = (
        choices.plain_side(one)
        if is_plain
        else choices.turned(sides[1], {key: choices.get(one, key) for key in choices.SHARED})
    )
    rounds: list[tuple[str, Any, list[Any]]] = []
    for title, change in (("as the recipes say", dict), ("computing in fp32", choices.in_fp32)):
        if rounds and (rounds[-1][1].first or rounds[-1][1].dtype == "fp32"):
            break
        pair: list[Any] = [change(one), change(other)]
        if rounds and {choices.get(values, f"{choices.MODEL}.attn_implementation") for values in pair} & {
            *FLASH_ATTENTION
        }:
            break  # which has no fp32
        try:
            goal = runs.plain(pair[1]) if is_plain else runs(pair[1])
            found = search.compare(runs(pair[0]), goal)
            turned = search.turns(*pair, goal, runs) if found.first else []
        except search.RunRefused as error:
            raise _RunFailed(str(error), 2) from None
        rounds.append((title, found, turned))
    names = [turn.name for turn in search.named(rounds[-1][2])] if rounds[-1][1].first else []
    if options.json:
        print(json.dumps({"equal": not names, "named": names, "rounds": [_record(*one) for one in rounds]}, indent=1))
    else:
        print("\n\n".join(_tables(*one) for one in rounds))
        print(f"\ndifferent: {', '.join(names)}" if names else "\nequal")
    return 1 if names else 0


def _record(title: str, found: Any, turned: Sequence[Any]) -> dict[str, Any]:
    record = {"round": title, **dataclasses.asdict(found)}
    return record | {"turned": [dataclasses.asdict(turn) for turn in turned]}


def _tables(title: str, found: Any, turned: Sequence[Any]) -> str:
    heads = ("step", "loss", "the other's", "Δ loss", "Δ gradient norm", "Δ weights")
    rows = [
        (str(step.step), *(f"{loss:.6f}" for loss in step.losses), *(f"{value:.1e}" for value in step.apart))
        for step in found.steps
    ]
    limits = f"allowed in {found.dtype}"
    text = f"{title}:\n{columns([heads, *rows, (limits, '', '', *(f'{value:.0e}' for value in found.allowed))], heads)}"
    if not turned:
        return text
    cells = []
    for turn in turned:
        first = turn.found.first
        by = (str(first.step), ", ".join(first.beyond(turn.found.allowed))) if first else ("-", "-")
        cells.append((turn.name, turn.before, turn.after, *by))
    return f"{text}\n\n{columns([('choice', 'from', 'to', 'first step that differs', 'by how much'), *cells])}"


class _Runs:
    """Runs recipes, each once, and keeps what they have written down.

    Args:
        folder: For their run folders.
        steps: Optimizer steps of each.
        full: Whether they are run as they are, and not in miniature.
    """

    def __init__(self, folder: Path, steps: int, full: bool) -> None:
        self._folder, self._steps, self._full = folder, steps, full
        self._done: dict[str, Path | str] = {}
        self._allowed: list[str] = []

    def resolved(self, words: Sequence[str], flags: Sequence[str]) -> dict[str, Any]:
        """The whole recipe of a command line, checked, and in miniature where that is asked for.

        Raises:
            ConfigError: A key or value that does not exist, or a rule that does not hold.
        """
        from lit_fsdp.config.parser import load_recipe, read_command_line
        from lit_fsdp.parity.choices import whole

        run = load_recipe(words, "fit", flags).run
        nodes = run.num_nodes if self._full else 1
        require(nodes == 1, "trainer.num_nodes", nodes, "1: all ranks are started here", "leave --full out")
        self._allowed = [f"--allow-imports={one}" for one in read_command_line(words).allow_imports]
        folder = self._new_folder()
        mini = [] if self._full else ["--config", str(shipped("debug") / "smoke.yaml"), *_miniature_flags(run, self._steps)]
        self._start(1, folder, _resolve, [*words, *mini], folder / "values.json")
        return whole(json.loads((folder / "values.json").read_text(encoding="utf-8")))

    def __call__(self, values: Mapping[str, Any]) -> Path:
        """Run a recipe as ``fit`` does, on its ranks.

        Raises:
            RunRefused: It cannot be run.
        """
        return self._once(values, self._fit)

    def plain(self, values: Mapping[str, Any]) -> Path:
        """Run the plain loop on the model and the rows of a recipe."""
        return self._once({**values, "plain": True}, self._plain)

    def _once(self, values: Mapping[str, Any], run: Callable[[Path, dict[str, Any]], None]) -> Path:
        from lit_fsdp.parity.search import RunRefused

        key = json.dumps(values, sort_keys=True)
        if key not in self._done:
            folder = self._new_folder()
            print(f"run {len(self._done) + 1} ...", file=sys.stderr)
            try:
                run(folder, json.loads(key))
                self._done[key] = folder
            except _RunFailed as error:
                if error.args[1] != 2:
                    raise
                self._done[key] = str(error.args[0])
        done = self._done[key]
        if isinstance(done, str):
            raise RunRefused(done)
        return done

    def _fit(self, folder: Path, values: dict[str, Any]) -> None:
        import yaml

        trainer = values["trainer"]
        given = trainer["callbacks"] or []
        trace = {"class_path": "lit_fsdp.callbacks.trace.StepTrace"}
        trace |= {"init_args": {"folder": str(folder), "steps": self._steps}}
        trainer["callbacks"] = [*(given if isinstance(given, list) else [given]), trace]
        trainer["default_root_dir"] = str(folder / "run")
        file, devices = folder / "recipe.yaml", trainer["devices"]
        file.write_text(yaml.safe_dump(values), encoding="utf-8")
        ranks = len(devices) if isinstance(devices, list) else int(devices)
        self._start(ranks, folder, _fit, [f"--config={file}", *self._allowed])

    def _plain(self, folder: Path, values: dict[str, Any]) -> None:
        self._start(1, folder, _train_plain, values, folder, self._steps)

    def _new_folder(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self._folder))

    def _start(self, ranks: int, folder: Path, act: Callable[..., int], *args: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["lit_fsdp.cli"])
        port, logs = free_port(), [folder / f"log-{rank}" for rank in range(ranks)]
        children = [
            context.Process(target=_be_rank, args=(rank, ranks, port, log, act, args)) for rank, log in enumerate(logs)
        ]
        try:
            for child in children:
                child.start()
            while any(child.is_alive() for child in children) and not any(child.exitcode for child in children):
                wait([child.sentinel for child in children if child.is_alive()])
            for child in children:
                child.join(_GRACE_SECONDS)
        finally:
            for child in children:
                if child.is_alive():
                    child.kill()
        failed = [log for log, child in zip(logs, children, strict=True) if child.exitcode]
        if failed:
            code = 2 if any(child.exitcode == 2 for child in children) else 1
            text = failed[0].read_text(encoding="utf-8", errors="replace")
            raise _RunFailed(text[text.rfind("error: ") if "error: " in text else -4000 :].strip(), code)


def _miniature_flags(run: Any, steps: int) -> list[str]:
    """Beside the smoke fragment: one rank or several, with accumulation or without, as the recipe has it."""
    from lit_fsdp.config.data import accumulation_steps

    ranks = 1 if run.world_size == 1 else 2
    accumulates = accumulation_steps(run.data, run.world_size or 1, run.trainer["accumulate_grad_batches"]) > 1
    micro = 1 if accumulates else _BATCH // ranks
    flags = {"trainer.max_steps": steps, "trainer.devices": ranks}
    flags |= {"data.global_batch_size": _BATCH, "data.micro_batch_size": micro}
    return [f"--{key}={value}" for key, value in flags.items()]


# -- in processes of their own


def _be_rank(rank: int, ranks: int, port: int, log: Path, act: Callable[..., int], args: Sequence[Any]) -> None:
    """One of the ranks that Lightning would have started, with all that it says in a file."""
    from lit_fsdp.ending import ended

    for name in [name for name in os.environ if name.startswith(_LAUNCHED)]:
        del os.environ[name]
    where = {"LOCAL_RANK": rank, "WORLD_SIZE": ranks, "NODE_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in where.items()})
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(written, stream)
    sys.exit(ended(lambda: act(*args)))


def _resolve(words: Sequence[str], file: Path) -> int:
    from lit_fsdp.cli import resolved_recipe

    file.write_text(json.dumps(resolved_recipe(words, "fit")), encoding="utf-8")
    return 0


def _fit(words: Sequence[str]) -> int:
    from lit_fsdp.commands.training import run_training_verb

    return run_training_verb("fit", list(words))


def _train_plain(values: dict[str, Any], folder: Path, steps: int) -> int:
    """Start the plain loop on the weights, and the rows in the order, that a recipe starts on."""
    import torch

    from lit_fsdp import CausalLMDataModule, CausalLMModule
    from lit_fsdp.config.strategy import DtypeRow
    from lit_fsdp.parity.plain import load_plain, train_plain
    from lit_fsdp.parity.trace import sampled, write_step

    seed, trainer = values["seed_everything"], values["trainer"]
    torch.manual_seed(seed)
    module, data = CausalLMModule(**values["model"]["init_args"]), CausalLMDataModule(**values["data"]["init_args"])
    module.configure_model()
    data.attach(module.tokenizer, seed, takes_pairs=False)
    num_items = len(data.prepare(("train",))["train"])
    data.fix_batches(1, trainer.get("accumulate_grad_batches"))
    built: Any = module.model
    model = built  # with adapters, which from_pretrained would freeze
    if module.config.lora is None:
        built.save_pretrained(folder / "model")
        trained = {name for name, param in built.named_parameters() if param.requires_grad}
        model = load_plain(str(folder / "model"), trained)
    device = torch.device("cpu" if trainer["accelerator"] == "cpu" or not torch.cuda.is_available() else "cuda")
    model.to(device)
    optim = dataclasses.asdict(module.config.optim)
    optim |= {"betas": (optim["beta1"], optim["beta2"]), "clip": trainer["gradient_clip_val"]}
    optim["clip_algorithm"] = trainer["gradient_clip_algorithm"]
    ends = [trainer["max_steps"]] if trainer["max_steps"] > 0 else []
    if (trainer["max_epochs"] or 0) > 0:
        ends.append(trainer["max_epochs"] * -(-num_items // (data.config.global_batch_size or 1)))
    optim["total_steps"] = min(ends, default=steps)

    def write(step: int, loss: float, norm: float | None) -> None:
        weights = {f"model.{name}": sampled(p) for name, p in model.named_parameters() if p.requires_grad}
        write_step(folder, step, loss, norm, weights, DtypeRow("fp32", "fp32", "fp32"))

    def batch(step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        rows = []
        for ids, supervised in data.rows_of_step(step):
            tokens = torch.as_tensor(ids, dtype=torch.int64)
            labels = tokens.where(torch.as_tensor(supervised, dtype=torch.bool), -100)
            rows.append((tokens.to(device), labels.to(device)))
        return rows

    write(0, 0.0, None)
    taken = train_plain(model, map(batch, range(min(steps, optim["total_steps"]))), optim)
    for step, (loss, norm) in enumerate(taken, 1):
        write(step, loss, norm)
    return 0
