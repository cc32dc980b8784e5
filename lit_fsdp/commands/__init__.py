"""The verbs of ``lit-fsdp``. Heavy packages are imported only after the command line has been parsed."""

import difflib
import errno
import importlib
import sys

from lit_fsdp.config.words import VERBS, underscored
from lit_fsdp.errors import ConfigError

_GROUPS = {
    "set up": {
        "recipes": "list, show or copy the included recipes and fragments",
        "convert": "convert configs: Accelerate, Trainer, DeepSpeed, Axolotl, torchtune",
        "doctor": "check this machine, or all nodes of a job: devices, disks, network",
    },
    "check before a run": {
        "data": "inspect the training data of a recipe and tokenize it (inspect)",
        "model": "download or convert a model before a run (prepare)",
        "audit": "show FSDP units, mesh, dtypes and bytes per rank of a recipe",
        "plan": "estimate memory and speed of a recipe, and recommend settings",
        "parity": "compare a recipe with another, or with a plain PyTorch loop",
    },
    "run": {
        "fit": "train a model with a recipe",
        "validate": "compute loss, perplexity and token accuracy on data.val",
        "test": "compute loss, perplexity and token accuracy on data.test",
        "predict": "score every row of data.predict into predictions.jsonl",
        "bench": "measure tokens/s and memory of variations of a recipe",
        "profile": "profile the time of a step, as traces and a table",
        "slurm": "submit a recipe to a cluster, or print the sbatch file",
    },
    "use the result": {
        "report": "write a report of a run, or compare several runs",
        "ckpt": "list or verify checkpoints of a run, or import those of other tools",
        "export": "convert a checkpoint to a Hugging Face folder",
        "generate": "chat with an exported model",
    },
}
_TRAINER_VERBS = ("fit", "validate", "test", "predict")
_VERBS = [verb for group in _GROUPS.values() for verb in group]
_PLANNING = dict.fromkeys(("audit", "model", "plan"), "planning")
_MODULES = {**_PLANNING, "ckpt": "checkpoints", "export": "models", "generate": "models", "profile": "profiling"}
"""Modules of the verbs whose module has another name."""
_OF_PATHS = [
    *(errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR),
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC),
]
_USAGE = """usage: lit-fsdp VERB [options]

{verbs}

lit-fsdp fit --config RECIPE.yaml [--config FRAGMENT.yaml ...] [--key value ...]
  files are merged in order, later ones win, flags last; --print_config shows
  the result, --help all keys; --ckpt_path last|best|PATH resumes
lit-fsdp VERB --help explains a verb and shows an example
lit-fsdp --print_completion bash|zsh prints a shell completion script
"""


def run(argv: list[str]) -> int:
    """Parse the command line, run the verb and return the exit code.

    Raises:
        ConfigError: A verb, key or value does not exist, or a rule is violated.
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
        try:
            return int(getattr(module, f"run_{verb}")(rest))
        except OSError as error:
            if not error.filename or error.errno not in _OF_PATHS:
                raise
            fix = "free space" if error.errno == errno.ENOSPC else "check the path, and the permissions of its folder"
            given = f"{error.filename} ({error.strerror})"
            raise ConfigError(f"lit-fsdp {verb}", given, "a file or folder that it can use", fix) from error
    alike = difflib.get_close_matches(verb, _VERBS, n=1, cutoff=0.7)
    near = "fit" if verb[:1] == "-" else VERBS.get(verb.lower().replace("-", "_")) or "".join(alike)
    fix = f"lit-fsdp {near} ..." if near else "see lit-fsdp --help"
    raise ConfigError("command line", verb, ", ".join(_VERBS), fix)
