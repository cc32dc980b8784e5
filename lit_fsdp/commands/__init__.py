"""The verbs of ``lit-fsdp``. Nothing heavy is imported before the words are understood."""

from __future__ import annotations

import difflib
import importlib
import sys

from lit_fsdp.config.words import VERBS, underscored
from lit_fsdp.errors import ConfigError

_GROUPS = {
    "begin": {
        "recipes": "list, show or copy the recipes and fragments that ship",
        "convert": "a config of Accelerate, Transformers or DeepSpeed as a recipe",
        "doctor": "look at this machine, or all nodes of a job: devices, disks, network",
    },
    "look before a run": {
        "data": "see what a recipe trains on, and tokenize it ahead (inspect)",
        "model": "fetch or convert a model ahead of a run (prepare)",
        "audit": "what a recipe would do: FSDP units, mesh, dtypes, bytes per rank",
        "plan": "whether it fits a GPU, how fast it may be, and what to choose",
        "parity": "whether it trains as another, or as a plain PyTorch loop",
    },
    "run": {
        "fit": "train a model by a recipe",
        "validate": "loss, perplexity and token accuracy on data.val",
        "test": "the same on data.test",
        "predict": "score every row of data.predict into predictions.jsonl",
        "bench": "tokens/s and memory of a recipe with other values",
        "profile": "where the time of a step goes, as traces and a table",
        "slurm": "submit a recipe to a cluster, or print the sbatch file",
    },
    "use the result": {
        "report": "a run as one page, or several runs beside each other",
        "ckpt": "list or verify the checkpoints of a run, or import others'",
        "export": "a checkpoint as a Hugging Face folder",
        "generate": "ask an exported model",
    },
}
_TRAINER_VERBS = ("fit", "validate", "test", "predict")
_VERBS = [verb for group in _GROUPS.values() for verb in group]
_PLANNING = dict.fromkeys(("audit", "model", "plan"), "planning")
_MODULES = {**_PLANNING, "ckpt": "checkpoints", "export": "models", "generate": "models", "profile": "profiling"}
"""Of verbs that are not in a module of their name."""
_USAGE = """usage: lit-fsdp VERB [options]

{verbs}

lit-fsdp fit --config RECIPE.yaml [--config FRAGMENT.yaml ...] [--key value ...]
  files are merged in order, later wins, flags last; --print_config shows the
  result, --help every key; --ckpt_path last|best|PATH resumes
lit-fsdp VERB --help explains a verb and ends with an example
lit-fsdp --print_completion bash|zsh prints a script that completes all this
"""


def run(argv: list[str]) -> int:
    """Understand the command line, run the verb and return the exit code.

    Raises:
        ConfigError: A verb, key or value that does not exist, or a rule that does not hold.
    """
    if not argv or argv[0] in ("-h", "--help", "help"):
        lines = []
        for title, group in _GROUPS.items():
            lines += [f"{title}:", *(f"  {verb:<10}{text}" for verb, text in group.items())]
        verbs = "\n".join(lines)
        print(_USAGE.format(verbs=verbs), end="", file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    if argv[0] == "--version":
        import lit_fsdp

        print(f"lit_fsdp {lit_fsdp.__version__}")
        return 0
    if underscored(argv[0]) == "--print_completion":
        from lit_fsdp.commands.completion import completion_script

        texts = {verb: text for group in _GROUPS.values() for verb, text in group.items()}
        print(completion_script("".join(argv[1:2]) or "bash", texts, run))
        return 0
    verb, rest = argv[0], [underscored(word) for word in argv[1:]]
    if verb in _TRAINER_VERBS:
        from lit_fsdp.commands.training import run_training_verb

        return run_training_verb(verb, rest)
    if verb in _VERBS:
        module = importlib.import_module(f"lit_fsdp.commands.{_MODULES.get(verb, verb)}")
        return int(getattr(module, f"run_{verb}")(rest))
    near = VERBS.get(verb.lower().replace("-", "_")) or (difflib.get_close_matches(verb, _VERBS, n=1) or ["fit"])[0]
    raise ConfigError("command line", verb, ", ".join(_VERBS), f"lit-fsdp {near} ...")
