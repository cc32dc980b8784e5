"""Entry point of ``lit-fsdp`` and ``python -m lit_fsdp``."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence

from lit_fsdp.commands import run
from lit_fsdp.commands.parsing import PARSERS, flags_of
from lit_fsdp.config.words import UNKNOWN_KEY, as_flag
from lit_fsdp.errors import ConfigError
from lit_fsdp.exit_codes import exit_code_of


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    0 done; 1 the run failed or a check found something; 2 the recipe or the command line is wrong; 75 saved and
    stopped on SIGTERM or SIGUSR1; 76 a rank lost the others; 130 on Ctrl-C. Errors that a user can fix are
    printed without a traceback, and secrets of the environment and of the recipe are never printed.
    """
    words = list(sys.argv[1:] if argv is None else argv)

    def act() -> int:
        try:
            return run(words)
        except ConfigError as error:
            from lit_fsdp.config.parser import recipe_keys, unknown_keys  # takes a moment

            known = recipe_keys()
            if error.given == UNKNOWN_KEY:
                flags = itertools.dropwhile(lambda word: not word.startswith("-"), words)
                own = [flag for parser in PARSERS.values() for flag in flags_of(parser)]
                others = [other for other in unknown_keys(list(flags), own) if other.field != error.field]
                error.others = [f"{other.field}: {as_flag(other, words, known)}" for other in others]
            error.fix = as_flag(error, words, known)
            raise

    return exit_code_of(act, debug="--debug" in words)


if __name__ == "__main__":
    sys.exit(main())
