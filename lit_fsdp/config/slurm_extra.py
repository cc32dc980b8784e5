"""What ``slurm.extra`` may not hold, whatever job it is for."""

from __future__ import annotations

import shlex

from lit_fsdp.errors import ConfigError

_ALL_CLUSTERS = "nothing: a job is submitted, watched and ended on the cluster of this shell"
_REFUSED = {
    "--clusters": _ALL_CLUSTERS,
    "--overcommit": "nothing: every process has cores of its own",
    "--test-only": "nothing: lit-fsdp slurm render submits nothing",
    "--het-group": "nothing: all nodes of a job are alike",
    "--spread-job": "nothing: ranks fill one node after the other, as sharding groups need it",
}
_SHORT = {"-M": "--clusters", "-O": "--overcommit"}
_SHORTEST = 5
"""Letters by which sbatch may know an option, dashes included."""
_WITHOUT_VALUE = "hHkOQsuvVW"
"""Letters of sbatch that take no value, or none in the next word: what follows in the same word is another option."""


def check_extra(extra: list[str]) -> None:
    """Raise ConfigError for options that no job may have, and for such as hide behind others.

    Source: ``man sbatch``, and getopt's rules for short options (``-Hn4`` is ``-H -n 4``).
    """
    for i, text in enumerate(extra):
        if not text.startswith("-"):
            fix = f"write --{text}" if text[0].isalpha() else "begin it with --"
            raise ConfigError(f"extra[{i}]", repr(text), "an option of sbatch, such as --exclusive", fix)
        for word in _options(text):
            name = word.partition("=")[0]
            option = _full_name(name)
            if option is not None:
                raise ConfigError(f"extra[{i}]", text, _REFUSED[option], f"drop {name} from slurm.extra")
            if name[1] in _WITHOUT_VALUE and set(name[2:]) - {name[1]}:
                fix = "write one option per entry"
                raise ConfigError(f"extra[{i}]", text, "each short option by itself", fix)


def _options(text: str) -> list[str]:
    """The options in one entry; what stands after the first ``=`` is quoted in the script."""
    head = text.partition("=")[0]
    try:
        words = shlex.split(head)
    except ValueError:
        words = head.split()
    return [word for word in words if len(word) > 1 and word[0] == "-"]


def _full_name(name: str) -> str | None:
    """The refused option that sbatch takes a word for; like every program it knows one by its beginning."""
    if not name.startswith("--"):
        return _SHORT.get(name[:2])
    return next((known for known in _REFUSED if len(name) >= _SHORTEST and known.startswith(name)), None)
